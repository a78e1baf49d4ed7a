"""`StoppingRule`: when a trial has measured enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bo_tuner.outcome import TrialLimits

__all__ = ["RankStep", "StoppingRule"]

_ENOUGH_MEASURED_S = 8.0
"""Long steps vary little: past this, three measured steps will do."""
_FEWEST_MEASURED = 3


@dataclass(frozen=True, slots=True)
class RankStep:
    """One optimizer step of one rank."""

    total_s: float
    engine_s: float


class StoppingRule:
    """Takes every rank's steps as they come and says when the trial may end.

    The supervisor decides, and then kills the ranks: they need not agree on a last step, and no time goes into an orderly
    exit.
    """

    def __init__(self, limits: TrialLimits, *, n_ranks: int) -> None:
        self._warmup = limits.warmup_steps
        self._max_steps = max(limits.max_steps, self._warmup + 1)
        self._steps: list[list[RankStep]] = [[] for _ in range(n_ranks)]

    def add(self, rank: int, step: RankStep) -> None:
        """A step that `rank` has finished."""
        self._steps[rank].append(step)

    @property
    def n_finished(self) -> int:
        """Steps that every rank has finished, warm-up included."""
        return min(len(steps) for steps in self._steps)

    @property
    def is_warm(self) -> bool:
        """The warm-up is over."""
        return self.n_finished >= self._warmup

    @property
    def is_done(self) -> bool:
        """Enough steps are measured."""
        n_measured = self.n_finished - self._warmup
        if self.n_finished >= self._max_steps:
            return True
        return n_measured >= _FEWEST_MEASURED and sum(self._slowest()) >= _ENOUGH_MEASURED_S

    def measured(self) -> Sequence[Sequence[RankStep]]:
        """The steps that count: one row a rank, equally long."""
        return [steps[self._warmup : self.n_finished] for steps in self._steps]

    def _slowest(self) -> list[float]:
        return [max(step.total_s for step in column) for column in zip(*self.measured(), strict=True)]
