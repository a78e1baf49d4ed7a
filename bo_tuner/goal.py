"""`Goal`: what a study looks for. A trial's value is in the goal's unit; its score is larger where it is better, whatever is measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from bo_tuner.errors import ConfigError
from bo_tuner.outcome import TrialResult
from bo_tuner.stored import known_fields
from bo_tuner.text import did_you_mean, gib, rate, seconds

if TYPE_CHECKING:
    from bo_tuner.trial import TrialRecord

__all__ = ["GOALS", "THROUGHPUT", "Direction", "Goal", "Measure"]

Direction = Literal["maximize", "minimize"]

_LEAST_PRICE = 1e-9
"""Numbers that are far smaller or larger, and costs that follow from them, lose their digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One figure of a trial that a goal looks at."""

    unit: str
    """For programs."""
    direction: Direction
    words: str
    """What it is, for people."""
    heading: str
    """Of a column."""
    superlative: str
    """What the config is that has the best of it."""
    number: Callable[[float], str]
    """A value as a cell of that column."""
    after: str = ""
    """What follows the number in a sentence."""
    of: Callable[[Goal, TrialResult, float], float | None]
    """Its value, always above 0, of a run that makes so many samples/s; None where it is not known."""

    def score(self, value: float) -> float:
        """A value so that larger is better: itself, or its inverse."""
        return value if self.direction == "maximize" else 1 / value


def _step_s(goal: Goal, result: TrialResult, samples_per_s: float) -> float | None:
    return result.measurement.global_batch / samples_per_s if result.measurement else None


def _cost(goal: Goal, result: TrialResult, samples_per_s: float) -> float | None:
    """Price of all ranks by the hour over the tokens of an hour, times a million."""
    if result.measurement is None or goal.price_per_gpu_hour is None or goal.n_ranks is None:
        return None
    tokens_per_hour = 3600 * samples_per_s * result.measurement.seq_len
    return goal.price_per_gpu_hour * goal.n_ranks / tokens_per_hour * 1e6


_THROUGHPUT = Measure(
    unit="samples/s",
    direction="maximize",
    words="samples/s",
    heading="samples/s",
    superlative="Fastest",
    number=lambda value: rate(value).removesuffix("/s"),
    after="/s",
    of=lambda goal, result, samples_per_s: samples_per_s,
)
_LATENCY = Measure(
    unit="s",
    direction="minimize",
    words="seconds a step of a fixed batch",
    heading="latency",
    superlative="Lowest-latency",
    number=seconds,
    after=" a step",
    of=_step_s,
)
_ENERGY = Measure(
    unit="tokens/J",
    direction="maximize",
    words="tokens a joule",
    heading="tokens/J",
    superlative="Most frugal",
    number=lambda value: f"{value:.4g}",
    after=" tokens/J",
    of=lambda goal, result, samples_per_s: result.measurement.tokens_per_j if result.measurement else None,
)
_COST = Measure(
    unit="currency/1e6 tokens",
    direction="minimize",
    words="cost of a million tokens",
    heading="cost/M tokens",
    superlative="Cheapest",
    number=lambda value: f"{value:.4g}",
    after=" a million tokens",
    of=_cost,
)
_MEMORY = Measure(
    unit="bytes",
    direction="minimize",
    words="peak memory",
    heading="peak memory",
    superlative="Smallest",
    number=lambda value: gib(int(value)),
    of=lambda goal, result, samples_per_s: result.peak_memory_bytes or None,
)
GOALS: dict[str, tuple[Measure, ...]] = {
    "throughput": (_THROUGHPUT,),
    "latency": (_LATENCY,),
    "energy": (_ENERGY,),
    "cost": (_COST,),
    "throughput,memory": (_THROUGHPUT, _MEMORY),
}
"""What each goal looks at. The first decides which trial is the best; where there is a second, the front of both counts too."""
_FOLLOW_RATE = ("throughput", "latency", "cost")


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What the trials of a study are judged by.

    Values are in the unit of the goal: samples/s, seconds a step, tokens a joule, cost of a million tokens in the currency of the price.
    Scores are positive and larger where better. Under a goal that follows samples/s they are proportional to it.

    Raises:
        ConfigError: There is no goal of that name, or it lacks its price, or has one and needs none.
    """

    name: str = "throughput"
    """One of `GOALS`."""
    price_per_gpu_hour: float | None = None
    """Of one rank, GPU or CPU, in any currency, for `cost`; else None."""
    n_ranks: int | None = None
    """World size, which is paid for, for `cost`; else None."""

    def __post_init__(self) -> None:
        if self.name not in GOALS:
            raise ConfigError(
                f"--objective must be one of {'; '.join(GOALS)}; got {self.name!r}{did_you_mean(self.name, GOALS)}"
            )
        price = self.price_per_gpu_hour
        if price is None and self.name == "cost":
            raise ConfigError("--objective cost needs the price of a GPU, or of a CPU rank: add --price-per-gpu-hour P")
        if price is not None and self.name != "cost":
            raise ConfigError(
                f"--price-per-gpu-hour goes with --objective cost; got --objective {self.name}: leave one of them out"
            )
        if price is not None and not 0 < price < math.inf:
            raise ConfigError(f"--price-per-gpu-hour must be a number over 0; got {price:g}")
        if price is not None and not _LEAST_PRICE <= price <= 1 / _LEAST_PRICE:
            raise ConfigError(
                f"--price-per-gpu-hour must be from {_LEAST_PRICE:g} to {1 / _LEAST_PRICE:g}; got {price:g}: use another unit of money"
            )

    @classmethod
    def of(cls, objective: str, *, price_per_gpu_hour: float | None = None, n_ranks: int) -> Goal:
        """From the two options, on so many ranks.

        Raises:
            ConfigError: As above.
        """
        name = ",".join(part.strip() for part in objective.split(","))
        is_paid = price_per_gpu_hour is not None
        return cls(name=name, price_per_gpu_hour=price_per_gpu_hour, n_ranks=n_ranks if is_paid else None)

    # -- what it is ------------------------------------------------------------------------------------------------

    @property
    def measures(self) -> tuple[Measure, ...]:
        """What it looks at; the first decides."""
        return GOALS[self.name]

    @property
    def measure(self) -> Measure:
        """What the best is the best of."""
        return self.measures[0]

    @property
    def directions(self) -> list[Direction]:
        """Of all values, as Optuna takes them."""
        return [measure.direction for measure in self.measures]

    @property
    def follows_rate(self) -> bool:
        """What is slower than the best is worse, so that it need not be measured to its end."""
        return self.name in _FOLLOW_RATE

    @property
    def needs_fixed_batch(self) -> bool:
        """Its values compare only between steps of one size."""
        return self.measure is _LATENCY

    @property
    def needs_power(self) -> bool:
        """A run that does not tell its power has no value."""
        return self.measure is _ENERGY

    @property
    def needs_tokens(self) -> bool:
        """It counts tokens, so that the length of samples has to be known."""
        return self.measure in (_ENERGY, _COST)

    @property
    def has_own_value(self) -> bool:
        """Its value is not samples/s, and stands beside it."""
        return self.measure is not _THROUGHPUT

    @property
    def has_front(self) -> bool:
        """It looks at two figures, so that several trials may each be the best in their way."""
        return len(self.measures) > 1

    @property
    def label(self) -> str:
        """For names of studies; empty for throughput."""
        return "" if self == THROUGHPUT else f"_{self.name.replace(',', '-')}"

    def __str__(self) -> str:
        words = " against ".join(measure.words for measure in self.measures)
        price = "" if self.price_per_gpu_hour is None else f" at {self.price_per_gpu_hour:g} a rank-hour"
        return f"{self.name} ({words}{price})"

    # -- what it makes of a trial ----------------------------------------------------------------------------------

    def value(self, run: TrialRecord | TrialResult) -> float | None:
        """What a complete trial reached, in the goal's unit; None for all others, and where it is not known."""
        result = _result_of(run)
        rate = None if result is None else result.samples_per_s
        return None if result is None or rate is None else self.measure.of(self, result, rate)

    def values(self, run: TrialRecord | TrialResult) -> list[float] | None:
        """The same of every measure; None unless all are known."""
        result = _result_of(run)
        return None if result is None else self._values(result, result.samples_per_s)

    def score(self, run: TrialRecord | TrialResult) -> float | None:
        """What a complete trial is worth: larger is better; None for all others, and where it is not known."""
        value = self.value(run)
        return None if value is None else self.measure.score(value)

    def scores(self, run: TrialRecord | TrialResult) -> list[float] | None:
        """The same by every measure; None unless all are known."""
        return self._scores(self.values(run))

    def bounds(self, result: TrialResult) -> list[float] | None:
        """Scores that a trial which was ended early cannot exceed; None for all others, and where they are not known."""
        return self._scores(self._values(result, result.bound_samples_per_s))

    def _values(self, result: TrialResult, samples_per_s: float | None) -> list[float] | None:
        if samples_per_s is None:
            return None
        found = [measure.of(self, result, samples_per_s) for measure in self.measures]
        known = [value for value in found if value is not None]
        return known if len(known) == len(found) else None

    def _scores(self, values: list[float] | None) -> list[float] | None:
        if values is None:
            return None
        return [measure.score(value) for measure, value in zip(self.measures, values, strict=True)]

    # -- for people and programs -----------------------------------------------------------------------------------

    def text(self, value: float) -> str:
        """A value with its unit: "250 ms a step"."""
        return f"{self.measure.number(value)}{self.measure.after}"

    def cell(self, run: TrialRecord | TrialResult | None) -> str:
        """A trial's value for a column under `measure.heading`; a dash where there is none."""
        value = None if run is None else self.value(run)
        return "-" if value is None else self.measure.number(value)

    def beside(self, run: TrialRecord | TrialResult | None) -> str:
        """What is to follow the samples/s of a complete trial: ", 250 ms a step"; nothing where the goal is samples/s itself."""
        if not self.has_own_value or run is None:
            return ""
        value = self.value(run)
        return f", {self.measure.heading} unknown" if value is None else f", {self.text(value)}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Goal:
        """The inverse of `to_dict`."""
        return cls(**known_fields(cls, data))


def _result_of(run: TrialRecord | TrialResult) -> TrialResult | None:
    return run if isinstance(run, TrialResult) else run.told


THROUGHPUT = Goal()
"""Samples/s: the goal of a study that names none, and of all that were made before goals could be named."""
