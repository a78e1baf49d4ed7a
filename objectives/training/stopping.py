"""`StoppingRule`: when a trial has measured enough, or need not go on."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bo_tuner.launches import far_by_steps
from bo_tuner.outcome import TrialLimits
from bo_tuner.pace import pace
from bo_tuner.precision import settled_from

__all__ = ["RankStep", "StoppingRule"]

_ENOUGH_S = 4.0
"""Without a limit on steps, a trial that cannot be measured to its target ends after this, the first step left out, ..."""
_ENOUGH_STEPS = 6
"""... unless it has made fewer steps than these, the first of which is warm-up; ..."""
_LONG_S = 8.0
"""... long steps end a trial after this, ..."""
_FEWEST_STEPS = 4
"""... unless it has made fewer than these; ..."""
_MOST_STEPS = 100
"""... and after these, once they fill the time that is measured at least."""
_FEWEST_MEASURED = 3
"""Steps that count where step times never settled, if there are as many after the first."""
LEAST_MEASURED_S = 0.5
"""Steps of milliseconds that agree within a blink may all lie in one of the machine's moods; ..."""
_SEEN_STEPS = 17
"""... and steps that agree may all lie between two stalls of a data loader, which has seldom more workers than this less one: so many are
measured, ..."""
_SEEN_S = 2.0
"""... unless they take longer than this."""
_WAITS = 0.01
"""Of the time of steps: so much is waited for data in some of them and not in the others."""
_JUDGED_EVERY = 1.05
"""Many steps are judged again once there are so many times as many: a judgement costs the more, the more there are."""
_SURELY_LONG_S = 0.5
"""Steps this long are so dear that a trial is ended before its warm-up is over ..."""
_SURELY_SLOWER = (0.7, 0.4, 0.3)
"""... where the fastest of 1, 2, 3 steps after the first is longer than the incumbent's by this fraction, beyond what launches differ by.
Where steps differed by 16 to 52 %, on two cores shared with other work, they end 5 % of windows of three steps wrongly that are 5 % slower than the
incumbent, once launches are known to within 15 % (docs/validation.md)."""


@dataclass(frozen=True, slots=True)
class RankStep:
    """One optimizer step of one rank."""

    total_s: float
    engine_s: float


