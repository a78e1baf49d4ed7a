"""`StepLimit`: which optimizer steps take too long to be measured, by what is expected of them and what was measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from bo_tuner.config import TrainConfig
from bo_tuner.models.choices import Choices, Problem
from bo_tuner.models.cost import times_of
from bo_tuner.trial import TrialRecord

__all__ = ["StepLimit"]

_FIRST_SAMPLES = 8
"""Of a rank in one step, where nothing is expected and nothing was measured yet: a study begins with small steps."""


class StepLimit:
    """Sets configs aside whose step would take too long; what it cannot tell of a config, it allows.

    A step of one sample a rank is always allowed: there is none shorter.
    """

    def __init__(self, *, longest_s: float, n_ranks: int, problem: Problem | None = None) -> None:
        """Know nothing of any trial.

        Args:
            longest_s: A step may take this long; infinite where nobody waits for a step.
            n_ranks: World size.
            problem: What the cost model expects something of; None where nothing can be expected.
        """
        self._longest_s = longest_s
        self._n_ranks = n_ranks
        self._problem = problem
        self._expected_s: dict[TrainConfig, float] = {}

    def of(self, config: TrainConfig) -> float | None:
        """Seconds that a step of `config` may take when it runs; None for any."""
        is_bounded = math.isfinite(self._longest_s) and config.global_batch(self._n_ranks) > self._n_ranks
        return self._longest_s if is_bounded else None

    def allows(
        self, records: Sequence[TrialRecord], candidates: Sequence[TrainConfig]
    ) -> Callable[[TrainConfig], bool]:
        """Which configs may run, after these trials.

        None whose step would be too long at the best rate measured; none that makes a step at least as large as one that was cut, in the
        same layout; and none whose expected step is too long, once the expectation is set right by the most favourable trial.

        Args:
            records: All trials so far.
            candidates: What is going to be asked for, so that it is expected at once.
        """
        if not math.isfinite(self._longest_s):
            return lambda config: True
        largest = max(self._largest_batch(records), self._n_ranks)
        cut = [record.config for record in records if record.result and record.result.step_limit_s is not None]
        self._expect([*candidates, *(record.config for record in records)])
        factor = self._factor(records)

        def may_run(config: TrainConfig) -> bool:
            batch = config.global_batch(self._n_ranks)
            if batch <= self._n_ranks:
                return True
            is_quick = self._expected_s.get(config, 0.0) * factor <= self._longest_s
            return batch <= largest and is_quick and not any(_is_as_large(config, other) for other in cut)

        return may_run

    def _largest_batch(self, records: Sequence[TrialRecord]) -> float:
        rates = [rate for record in records if (rate := record.standing_samples_per_s) is not None]
        if rates:
            return max(rates) * self._longest_s
        return math.inf if self._problem is not None else float(_FIRST_SAMPLES * self._n_ranks)

    def _factor(self, records: Sequence[TrialRecord]) -> float:
        """How many times as long as expected steps take: as the most favourable trial shows; before one is measured, as those show that were
        cut, of which only the least is known."""
        measured = list(self._off(records, lambda record: record.standing_samples_per_s))
        if measured:
            return min(measured)
        cut = self._off(records, lambda record: record.result.bound_samples_per_s if record.result else None)
        return max([1.0, *cut])

    def _off(self, records: Sequence[TrialRecord], rate_of: Callable[[TrialRecord], float | None]) -> Iterator[float]:
        for record in records:
            rate, expected_s = rate_of(record), self._expected_s.get(record.config)
            if rate and expected_s:
                yield record.config.global_batch(self._n_ranks) / rate / expected_s

    def _expect(self, configs: Sequence[TrainConfig]) -> None:
        problem = self._problem
        if problem is None:
            return
        new = [config for config in dict.fromkeys(configs) if config not in self._expected_s and problem.knows(config)]
        if new:
            times_s = times_of(problem, Choices.of(new, self._n_ranks)).total
            self._expected_s |= dict(zip(new, map(float, times_s), strict=True))


def _is_as_large(config: TrainConfig, other: TrainConfig) -> bool:
    return (
        config.micro_batch_size >= other.micro_batch_size
        and config.grad_accum_steps >= other.grad_accum_steps
        and config.layout == other.layout
    )
