# eager_schedule.py
"""`eager`: 1F1B that runs further ahead, so that messages are hidden behind passes."""

from dataclasses import dataclass
from typing import ClassVar

from bo_tuner.schedules import Numbers, Pipeline, positive_part
from bo_tuner.schedules.flushed import Flushed


@dataclass(frozen=True, slots=True, kw_only=True)
class Eager(Flushed):
    """1F1B with twice the warm-up: a stage keeps more micro-batches, and waits for fewer messages."""

    name: ClassVar[str] = "eager"

    def _warm_up(self, rank: Numbers, depth: Numbers, n_micro_batches: Numbers) -> Numbers:
        return 2 * (depth - 1 - rank)

    def exchange_s(self, pipeline: Pipeline) -> Numbers:
        """Messages to fill and to drain; where one takes longer than a pass, what is beyond that in every pass between."""
        shorter_s = pipeline.forward_s - positive_part(pipeline.forward_s - pipeline.backward_s)
        beyond_s = positive_part(pipeline.message_s - shorter_s)
        return 2 * (pipeline.depth - 1) * pipeline.message_s + 2 * pipeline.n_micro_batches * beyond_s
