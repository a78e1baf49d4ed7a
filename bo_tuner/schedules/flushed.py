"""`Flushed`: what schedules have in common that drain the pipeline at every update."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from bo_tuner.schedules.actions import Action, Backward, Forward, Update
from bo_tuner.schedules.base import Numbers, Pipeline, Schedule, one_by_one, positive_part

__all__ = ["Flushed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flushed(Schedule):
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

    def bubble_s(self, pipeline: Pipeline) -> Numbers:
        """One micro-batch on all other ranks, or a chunk of each (Megatron-LM, arXiv 2104.04473, section 2.2)."""
        return (pipeline.passage_s - pipeline.work_s) / self.n_chunks
