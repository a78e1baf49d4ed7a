"""`Pace`: what a step takes in the long run, as far as the steps of one launch show it.

Training takes the mean of its steps, stalls included, so the mean is what counts. Three things are looked at on the way:

- A stall that happened once, and did not come back within as many steps as the workers of a data loader would need, is left out: it
  was the machine's. What comes back is the training's own and counts.
- Where every k-th step is slow, as a loader with k workers makes it, only whole periods are counted: those that the steps show, or that
  the number of workers says.
- Neighbouring steps are alike: a slow one follows slow ones. How much so is estimated along with the mean, and widens its interval.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bo_tuner.quantiles import half_width

__all__ = ["Pace", "pace"]

_STALL = 0.5
"""A step is a stall where it takes longer than the median by this fraction of it, ..."""
_ALONE = 3.0
"""... and alone where no other one exceeds the median by a third as much."""
_MAY_RECUR_WITHIN = 16
"""Steps without another stall before it or after it, until it is left out: data loaders seldom have more workers."""
_FEWEST_PERIODS = 3
_LONGEST_PERIOD = 32
_LEAST_OF_PERIOD = 0.7
"""Autocorrelation at the lag of a period, ..."""
_ABOVE_NEIGHBOURS = 0.4
"""... which is above that at lag one by this: steps that are merely alike to their neighbours have no period."""
_FEWEST_OF_PERIOD = 9
"""Steps from which a period may be told."""
_CORRELATIONS = (0.0, 0.15, 0.3, 0.45, 0.6, 0.7, 0.8, 0.87, 0.92, 0.96)
"""Of neighbouring steps: those that are weighed, all equally likely before the steps are seen."""
_SPREADS = tuple(math.exp(math.log(5e-4) + at * math.log(2000) / 23) for at in range(24))
"""Standard deviations of steps, as fractions of their mean, that are weighed: 0.05 % to 100 %, evenly in their logarithm, ..."""
_USUAL_SPREAD = 0.03
"""... half of all trials show less, ..."""
_SPREAD_DIFFERS = 1.2
"""... and a third over 3.3 times as much or as little: the standard deviation of the logarithm."""
_LOG_PRIORS = tuple(-0.5 * (math.log(spread / _USUAL_SPREAD) / _SPREAD_DIFFERS) ** 2 for spread in _SPREADS)
_UNLIKELY = 12.0
"""Logarithm of how much less likely than the likeliest is left aside."""
_EQUAL = 1e-9
"""Values that differ by no more than this fraction are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Of one launch's measured steps."""

    mean_s: float
    """Seconds a step."""
    half_width_s: float
    """Half of the 95 % interval of the mean; infinite where one step says nothing."""
    sd_s: float
    """Standard error of the mean, if steps were not alike to their neighbours; 0 for one step, which says nothing about it."""
    period: int = 1
    """Every so many steps they repeat a pattern; 1 where they do not."""
    left_out: int | None = None
    """Index of the one step that stalled and was not counted."""

    @property
    def far(self) -> float:
        """The half-width in logarithms: however wide the interval, no step takes less than no time."""
        return self.half_width_s / self.mean_s if self.half_width_s else 0.0

    @property
    def interval_s(self) -> tuple[float, float]:
        """The 95 % interval; from 0 to infinity where one step says nothing."""
        return (self.mean_s * math.exp(-self.far), self.mean_s * math.exp(self.far))


@functools.lru_cache(maxsize=4096)
def pace(times: tuple[float, ...], loader_period: int = 1) -> Pace:
    """The mean of step times and how well it is known.

    Args:
        times: Seconds of each measured step; at least one.
        loader_period: Steps after which the workers of a data loader, if they hold up any, hold up another one.
    """
    left_out = _lone_stall(times, max(_MAY_RECUR_WITHIN, loader_period))
    kept = [time for at, time in enumerate(times) if at != left_out]
    period = _period(kept)
    if period == 1 and len(kept) >= 2 * loader_period and max(kept) > (1 + _STALL) * statistics.median(kept):
        period = loader_period  # two of them are enough, since its length is known
    whole = kept[len(kept) % period :]
    means = [statistics.fmean(whole[at : at + period]) for at in range(0, len(whole), period)]
    return Pace(
        mean_s=statistics.fmean(means),
        half_width_s=_half_width(means),
        sd_s=_sd(means),
        period=period,
        left_out=left_out,
    )


