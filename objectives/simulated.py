"""`SimulatedObjective`: the cost model as the objective, with what real machines add to it."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from bo_tuner.config import TrainConfig
from bo_tuner.errors import ConfigError
from bo_tuner.models.choices import Choices, Problem
from bo_tuner.models.cost import times_of
from bo_tuner.models.memory import memory_of
from bo_tuner.objectives.base import EventSink
from bo_tuner.objectives.pretended import START_UP_S, pretended
from bo_tuner.outcome import Outcome, TrialLimits, TrialResult
from bo_tuner.text import gib

__all__ = ["SimulatedObjective", "Simulation"]

_MOST_RANKS = 4
"""Whose steps are written down: thousands of equal numbers would say no more."""
_FIRST_STEP = 3.0
"""Times that the first step takes, which loads kernels and reserves memory. Guessed once."""
_LATE = 1.5
"""Times that a step takes in which one rank is late. Guessed once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What a simulated cluster adds to the cost model. Noise is the standard deviation of a logarithm: 0.02 is about 2 %.

    Raises:
        ConfigError: A value is below 0, or a probability over 1.
    """

    noise: float = 0.02
    """Between launches of one config."""
    step_noise: float = 0.01
    """Between steps of one launch."""
    time_bias: float = 0.05
    """Between layouts, the same in every launch: how wrong the model is about a layout's speed."""
    memory_bias: float = 0.05
    """Likewise about its memory."""
    start_up_s: float = START_UP_S
    """Seconds before the first step of a trial."""
    straggler_probability: float = 0.01
    """Of a step: one rank is late, and all wait for it."""
    hang_probability: float = 0.0
    """Of a launch: a rank stops, and the trial is given up at its deadline."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, most = getattr(self, field.name), 1.0 if field.name.endswith("probability") else math.inf
            if not 0 <= value <= most or math.isinf(value):
                limit = "from 0 to 1" if most == 1 else "a number of at least 0"
                raise ConfigError(f"{field.name} of a simulation must be {limit}; got {value}")

    def to_dict(self) -> dict[str, Any]:
        """Plain data that JSON can hold."""
        return asdict(self)


class SimulatedObjective:
    """Says at once how a trial would go by the cost model and the memory model. Implements `Objective`.

    Everything follows from the seed, the config, and how many launches of it came before: another process finds the same.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        seed: int = 0,
        settings: Simulation | None = None,
    ) -> None:
        """Simulate `problem`.

        Args:
            problem: What is trained, and on what.
            seed: Of all that is made up.
            settings: How much of that; None for the usual.
        """
        self._problem = problem
        self._seed = seed
        self._settings = settings or Simulation()
        self._n_launches = Counter[tuple[TrainConfig, int]]()

    def __call__(self, config: TrainConfig, *, limits: TrialLimits, on_event: EventSink) -> TrialResult:
        """Simulate `config`; see `Objective`."""
        settings, problem = self._settings, self._problem
        launch = self._n_launches[config, limits.data_draw]
        self._n_launches[config, limits.data_draw] += 1
        chance = random.Random(f"{self._seed}/{config.name}/{limits.data_draw}/{launch}")
        choice = Choices.of([config], problem.n_ranks)
        step_s = float(times_of(problem, choice).total[0])
        step_s *= self._bias(config, "time", settings.time_bias) * _spread(chance, settings.noise)
        memory = float(memory_of(problem, choice).total[0])
        needed = int(memory * self._bias(config, "memory", settings.memory_bias))
        if needed > min(problem.hardware.memory_bytes, limits.memory_bytes):
            return self._out_of_memory(needed, limits, settings.start_up_s + step_s)
        if chance.random() < settings.hang_probability:
            return TrialResult(
                outcome=Outcome.TIMEOUT,
                reason=f"not done after {limits.deadline_s:.0f} s: rank {chance.randrange(problem.n_ranks)} hangs",
                peak_memory_bytes=needed,
                limit_bytes=limits.memory_bytes,
                wall_s=limits.deadline_s,
            )
        n_ranks = min(problem.n_ranks, _MOST_RANKS)
        return pretended(
            self._steps(step_s, chance, n_ranks),
            limits=limits,
            on_event=on_event,
            n_ranks=n_ranks,
            global_batch=config.global_batch(problem.n_ranks),
            seq_len=problem.profile.seq_len,
            start_up_s=settings.start_up_s,
            peak_bytes=needed,
        )

    def _bias(self, config: TrainConfig, of: str, sd: float) -> float:
        """Of a layout, by which the model is wrong; it knows nothing of a user's own dimensions."""
        return _spread(random.Random(f"{self._seed}/{of}/{replace(config.layout, extra=()).name}"), sd)

    def _steps(self, step_s: float, chance: random.Random, n_ranks: int) -> Iterator[list[float]]:
        """Seconds of each step, by rank."""
        factor = _FIRST_STEP
        while True:
            time_s = factor * step_s * _spread(chance, self._settings.step_noise)
            is_late = chance.random() < self._settings.straggler_probability
            yield [time_s * (_LATE if is_late else 1.0)] * n_ranks
            factor = 1.0

    def _out_of_memory(self, needed: int, limits: TrialLimits, wall_s: float) -> TrialResult:
        """Refused by the device, or stopped by our own limit where that is lower; either shows in the first step."""
        device_bytes = self._problem.hardware.memory_bytes
        is_refused = needed > device_bytes
        missing = needed - device_bytes
        return TrialResult(
            outcome=Outcome.OOM if is_refused else Outcome.GUARDED,
            reason=f"rank 0: out of memory: {gib(missing)} more than the {gib(device_bytes)} of the device"
            if is_refused
            else f"rank 0 used {gib(needed)}, over the limit of {gib(limits.memory_bytes)}",
            peak_memory_bytes=min(needed, device_bytes),
            requested_bytes=missing if is_refused else None,
            limit_bytes=limits.memory_bytes,
            wall_s=wall_s,
        )


def _spread(chance: random.Random, sd: float) -> float:
    """A factor about 1 whose logarithm has this standard deviation."""
    return math.exp(chance.gauss(0.0, sd))
