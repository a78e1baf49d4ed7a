"""The schedules that drain the pipeline at every update: `gpipe`, `1f1b` and `interleaved`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from bo_tuner.errors import ConfigError
from bo_tuner.schedules.actions import Action, Backward, Forward, Update
from bo_tuner.schedules.base import EvenPipeline, Numbers, Schedule, one_by_one, one_by_one_s, positive_part

__all__ = ["GPipe", "Interleaved", "OneFOneB"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flushed(Schedule):
    """Each batch runs alone, on the weights that the one before it made."""

    def _order(self, rank: int, depth: int, n_micro_batches: int, n_batches: int) -> Iterator[Action]:
        n_warm_up = self._warm_up(rank, depth, n_micro_batches)
        for batch in range(n_batches):
            # As many micro-batches as there are ranks go through one chunk, then through the next.
            forwards: list[Forward] = []
            backwards: list[Backward] = []
            for number in range(n_micro_batches * self.n_chunks):
                group, place = divmod(number, depth * self.n_chunks)
                chunk, member = divmod(place, depth)
                micro_batch = batch * n_micro_batches + group * depth + member
                forwards.append(Forward(micro_batch, chunk, version=batch))
                backwards.append(Backward(micro_batch, self.n_chunks - 1 - chunk))
            yield from one_by_one(forwards, backwards, n_warm_up)
            yield Update(batch)

    @abstractmethod
    def _warm_up(self, rank: Numbers, depth: Numbers, n_micro_batches: Numbers) -> Numbers:
        """Forward passes before the first one that a backward pass follows, where there are so many."""

    def peak_held(self, rank: Numbers, *, depth: Numbers, n_micro_batches: Numbers) -> Numbers:
        n_passes = n_micro_batches * self.n_chunks
        return n_passes - positive_part(n_passes - 1 - self._warm_up(rank, depth, n_micro_batches))


@dataclass(frozen=True, slots=True, kw_only=True)
class GPipe(_Flushed):
    """All forward passes, then all backward passes, both in order of micro-batches (GPipe, arXiv 1811.06965)."""

    name: ClassVar[str] = "gpipe"

    def _warm_up(self, rank: Numbers, depth: Numbers, n_micro_batches: Numbers) -> Numbers:
        return n_micro_batches

    def period_s(self, pipeline: EvenPipeline) -> Numbers:
        """Filling and draining cost the work of depth - 1 micro-batches, and a message at every boundary each."""
        depth = pipeline.depth
        work_s = (pipeline.n_micro_batches + depth - 1) * pipeline.work_s + 2 * (depth - 1) * pipeline.message_s
        return work_s + pipeline.update_s + pipeline.all_reduce_s


@dataclass(frozen=True, slots=True, kw_only=True)
class OneFOneB(_Flushed):
    """As few forward passes ahead as keep every rank busy: PipeDream-Flush (arXiv 2006.09503, section 3.2)."""

    name: ClassVar[str] = "1f1b"

    def _warm_up(self, rank: Numbers, depth: Numbers, n_micro_batches: Numbers) -> Numbers:
        return depth - 1 - rank

    def period_s(self, pipeline: EvenPipeline) -> Numbers:
        return one_by_one_s(pipeline, pipeline.n_micro_batches) + pipeline.update_s + pipeline.all_reduce_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Interleaved(_Flushed):
    """1F1B with several chunks per rank: less bubble, more messages (Megatron-LM, arXiv 2104.04473, section 2.2.2)."""

    name: ClassVar[str] = "interleaved"
    rule: ClassVar[str] = "depth and n_micro_batches must be at least 1, and depth must divide n_micro_batches"
    n_chunks: int = 2

    def __post_init__(self) -> None:
        if self.n_chunks < 2:
            raise ConfigError(f"n_chunks must be at least 2 with interleaved, got {self.n_chunks}; with one it is 1f1b")

    def is_legal(self, *, depth: Numbers, n_micro_batches: Numbers) -> Numbers:
        return (depth >= 1) & (n_micro_batches >= 1) & (n_micro_batches % depth == 0)

    def _warm_up(self, rank: Numbers, depth: Numbers, n_micro_batches: Numbers) -> Numbers:
        return 2 * (depth - 1 - rank) + (self.n_chunks - 1) * depth

    def period_s(self, pipeline: EvenPipeline) -> Numbers:
        """Exact as long as a message takes no longer than the shorter pass of a chunk; else an upper bound.

        Up to there the warm-up, twice that of 1F1B, hides all messages but those of the first micro-batch on its way
        down and of the last one on its way up. Beyond, the longest chain of waiting grows by at most one message per
        pass on it, and no chain has more than 2 (n_micro_batches n_chunks + depth - 1) passes.
        """
        depth, message_s = pipeline.depth, pipeline.message_s
        n_passes = pipeline.n_micro_batches * self.n_chunks + depth - 1
        n_hops = depth * self.n_chunks - 1
        shorter_s = pipeline.forward_s - positive_part(pipeline.forward_s - pipeline.backward_s)
        waited_s = positive_part(message_s - shorter_s / self.n_chunks)
        work_s = (
            n_passes * pipeline.work_s / self.n_chunks + 2 * n_hops * message_s + 2 * (n_passes - n_hops) * waited_s
        )
        return work_s + pipeline.update_s + pipeline.all_reduce_s
