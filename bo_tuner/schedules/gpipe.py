"""`gpipe`: all forward passes, then all backward passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bo_tuner.schedules.base import Numbers, Pipeline
from bo_tuner.schedules.flushed import Flushed

__all__ = ["GPipe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GPipe(Flushed):
    """All forward passes, then all backward passes, both in order of micro-batches (GPipe, arXiv 1811.06965)."""

    name: ClassVar[str] = "gpipe"

    def _warm_up(self, rank: Numbers, depth: Numbers, n_micro_batches: Numbers) -> Numbers:
        return n_micro_batches

    def exchange_s(self, pipeline: Pipeline) -> Numbers:
        """Filling and draining cost a message at every boundary each."""
        return 2 * (pipeline.depth - 1) * pipeline.message_s