def _sd(values: Sequence[float]) -> float:
    """Standard error of their mean, if each is drawn anew."""
    n, mean = len(values), statistics.fmean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n) if n > 1 else 0.0


def _lone_stall(times: Sequence[float], may_recur_within: int) -> int | None:
    """Index of the one step that stalled, where there was time enough to see that it does not come back."""
    at = max(range(len(times)), key=times.__getitem__)
    if max(at, len(times) - 1 - at) < may_recur_within:
        return None
    middle = statistics.median(times)
    excess, next_excess = times[at] - middle, max(time for i, time in enumerate(times) if i != at) - middle
    return at if excess > _STALL * middle and excess > _ALONE * next_excess else None


def _period(times: Sequence[float]) -> int:
    """Number of steps after which they repeat, by the autocorrelation at that lag."""
    n = len(times)
    mean = statistics.fmean(times)
    off = [time - mean for time in times]
    variance = math.fsum(value * value for value in off) / n
    if n < _FEWEST_OF_PERIOD or not variance > 0:
        return 1

    def correlation(lag: int) -> float:
        return math.fsum(a * b for a, b in zip(off, off[lag:], strict=False)) / (n - lag) / variance

    found = {lag: correlation(lag) for lag in range(1, min(n // _FEWEST_PERIODS, _LONGEST_PERIOD) + 1)}
    most = max(value for lag, value in found.items() if lag > 1)
    if most < max(_LEAST_OF_PERIOD, found[1] + _ABOVE_NEIGHBOURS):
        return 1
    # Twice the period fits as well, by chance a little better.
    return next(lag for lag, value in found.items() if lag > 1 and value > 0.9 * most)


def _half_width(values: Sequence[float]) -> float:
    """Half of the 95 % interval of the mean of values that are alike to their neighbours.

    A first-order autoregression (Box, Jenkins, Reinsel: Time Series Analysis, chapter 7) is fitted at each of some correlations and
    standard deviations; what each says of the mean is weighed by its prior and by how likely it makes the values. The prior of the
    standard deviation lets few values say something: two that are equal by chance are not believed, nor is anything thought possible
    of two that differ.
    """
    mean, n = statistics.fmean(values), len(values)
    if n == 1:
        return math.inf
    if not max(values) - min(values) > _EQUAL * mean:
        return 0.0
    found: list[tuple[float, float, float]] = []
    for rho in _CORRELATIONS:
        middle, square, weight = _fit(values, rho)
        independent = 1 - rho * rho
        log_rho = 0.5 * math.log(independent / weight)
        for spread, log_prior in zip(_SPREADS, _LOG_PRIORS, strict=True):
            variance = independent * (spread * mean) ** 2
            log = log_rho + log_prior - 0.5 * (n - 1) * math.log(variance) - 0.5 * square / variance
            found.append((log, middle - mean, math.sqrt(variance / weight)))
    most = max(log for log, _, _ in found)
    return half_width([(math.exp(log - most), off, sd) for log, off, sd in found if log > most - _UNLIKELY])


def _fit(values: Sequence[float], rho: float) -> tuple[float, float, float]:
    """Mean by generalized least squares, sum of the squared innovations about it, and how much the values weigh in it."""
    first = 1 - rho * rho
    steps = [late - rho * early for early, late in itertools.pairwise(values)]
    weight = first + len(steps) * (1 - rho) ** 2
    middle = (first * values[0] + (1 - rho) * math.fsum(steps)) / weight
    square = first * (values[0] - middle) ** 2 + math.fsum((step - (1 - rho) * middle) ** 2 for step in steps)
    return middle, square, weight
