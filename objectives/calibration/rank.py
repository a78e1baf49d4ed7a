"""What one rank of a calibration does: join the group, and time its work while all other ranks do the same."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bo_tuner.hardware import ProductReading
from bo_tuner.objectives.calibration.readings import LinkReading, Readings, WideReading
from bo_tuner.objectives.launch.channel import Channel

__all__ = ["measure"]

_TOKENS = (16, 128, 1024, 8192)
_WIDTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
_USUAL = (256, 512)
"""Tokens and width of the product that tells which others would take too long."""
_LONGEST_PRODUCT_S = 0.015
"""Forward and backward; on a core of 2022 about 1024 tokens of width 500."""
_N_ROUNDS = 3
"""Of everything, since whatever disturbs lasts for a while; the best counts."""
_TIMED_S = 0.01
"""Each reading of a round goes on for so long, and for `_FEWEST` repeats."""
_FEWEST = 4
_SHORTEST_S = 1e-3
"""Shorter work is timed several times over at once, so that neither clock nor synchronisation counts."""
_LONG_S = 1e-2
"""Work whose first go, which may load a kernel, takes longer needs no second to warm up."""
_VOCABULARY = 50_257
"""Columns of the logits that memory and wide products are measured with: GPT-2's. Like BERT's 30,522 they begin every row elsewhere in a
line of the cache, which slows a product on a CPU by a sixth."""
_NARROW = 128
"""Their matrix's other side: where rows are that short, writing logits costs as much as computing them."""
_MOST_WEIGHTS = 16
_N_OPERATIONS = 200
_SMALL_BYTES = 2**10
_N_EXCHANGES = 5


