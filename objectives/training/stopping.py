"""`StoppingRule`: when a trial has measured enough, or need not go on."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bo_tuner.outcome import TrialLimits
from bo_tuner.precision import median_interval, settled_from

__all__ = ["RankStep", "StoppingRule"]

_ENOUGH_S = 4.0
"""Without a limit on steps, a trial that cannot be measured to its target ends after this, ..."""
_FEWEST_STEPS = 6
"""... unless it has made fewer steps than these; ..."""
_MOST_STEPS = 100
"""... and after these however short they are."""
_LEAST_MEASURED_S = 0.5
"""Steps of milliseconds that agree within a blink may all lie in one of the machine's moods."""


@dataclass(frozen=True, slots=True)
class RankStep:
    """One optimizer step of one rank."""

    total_s: float
    engine_s: float


class StoppingRule:
    """Takes every rank's steps as they come and says when the trial may end.

    The warm-up lasts until step times have settled. Then steps are measured until the interval of their median is narrow
    enough, or lies below the incumbent as a whole, or no more steps are allowed. The slowest rank sets the time of a step.

    The supervisor decides, and then kills the ranks: they need not agree on a last step, and no time goes into an orderly
    exit.
    """

    def __init__(self, limits: TrialLimits, *, n_ranks: int, global_batch: int) -> None:
        self._limits = limits
        self._global_batch = global_batch
        self._steps: list[list[RankStep]] = [[] for _ in range(n_ranks)]
        self._slowest_s: list[float] = []
        self._settled: int | None = None
        self.is_settled = False
        """Step times do not drift any more, as far as the newest steps show."""
        self.is_done = False
        """The trial may end."""
        self.bound_samples_per_s: float | None = None
        """Once it is known that the trial is slower than the incumbent: it is slower than this."""

    def add(self, rank: int, step: RankStep) -> None:
        """A step that `rank` has finished."""
        self._steps[rank].append(step)
        while not self.is_done and self.n_finished > len(self._slowest_s):
            column = [steps[len(self._slowest_s)] for steps in self._steps]
            self._slowest_s.append(max(step.total_s for step in column))
            self._judge()

    @property
    def n_finished(self) -> int:
        """Steps that every rank has finished, warm-up included."""
        return min(len(steps) for steps in self._steps)

    @property
    def n_steps(self) -> int:
        """Steps that the trial makes at most, as far as can be told."""
        if self._limits.max_steps is not None:
            return self._limits.max_steps
        if not self._slowest_s:
            return _FEWEST_STEPS
        return min(max(math.ceil(_ENOUGH_S / statistics.median(self._slowest_s)), _FEWEST_STEPS), _MOST_STEPS)

    @property
    def is_warm(self) -> bool:
        """The warm-up is over."""
        return self._settled is not None

    @property
    def n_warmup(self) -> int:
        """Steps that do not count; half of them where step times never settled."""
        return self._settled if self._settled is not None else len(self._slowest_s) // 2

    def measured(self) -> Sequence[Sequence[RankStep]]:
        """The steps that count: one row a rank, equally long."""
        return [steps[self.n_warmup : len(self._slowest_s)] for steps in self._steps]

    def _judge(self) -> None:
        settled = settled_from(self._slowest_s, tolerance=self._limits.precision_target, at_least=self._settled or 1)
        self.is_settled = settled is not None
        self._settled = settled if settled is not None else self._settled
        is_last = self._is_last()
        if settled is not None:
            self._judge_interval(self._slowest_s[settled:], is_last=is_last)
        self.is_done |= is_last

    def _is_last(self) -> bool:
        n, most = len(self._slowest_s), self._limits.max_steps
        if most is not None:
            return n >= most
        if n - (self._settled or 1) < self._limits.min_steps:
            return False
        return n >= _MOST_STEPS or (n >= _FEWEST_STEPS and sum(self._slowest_s) >= _ENOUGH_S)

    def _judge_interval(self, times_s: Sequence[float], *, is_last: bool) -> None:
        if sum(times_s) < _LEAST_MEASURED_S and not is_last:
            return
        middle = statistics.median(times_s)
        low, high = median_interval(times_s)
        incumbent = self._limits.incumbent_samples_per_s
        fastest_s = middle - math.hypot(middle - low, self._limits.launch_half_width * middle)
        if incumbent is not None and fastest_s > self._global_batch / incumbent:
            self.bound_samples_per_s = self._global_batch / fastest_s
            self.is_done = True
        elif len(times_s) >= self._limits.min_steps and high - low <= self._limits.precision_target * middle:
            self.is_done = True
