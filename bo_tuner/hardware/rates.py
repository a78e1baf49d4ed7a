"""`Hardware`: the rates of one device and of what joins devices, from a data sheet or measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from bo_tuner.stored import known_fields

__all__ = ["Hardware", "Link", "MatmulRate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What messages pass through."""

    bytes_per_s: float
    """In one direction, while the other direction is as busy."""
    latency_s: float
    """Of one message, however small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulRate:
    """How fast matrix products with weights run: a share of the peak that falls at few tokens and at narrow matrices.

    The rate of n tokens times a matrix of width k is peak x share x n / (n + half_tokens) x k / (k + half_width).
    """

    peak_flops_per_s: float
    """Of the data sheet, dense, for the precision trained in; of a calibration the fastest seen."""
    share: float
    """Of the peak that large products reach; a calibration that met none may see it rise beyond its peak, to over 1."""
    half_tokens: float
    """Tokens at which half of that is reached."""
    half_width: float
    """Width at which half of that is reached."""

    def flops_per_s(self, *, n_tokens: float, width: float) -> float:
        """Rate of products of `n_tokens` rows with a matrix that is `width` wide."""
        fullness = n_tokens / (n_tokens + self.half_tokens) * width / (width + self.half_width)
        return self.peak_flops_per_s * self.share * fullness


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One kind of device, in one precision, and what joins several."""

    name: str
    """`A100-80GB`, or what the driver or the kernel calls it."""
    memory_bytes: int
    """Of one device."""
    memory_bytes_per_s: float
    """Of that memory."""
    matmul: MatmulRate
    attention_flops_per_s: float
    """That products of activations with each other reach."""
    inside: Link
    """Between the devices of a node; bytes/s of one device."""
    between: Link
    """Between nodes; bytes/s of a whole node. A calibration of one node, which has none, gives `inside`."""
    node_size: int
    """Devices of a node that are used."""
    operation_s: float
    """Host time to launch one operation: below it no kernel pays."""
    launches_ahead: bool = True
    """The host queues operations and goes on, as for a GPU; False where it does the work itself."""
    wide_s_per_byte: float = 0.0
    """What a product with a matrix many times as wide as it is long takes beyond the rate of `matmul`, for each byte on its wide side."""
    gather_bytes_per_s: float | None = None
    """Of one device's ring in an all-gather, which gloo makes slower than an all-reduce; None where it is that of `inside`."""
    update_s: float | None = None
    """Of one parameter by Adam; None as long as its memory traffic takes."""
    source: str
    """Data sheets, or `measured here`."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Hardware:
        """The inverse of `to_dict`."""
        parts: dict[str, Any] = {
            **known_fields(cls, data),
            "matmul": MatmulRate(**known_fields(MatmulRate, data["matmul"])),
            "inside": Link(**known_fields(Link, data["inside"])),
            "between": Link(**known_fields(Link, data["between"])),
        }
        return cls(**parts)