class _Rank:
    """This rank, its device and its peers."""

    def __init__(self, rank: int, spec: dict[str, Any]) -> None:
        self.rank = rank
        self.n_ranks = int(spec["n_ranks"])
        self.on_gpu = spec["device"] == "cuda"
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if self.on_gpu else torch.device("cpu")
        self.dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[spec["precision"]]
        self.large_bytes = 2**28 if self.on_gpu else 2**24
        """Of an exchange; four times as many are larger than any cache."""
        if self.on_gpu:
            torch.cuda.set_device(self.device)
        dist.init_process_group(
            "nccl" if self.on_gpu else "gloo",
            init_method=f"file://{spec['rendezvous']}",
            rank=rank,
            world_size=self.n_ranks,
        )
        self.agree(0.0)  # NCCL connects with the first collective

    def agree(self, value: float) -> float:
        """The least of all ranks' values; returns when all have got here."""
        told = torch.tensor(value, device=self.device)
        dist.all_reduce(told, dist.ReduceOp.MIN)
        return float(told)

    def pool(self, n_elements: int) -> torch.Tensor:
        """Numbers to take operands from, at least so many."""
        n_elements = max(n_elements, 4 * self.large_bytes // self.dtype.itemsize)
        return torch.empty(n_elements, device=self.device, dtype=self.dtype).uniform_(-1.0, 1.0)

    def elapsed(self, work: Callable[[], object], n_times: int = 1) -> float:
        """Seconds that it takes, `n_times` over."""
        started = time.perf_counter()
        for _ in range(n_times):
            work()
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - started

    def seconds(self, work: Callable[[], object]) -> float:
        """Least seconds that `work` takes while all ranks do it."""
        is_long = self.elapsed(work) > _LONG_S
        n_times = 1 if is_long else max(1, int(_SHORTEST_S / self.elapsed(work)))
        self.agree(0.0)
        times: list[float] = []
        until = time.perf_counter() + _TIMED_S
        while len(times) < _FEWEST or time.perf_counter() < until:
            times.append(self.elapsed(work, n_times) / n_times)
        return min(times)

    def exchange_s(self, exchange: Callable[[], object]) -> float:
        """The same for what ranks do together, as often in each."""
        return min(self.elapsed(exchange) for _ in range(_N_EXCHANGES))


def measure(channel: Channel, rank: int, spec_file: Path) -> None:
    """Read everything in the group that the spec describes, and send it as one message."""
    this = _Rank(rank, json.loads(spec_file.read_text(encoding="utf-8")))
    usual = _product(this, this.pool(0), *_USUAL)
    most_flops = this.agree(usual.flops_per_s) * _LONGEST_PRODUCT_S
    sizes = [(n, k) for n, k in itertools.product(_TOKENS, _WIDTHS) if 6 * n * k**2 <= most_flops] or [_USUAL]
    pool = this.pool(max(max(n, k) * k for n, k in sizes))
    readings = Readings.fastest([_round(this, pool, sizes) for _ in range(_N_ROUNDS)])
    dist.destroy_process_group()
    channel.send(asdict(readings))


def _round(this: _Rank, pool: torch.Tensor, sizes: list[tuple[int, int]]) -> Readings:
    return Readings(
        products=tuple(_product(this, pool, *size) for size in sizes),
        wide=_wide(this, pool),
        memory_bytes_per_s=_memory_bytes_per_s(this, pool),
        update_s=_update_s(this),
        operation_s=_operation_s(this, pool),
        all_reduce=_all_reduce(this) if this.n_ranks > 1 else None,
        all_gather=_all_gather(this) if this.n_ranks > 1 else None,
        message=_message(this) if this.n_ranks > 1 else None,
    )


def _product(this: _Rank, pool: torch.Tensor, n_tokens: int, width: int) -> ProductReading:
    """As training makes them: into new tensors, and with other weights each time, which no cache holds if they are large."""
    x, dy = pool[: n_tokens * width].view(n_tokens, width), pool[-n_tokens * width :].view(n_tokens, width)
    n_weights = min(_MOST_WEIGHTS, pool.numel() // width**2)
    weights = itertools.cycle(pool[: n_weights * width**2].view(n_weights, width, width))

    def work() -> None:
        weight = next(weights)
        torch.mm(x, weight.t())
        torch.mm(dy, weight)
        torch.mm(dy.t(), x)

    return ProductReading(n_tokens=n_tokens, width=width, seconds=this.seconds(work))


def _wide(this: _Rank, pool: torch.Tensor) -> WideReading:
    """The same with the matrix of a vocabulary, whose logits no cache holds."""
    n_tokens = this.large_bytes // this.dtype.itemsize // _VOCABULARY
    x, weight = pool[: n_tokens * _NARROW].view(n_tokens, -1), pool[: _VOCABULARY * _NARROW].view(_VOCABULARY, -1)
    dy = pool[-n_tokens * _VOCABULARY :].view(n_tokens, -1)

    def work() -> None:
        torch.mm(x, weight.t())
        torch.mm(dy, weight)
        torch.mm(dy.t(), x)

    return WideReading(
        n_tokens=n_tokens,
        width=_NARROW,
        n_columns=_VOCABULARY,
        element_bytes=this.dtype.itemsize,
        seconds=this.seconds(work),
    )


def _update_s(this: _Rank) -> float:
    """By torch's own Adam, as trials have it, of fp32 as in mixed precision too."""
    weights = torch.zeros(this.large_bytes // 4, device=this.device, requires_grad=True)
    weights.grad = torch.ones_like(weights)
    adam = torch.optim.AdamW([weights], fused=True if this.device.type == "cuda" else None)
    return this.seconds(adam.step) / weights.numel()


def _memory_bytes_per_s(this: _Rank, pool: torch.Tensor) -> float:
    """By the loss of a model, whose logits are the largest tensors that training makes and writes anew in every pass.

    A trace counts three of their size in its forward pass (the logarithm of the softmax reads and writes, the loss reads), and the
    cost model twice as many in the backward pass.
    """
    logits = pool[: this.large_bytes // 4 // _VOCABULARY * _VOCABULARY].view(-1, _VOCABULARY).float().requires_grad_()
    labels = torch.zeros(len(logits), device=this.device, dtype=torch.long)

    def work() -> None:
        logits.grad = None
        nn.functional.cross_entropy(logits, labels).backward()

    return 9 * logits.numel() * logits.itemsize / this.seconds(work)


def _operation_s(this: _Rank, pool: torch.Tensor) -> float:
    small = pool[:16].clone().requires_grad_()

    def work() -> None:
        for _ in range(_N_OPERATIONS):
            torch.mul(small, small)

    return this.seconds(work) / _N_OPERATIONS


def _all_reduce(this: _Rank) -> LinkReading:
    def seconds(n_bytes: int) -> float:
        tensor = torch.zeros(n_bytes // 4, device=this.device)
        return this.exchange_s(lambda: dist.all_reduce(tensor))

    return _link_reading(this, seconds)


def _all_gather(this: _Rank) -> LinkReading:
    def seconds(n_bytes: int) -> float:
        share = torch.zeros(n_bytes // 4 // this.n_ranks, device=this.device)
        whole = torch.zeros(share.numel() * this.n_ranks, device=this.device)
        # An older torch has no other.
        return this.exchange_s(lambda: dist.all_gather_into_tensor(whole, share))  # pyright: ignore[reportDeprecated]

    return _link_reading(this, seconds)


def _message(this: _Rank) -> LinkReading:
    following, last = (this.rank + 1) % this.n_ranks, (this.rank - 1) % this.n_ranks

    def seconds(n_bytes: int) -> float:
        sent, got = (torch.zeros(n_bytes // 4, device=this.device) for _ in range(2))

        def exchange() -> None:
            operations = [dist.P2POp(dist.isend, sent, following), dist.P2POp(dist.irecv, got, last)]
            for handle in dist.batch_isend_irecv(operations):
                handle.wait()

        return this.exchange_s(exchange)

    return _link_reading(this, seconds)


def _link_reading(this: _Rank, seconds: Callable[[int], float]) -> LinkReading:
    return LinkReading(
        small_bytes=_SMALL_BYTES,
        small_s=seconds(_SMALL_BYTES),
        large_bytes=this.large_bytes,
        large_s=seconds(this.large_bytes),
    )
