"""`2bw`: never drained, at the price of a second version of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from bo_tuner.schedules.actions import Action, Backward, Forward, Update
from bo_tuner.schedules.base import Numbers, Pipeline, Schedule, one_by_one, one_by_one_exchange_s, positive_part

__all__ = ["TwoBW"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoBW(Schedule):
    """1F1B from first batch to last, on weights one update old (PipeDream-2BW, arXiv 2006.09503, section 3.1).

    Batch t computes its gradient on version max(t - 1, 0) on every rank, so no more than that and the newest are
    needed. The paper asks for depth micro-batches per update; one fewer would do, with no time for the all-reduce of
    rank 0.
    """

    name: ClassVar[str] = "2bw"
    rule: ClassVar[str] = "depth must be at least 1, and n_micro_batches at least depth"
    n_weight_versions: ClassVar[int] = 2
    changes_training: ClassVar[str] = "its gradients are one optimizer step old"
    drains: ClassVar[bool] = False
    needs_even_blocks: ClassVar[bool] = True

    def is_legal(self, *, depth: Numbers, n_micro_batches: Numbers) -> Numbers:
        return (depth >= 1) & (n_micro_batches >= depth)

    def _order(self, rank: int, depth: int, n_micro_batches: int, n_batches: int) -> Iterator[Action]:
        micro_batches = range(n_micro_batches * n_batches)
        forwards = [Forward(number, version=max(number // n_micro_batches - 1, 0)) for number in micro_batches]
        backwards = [Backward(number) for number in micro_batches]
        for action in one_by_one(forwards, backwards, depth - 1 - rank):
            yield action
            if isinstance(action, Backward) and (action.micro_batch + 1) % n_micro_batches == 0:
                yield Update(action.micro_batch // n_micro_batches)

    def peak_held(self, rank: Numbers, *, depth: Numbers, n_micro_batches: Numbers) -> Numbers:
        return n_micro_batches - positive_part(n_micro_batches - (depth - rank))

    def bubble_s(self, pipeline: Pipeline) -> Numbers:
        return 0.0 * pipeline.work_s

    def exchange_s(self, pipeline: Pipeline) -> Numbers:
        """Rank 0 has depth micro-batches under way, so each costs its share of a round trip, which is depth times the work
        of one and 2 (depth - 1) messages.

        Exact from two ranks on while update and all-reduce take no time; else an upper bound.
        """
        return 2 * (pipeline.n_micro_batches * (pipeline.depth - 1) / pipeline.depth) * pipeline.message_s

    def exposed_s(self, pipeline: Pipeline) -> Numbers:
        """Between the last backward pass of a batch and the first forward pass that reads its weights lie n_micro_batches + 1 - depth
        micro-batches, fewest on rank 0; what the all-reduce takes beyond them is waited for.
        """
        micro_batch_s = pipeline.work_s + self.exchange_s(pipeline) / pipeline.n_micro_batches
        return positive_part(pipeline.all_reduce_s - (pipeline.n_micro_batches + 1 - pipeline.depth) * micro_batch_s)

    def makespan_s(self, pipeline: Pipeline, n_batches: Numbers) -> Numbers:
        """The pipeline fills and drains once. Exact where `period_s` is; else an upper bound.

        The first two batches read the weights that are there. The last all-reduce starts after the one before it.
        """
        m, work_s = pipeline.n_micro_batches, pipeline.work_s
        exposed_s = positive_part(pipeline.all_reduce_s - (m + 1 - pipeline.depth) * work_s)
        queued_s = positive_part(pipeline.all_reduce_s - m * work_s - pipeline.update_s)
        return (
            n_batches * m * work_s
            + pipeline.passage_s
            - work_s
            + one_by_one_exchange_s(pipeline, n_batches * m)
            + n_batches * pipeline.update_s
            + positive_part(n_batches - 2) * exposed_s
            + (n_batches >= 2) * queued_s
            + pipeline.all_reduce_s
        )
