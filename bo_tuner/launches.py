"""`LaunchNoise`: what launches of one config differ by beyond what their steps show, and where that leaves another launch."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from bo_tuner.quantiles import half_width
from bo_tuner.stored import known_fields

__all__ = ["EXACT", "Launch", "LaunchNoise", "NoisePrior", "far_by_steps", "prior_of"]

_NORMAL = 1.96
_GRID = tuple(math.exp(math.log(1e-3) + step * math.log(500) / 79) for step in range(80))
"""Standard deviations that are weighed: 0.1 % to 50 %, evenly in their logarithm."""
_FAR_OUTSIDE = 0.005
"""On both sides, beyond which a trial is ended early: of configs about as fast as the best, only unlucky launches are, so another launch is faster in the mean.
Chosen so that bounds hold with 97.5 % all the same (`benchmarks/coverage.py`)."""
_FAR_NORMAL = 2.807
_STUDIES_DIFFER = 0.4
"""Standard deviation of the logarithm of what launches differ by, from study to study on one machine: one in three is over 1.5 times as noisy,
or as quiet. Guessed."""


class Launch(NamedTuple):
    """One launch of a config: the logarithm of its step time, and the standard deviation that its steps leave."""

    log_step: float
    sd: float

    @classmethod
    def of(cls, step_s: float, interval_s: tuple[float, float]) -> Launch:
        """From a step time and its 95 % interval by the steps alone; an endless one says nothing."""
        low, high = interval_s
        sd = math.log(high / low) / 2 / _NORMAL if 0 < low <= high < math.inf else math.inf
        return cls(math.log(step_s), sd)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchNoise:
    """How much the step time of one config differs from launch to launch, beyond what its steps show."""

    sd: float
    """Likeliest standard deviation of the logarithm: about a fraction of the step time."""
    half_width: float
    """Half of the 95 % interval of one launch about what all of them come to, the doubt about `sd` counted in."""
    far: float
    """The same of 99.5 %."""
    n_free: int
    """Launches that it was learned from, beyond the first of each config."""

    def another(self, step_s: float, interval_s: tuple[float, float], *, n_launches: int = 1) -> tuple[float, float]:
        """Where the step time of another launch lies, with 95 %: the steps of both count, and what launches of both differ by.

        Args:
            step_s: As measured.
            interval_s: Its 95 % interval by the steps alone.
            n_launches: That it was measured in.
        """
        low, high = interval_s
        both = 1 + 1 / n_launches
        down = math.log(step_s / low) if low > 0 else math.inf
        up = math.log(high / step_s)
        launches = both * self.half_width**2
        return (
            step_s * math.exp(-math.sqrt(both * down**2 + launches)),
            step_s * math.exp(math.sqrt(both * up**2 + launches)),
        )

    def bound(self, rate: float, steps_bound: float) -> float:
        """What another launch hardly reaches, though this one was ended for being slow.

        Args:
            rate: As measured.
            steps_bound: What its steps alone leave it to reach at most.
        """
        return rate * math.exp(math.hypot(math.log(steps_bound / rate), math.sqrt(2) * self.far))

    def against(self, step_s: float, interval_s: tuple[float, float]) -> float:
        """How much slower than this a trial must be, in logarithms and beyond what its own steps explain, to be ended early."""
        _, high = interval_s
        return math.hypot(_FAR_NORMAL / _NORMAL * math.log(high / step_s), math.sqrt(2) * self.far)

    def sd_of(self, step_s: float, interval_s: tuple[float, float]) -> float:
        """Standard deviation of the logarithm of a measured step time about what all launches come to."""
        return math.hypot(Launch.of(step_s, interval_s).sd, self.sd)


def far_by_steps(step_s: float, low_s: float) -> float:
    """How much lower than measured the step time of another launch hardly is, in logarithms, by the steps of both: `low_s` is the lower end
    of its 95 % interval by the steps of this one."""
    return math.sqrt(2) * _FAR_NORMAL / _NORMAL * math.log(step_s / low_s) if low_s > 0 else math.inf


EXACT = LaunchNoise(sd=0.0, half_width=0.0, far=0.0, n_free=0)
"""Of what is looked up in a table: it says the same every time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoisePrior:
    """What launches may differ by before any config has run twice: the logarithm of the standard deviation is normal."""

    sd: float
    """Half of all machines show less."""
    spread: float
    """Standard deviation of the logarithm: 1 makes a third of them more than 2.7 times as noisy, or as quiet."""

    def given(self, configs: Iterable[Sequence[Launch]]) -> LaunchNoise:
        """What is known once configs have run again.

        Each standard deviation of a grid is weighed by how well it explains the launches, beside what their own steps explain (Bayes'
        rule; the config's own level is left free: Gelman et al., Bayesian Data Analysis, section 5.4). The half-width is that of the
        mixture of all of them, so it is wide while little is known.

        Args:
            configs: Per config its launches.
        """
        return _posterior(self, _again(configs))

    def after(self, configs: Iterable[Sequence[Launch]]) -> NoisePrior:
        """For the next study on the same machine, once earlier ones have shown these launches.

        Studies differ by their models, and by what else the machine did meanwhile, so that many launches of old do not make the next study's
        noise known any better than that; nothing is ever taken for less known than before.
        """
        again = _again(configs)
        if not again:
            return self
        weights = _weights(self, again)
        logs = [math.log(sd) for sd in _GRID]
        mean = sum(weight * log for weight, log in zip(weights, logs, strict=True))
        variance = sum(weight * (log - mean) ** 2 for weight, log in zip(weights, logs, strict=True))
        return NoisePrior(sd=math.exp(mean), spread=min(math.hypot(math.sqrt(variance), _STUDIES_DIFFER), self.spread))

    def to_dict(self) -> dict[str, float]:
        """Plain data that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, float]) -> NoisePrior:
        """The inverse of `to_dict`."""
        return cls(**known_fields(cls, data))


def _again(configs: Iterable[Sequence[Launch]]) -> tuple[tuple[Launch, ...], ...]:
    """Those that ran again, by the launches that say something."""
    known = (tuple(launch for launch in launches if math.isfinite(launch.sd)) for launches in configs)
    return tuple(launches for launches in known if len(launches) > 1)


def prior_of(device: str) -> NoisePrior:
    """Of machines whose ranks compute on `device`.

    CPU: two cores of a shared machine that other work disturbs differed by 8.6 % over 30 configs of `benchmarks/measured/here`, four
    passes each; the prior covers those, and leaves room for quieter machines, which three or more repeats make known. GPUs: guessed, and so
    wide that it soon gives way: with a spread of 1.2, intervals held in 88 % at a noise of 10 % when one config had run three times.
    """
    return _PRIORS.get(device, _PRIORS["cuda"])


_PRIORS = {"cpu": NoisePrior(sd=0.06, spread=0.6), "cuda": NoisePrior(sd=0.02, spread=1.7)}


@functools.lru_cache(maxsize=256)
def _posterior(prior: NoisePrior, again: tuple[tuple[Launch, ...], ...]) -> LaunchNoise:
    weights = _weights(prior, again)
    parts = [(weight, 0.0, sd) for weight, sd in zip(weights, _GRID, strict=True)]
    return LaunchNoise(
        sd=math.exp(sum(weight * math.log(sd) for weight, sd in zip(weights, _GRID, strict=True))),
        half_width=half_width(parts),
        far=half_width(parts, outside=_FAR_OUTSIDE),
        n_free=sum(len(launches) - 1 for launches in again),
    )


def _weights(prior: NoisePrior, again: tuple[tuple[Launch, ...], ...]) -> list[float]:
    """How likely each standard deviation of the grid is."""
    logs = [
        -0.5 * (math.log(sd / prior.sd) / prior.spread) ** 2 + sum(_log_likelihood(sd, one) for one in again)
        for sd in _GRID
    ]
    top = max(logs)
    weights = [math.exp(log - top) for log in logs]
    total = sum(weights)
    return [weight / total for weight in weights]


def _log_likelihood(sd: float, launches: Sequence[Launch]) -> float:
    precisions = [1 / (sd**2 + launch.sd**2) for launch in launches]
    total = sum(precisions)
    pairs = list(zip(precisions, launches, strict=True))
    level = sum(precision * launch.log_step for precision, launch in pairs) / total
    misfit = sum(precision * (launch.log_step - level) ** 2 for precision, launch in pairs)
    return 0.5 * (sum(map(math.log, precisions)) - math.log(total) - misfit)