class StoppingRule:
    """Takes every rank's steps as they come and says when the trial may end.

    The warm-up lasts until step times have settled. Then steps are measured until the interval of their mean is narrow enough, or lies
    below the incumbent as a whole, or no more steps are allowed. A trial that has run all its steps is complete, however slow. Long
    steps of which even the fastest is far too slow end a trial earlier. The slowest rank sets the time of a step.

    The supervisor decides, and then kills the ranks: they need not agree on a last step, and no time goes into an orderly
    exit.
    """

    def __init__(
        self, limits: TrialLimits, *, n_ranks: int, global_batch: int, least_measured_s: float = LEAST_MEASURED_S
    ) -> None:
        """Judge the steps of `n_ranks` that are `global_batch` samples each, of which `least_measured_s` seconds are to count."""
        self._limits = limits
        self._least_measured_s = least_measured_s
        self._judged = 0
        self._global_batch = global_batch
        self._steps: list[list[RankStep]] = [[] for _ in range(n_ranks)]
        self._slowest_s: list[float] = []
        self._settled: int | None = None
        self.loader_period = 1
        """Steps after which the workers of a data loader, if they hold up any, hold up another one."""
        self.is_settled = False
        """Step times do not drift any more, as far as the newest steps show."""
        self.is_done = False
        """The trial may end."""
        self.steps_bound_samples_per_s: float | None = None
        """What its steps alone leave it to reach at most, once `bound_samples_per_s` is known."""
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
        usual_s = statistics.median(self._slowest_s[1:] or self._slowest_s)
        enough = max(math.ceil(_ENOUGH_S / usual_s) + 1, _ENOUGH_STEPS)
        return min(enough, max(math.ceil(_LONG_S / usual_s) + 1, _FEWEST_STEPS), _MOST_STEPS)

    @property
    def phase(self) -> str:
        """What the newest step was for, as far as can be told: `warmup` or `measure`."""
        is_unsettled = self._settled is None and len(self._slowest_s) >= _FEWEST_STEPS
        return "warmup" if len(self._slowest_s) < 2 or is_unsettled else "measure"

    @property
    def n_warmup(self) -> int:
        """Steps that do not count: those before step times settled, but half of all at most, unless less than three were left.

        Steps that are alike to their neighbours seem to drift again and again: they would throw away what tells how much they wander.
        """
        n = len(self._slowest_s)
        half = max(min(n // 2, n - _FEWEST_MEASURED), 1) if n > 1 else 0
        return half if self._settled is None else min(self._settled, half)

    @property
    def measured_s(self) -> float:
        """Seconds of the steps that count; 0 before there are any."""
        return max(math.fsum(step.total_s for step in row) for row in self.measured())

    def measured(self) -> Sequence[Sequence[RankStep]]:
        """The steps that count: one row a rank, equally long."""
        return [steps[self.n_warmup : len(self._slowest_s)] for steps in self._steps]

    @property
    def _least_warmup(self) -> int:
        """The first step, and the second where ranks have just used up what their loaders had ready."""
        return 1 if self.loader_period == 1 else 2

    @property
    def _fewest_seen(self) -> int:
        """Steps that show what a loader's workers do: one that is held up, if any is, and then two whole periods."""
        if self.loader_period == 1:
            return 1
        waits = [[step.total_s - step.engine_s for step in row] for row in self.measured()]
        uneven_s = max(math.fsum(row) - len(row) * min(row, default=0.0) for row in waits)
        return 2 * self.loader_period if uneven_s > _WAITS * self.measured_s else self.loader_period + 1

    def _judge(self) -> None:
        if self._is_last():
            self.is_done = True
        elif len(self._slowest_s) < self._judged * _JUDGED_EVERY:
            return
        self._judged = len(self._slowest_s)
        settled = settled_from(
            self._slowest_s, tolerance=self._limits.precision_target, at_least=self._settled or self._least_warmup
        )
        self.is_settled = settled is not None
        self._settled = settled if settled is not None else self._settled
        if self.is_done:
            return
        if settled is None:
            self._judge_fastest()
        else:
            self._judge_interval()

    def _is_last(self) -> bool:
        n, most = len(self._slowest_s), self._limits.max_steps
        if most is not None:
            return n >= most
        if n - (self._settled or self._least_warmup) < max(self._limits.min_steps, self._fewest_seen):
            return False
        later_s = math.fsum(self._slowest_s[1:])  # the first may take long for what it compiles, reads or waits for
        if (n >= _ENOUGH_STEPS and later_s >= _ENOUGH_S) or (n >= _FEWEST_STEPS and later_s >= _LONG_S):
            return True
        return n >= _MOST_STEPS and self.measured_s >= self._least_measured_s

    def _judge_fastest(self) -> None:
        """Of few long steps: whether they are too slow without any doubt. A warm-up makes steps longer, not shorter."""
        later, incumbent = self._slowest_s[1:], self._limits.incumbent_samples_per_s
        if incumbent is None or not 0 < len(later) <= len(_SURELY_SLOWER) or min(later) < _SURELY_LONG_S:
            return
        self._end_if_slower(min(later), math.log1p(_SURELY_SLOWER[len(later) - 1]), incumbent)

    def _judge_interval(self) -> None:
        times_s = max(([step.total_s for step in row] for row in self.measured()), key=math.fsum)
        measured_s = self.measured_s
        if measured_s < LEAST_MEASURED_S:
            return
        found, incumbent = pace(tuple(times_s), self.loader_period), self._limits.incumbent_samples_per_s
        has_seen = measured_s >= max(self._least_measured_s, 0 if len(times_s) >= _SEEN_STEPS else _SEEN_S)
        is_narrow = 2 * found.half_width_s <= self._limits.precision_target * found.mean_s
        if has_seen and is_narrow and len(times_s) >= max(self._limits.min_steps, self._fewest_seen):
            self.is_done = True
        elif incumbent is not None:
            self._end_if_slower(found.mean_s, far_by_steps(found.mean_s, found.interval_s[0]), incumbent)

    def _end_if_slower(self, step_s: float, steps: float, incumbent: float) -> None:
        """By the step time and how much lower, in logarithms, its steps leave it; launches differ beside that."""
        fastest_s = step_s * math.exp(-math.hypot(steps, self._limits.launch_half_width))
        if fastest_s > self._global_batch / incumbent:
            self.steps_bound_samples_per_s = self._global_batch / (step_s * math.exp(-steps))
            self.bound_samples_per_s = self._global_batch / fastest_s
            self.is_done = True
