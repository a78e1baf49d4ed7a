"""`1f1b`: as few forward passes ahead as keep every rank busy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bo_tuner.schedules.base import Numbers, Pipeline, one_by_one_exchange_s
from bo_tuner.schedules.flushed import Flushed

__all__ = ["OneFOneB"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OneFOneB(Flushed):
    """As few forward passes ahead as keep every rank busy: PipeDream-Flush (arXiv 2006.09503, section 3.2)."""

    name: ClassVar[str] = "1f1b"
    back_ends: ClassVar[frozenset[str]] = frozenset({"deepspeed"})

    def _warm_up(self, rank: Numbers, depth: Numbers, n_micro_batches: Numbers) -> Numbers:
        return depth - 1 - rank

    def exchange_s(self, pipeline: Pipeline) -> Numbers:
        return one_by_one_exchange_s(pipeline, pipeline.n_micro_batches)
