"""`Readings`: what a calibration read of one rank, or of the slowest of several, and the rates that follow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bo_tuner.cluster import Cluster
from bo_tuner.hardware import Hardware, Link, MatmulRate, ProductReading, fit_matmul

__all__ = ["LinkReading", "Readings", "WideReading"]

_OF_ATTENTION = 0.5
"""Rate of products of activations, many small ones at once, over that of the largest product. Guessed once."""
_SOURCE = "measured here"
_N_LAUNCHES = 3
"""Of a `ProductReading`."""
_HOST_BOUND = 2.0
"""A product that takes less than so many launches tells of the host, not of the device."""
_Pick = Callable[[Iterable[float]], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkReading:
    """Time of a small and of a large all-reduce or all-gather, or of a message to the next rank while one comes from the last."""

    small_bytes: int
    small_s: float
    large_bytes: int
    large_s: float

    def link(self, *, n_steps: float, share: float) -> Link:
        """What each step passes through.

        Args:
            n_steps: Messages that follow upon one another.
            share: Of the bytes, what each rank sends in all.
        """
        sent_s = max(self.large_s - self.small_s, self.large_s / 10)  # of small ones that noise made slow
        sent_bytes = share * (self.large_bytes - self.small_bytes)
        return Link(bytes_per_s=sent_bytes / sent_s, latency_s=self.small_s / n_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class WideReading:
    """How long the three products of logits took: x W, dy W and dy x with a long and narrow W."""

    n_tokens: int
    width: int
    """Features of x."""
    n_columns: int
    """Of the logits."""
    element_bytes: int
    seconds: float

    def s_per_byte(self, matmul: MatmulRate) -> float:
        """Of logits, what one product takes beyond the rate of square ones of that width."""
        flops = 6 * self.n_tokens * self.width * self.n_columns
        beyond_s = self.seconds - flops / matmul.flops_per_s(n_tokens=self.n_tokens, width=self.width)
        return max(beyond_s, 0.0) / (3 * self.n_tokens * self.n_columns * self.element_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """Rates while all ranks work at the same time, as they do in training."""

    products: tuple[ProductReading, ...]
    """Three products each, of a layer's forward and backward pass."""
    wide: WideReading
    memory_bytes_per_s: float
    """Of the loss of logits: what it reads and writes, into new tensors."""
    update_s: float
    """Of one parameter by Adam."""
    operation_s: float
    """Host time of a multiplication of small tensors, recorded for the backward pass; on a CPU with its execution."""
    all_reduce: LinkReading | None = None
    """None of one rank."""
    all_gather: LinkReading | None = None
    """Likewise; bytes of the whole."""
    message: LinkReading | None = None
    """Likewise."""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Readings:
        """From plain data that JSON can hold."""
        parts: dict[str, Any] = {**data, "products": tuple(ProductReading(**product) for product in data["products"])}
        parts["wide"] = WideReading(**data["wide"])
        parts |= {name: data[name] and LinkReading(**data[name]) for name in ("all_reduce", "all_gather", "message")}
        return cls(**parts)

    @classmethod
    def fastest(cls, rounds: Sequence[Readings]) -> Readings:
        """Of every figure the best of several rounds in one rank: what else the machine does only adds."""
        return cls._picked(rounds, high=max, low=min)

    @classmethod
    def slowest(cls, ranks: Sequence[Readings]) -> Readings:
        """Of every figure the worst rank's, since all wait for it."""
        return cls._picked(ranks, high=min, low=max)

    @classmethod
    def _picked(cls, readings: Sequence[Readings], *, high: _Pick, low: _Pick) -> Readings:
        """`high` chooses among rates, `low` among times."""

        def link(found: Sequence[LinkReading | None]) -> LinkReading | None:
            known = [reading for reading in found if reading is not None]
            if not known:
                return None
            small_s, large_s = low(reading.small_s for reading in known), low(reading.large_s for reading in known)
            return replace(known[0], small_s=small_s, large_s=large_s)

        products = zip(*(reading.products for reading in readings), strict=True)
        return cls(
            products=tuple(replace(same[0], seconds=low(product.seconds for product in same)) for same in products),
            wide=replace(readings[0].wide, seconds=low(reading.wide.seconds for reading in readings)),
            memory_bytes_per_s=high(reading.memory_bytes_per_s for reading in readings),
            update_s=low(reading.update_s for reading in readings),
            operation_s=low(reading.operation_s for reading in readings),
            all_reduce=link([reading.all_reduce for reading in readings]),
            all_gather=link([reading.all_gather for reading in readings]),
            message=link([reading.message for reading in readings]),
        )

    def hardware(self, cluster: Cluster) -> Hardware:
        """The rates of `cluster`, whose ranks these are of.

        A ring all-reduce among n ranks takes 2(n - 1) steps, in which each rank sends 2(n - 1)/n of the bytes (Patarasuk and
        Yuan 2009, section 3), an all-gather half of both. One rank sends to itself: at its memory's rate, without delay.
        """
        n = cluster.n_ranks
        link = Link(bytes_per_s=self.memory_bytes_per_s, latency_s=0.0)
        if self.all_reduce is not None:
            link = self.all_reduce.link(n_steps=2 * (n - 1), share=2 * (n - 1) / n)
        gather = self.all_gather and self.all_gather.link(n_steps=n - 1, share=(n - 1) / n)
        matmul = fit_matmul([*filter(self._is_device_bound, self.products)] or self.products)
        return Hardware(
            name=cluster.device_name,
            memory_bytes=cluster.memory_bytes,
            memory_bytes_per_s=self.memory_bytes_per_s,
            matmul=matmul,
            attention_flops_per_s=_OF_ATTENTION * matmul.peak_flops_per_s,
            inside=link,
            between=link,
            node_size=n // cluster.n_nodes,
            operation_s=self.operation_s,
            launches_ahead=cluster.device == "cuda",
            wide_s_per_byte=self.wide.s_per_byte(matmul),
            gather_bytes_per_s=gather.bytes_per_s if gather else None,
            update_s=self.update_s,
            source=_SOURCE,
        )

    def _is_device_bound(self, product: ProductReading) -> bool:
        return product.seconds > _HOST_BOUND * _N_LAUNCHES * self.operation_s
