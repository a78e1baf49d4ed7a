"""`interleaved`: several chunks of layers per rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bo_tuner.errors import ConfigError
from bo_tuner.schedules.base import Numbers, Pipeline, positive_part
from bo_tuner.schedules.flushed import Flushed

__all__ = ["Interleaved"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interleaved(Flushed):
    """1F1B with several chunks per rank: less bubble, more messages (Megatron-LM, arXiv 2104.04473, section 2.2.2)."""

    name: ClassVar[str] = "interleaved"
    rule: ClassVar[str] = "depth and n_micro_batches must be at least 1, and depth must divide n_micro_batches"
    has_chunks: ClassVar[bool] = True
    n_chunks: int = 2

    def is_legal(self, *, depth: Numbers, n_micro_batches: Numbers) -> Numbers:
        return (depth >= 1) & (n_micro_batches >= 1) & (n_micro_batches % depth == 0)

    def __post_init__(self) -> None:
        if self.n_chunks < 2:
            raise ConfigError(f"n_chunks must be at least 2 with interleaved, got {self.n_chunks}; with one it is 1f1b")

    def _warm_up(self, rank: Numbers, depth: Numbers, n_micro_batches: Numbers) -> Numbers:
        return 2 * (depth - 1 - rank) + (self.n_chunks - 1) * depth

    def exchange_s(self, pipeline: Pipeline) -> Numbers:
        """Exact on stages alike as long as a message takes no longer than the shorter pass of a chunk; else an upper bound.

        Up to there the warm-up, twice that of 1F1B, hides all messages but those of the first micro-batch on its way
        down and of the last one on its way up. Beyond, the longest chain of waiting grows by at most one message per
        pass on it, and no chain has more than 2 (n_micro_batches n_chunks + depth - 1) passes.
        """
        depth, message_s = pipeline.depth, pipeline.message_s
        n_passes = pipeline.n_micro_batches * self.n_chunks + depth - 1
        n_hops = depth * self.n_chunks - 1
        shorter_s = pipeline.forward_s - positive_part(pipeline.forward_s - pipeline.backward_s)
        waited_s = positive_part(message_s - shorter_s / self.n_chunks)
        return 2 * n_hops * message_s + 2 * (n_passes - n_hops) * waited_s
