"""How a trial ended, what it measured, and the limits it ran under."""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Measurement", "Outcome", "TrialLimits", "TrialResult"]


class Outcome(enum.StrEnum):
    """How a trial ended."""

    COMPLETE = "complete"
    """Steps were timed."""
    PRUNED = "pruned"
    """It could not beat the incumbent, and was ended early."""
    OOM = "oom"
    """The device or its allocator refused memory."""
    GUARDED = "guarded"
    """Our own memory limit ended it before the device refused."""
    HOST_OOM = "host_oom"
    """The kernel killed a rank for memory."""
    TIMEOUT = "timeout"
    """It was not done at its deadline."""
    REJECTED = "rejected"
    """The framework refuses the config."""
    FAILED = "failed"
    """A bug or a sick machine."""

    @property
    def is_memory(self) -> bool:
        """Memory was the cause."""
        return self in (Outcome.OOM, Outcome.GUARDED, Outcome.HOST_OOM)

    @property
    def teaches(self) -> bool:
        """It says something about the config, not about the day: such a trial is never repeated."""
        return self not in (Outcome.TIMEOUT, Outcome.FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialLimits:
    """What one trial may use."""

    max_steps: int = 7
    """Optimizer steps, warm-up included."""
    warmup_steps: int = 2
    """Steps that are run and not counted."""
    deadline_s: float = 180.0
    """Seconds from launch to the last step; past it the ranks are killed."""
    memory_bytes: int
    """Bytes per rank; a rank above it ends the trial."""
    incumbent_samples_per_s: float | None = None
    """The best so far, in samples/s; None before the first complete trial."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What the timed steps of one trial showed. Times are seconds, memory is bytes."""

    global_batch: int
    """Samples per optimizer step."""
    seq_len: int
    """Tokens per sample."""
    step_times_s: tuple[tuple[float, ...], ...]
    """End-to-end time of every measured step, data loading included; one row a rank, one column a step."""
    engine_times_s: tuple[tuple[float, ...], ...]
    """Forward + backward + step alone, as DeepSpeed's tuner counts; same shape."""
    peak_memory_bytes: tuple[int, ...]
    """Peak of each rank over the whole trial: on a GPU what torch's allocator reserved, on a CPU anonymous memory above
    that of the process it was forked from."""
    is_loss_finite: bool = True
    """False when a step gave a loss of NaN or infinity."""

    @property
    def slowest_s(self) -> tuple[float, ...]:
        """Time of each step as its slowest rank saw it: that rank holds up the others."""
        return tuple(max(times) for times in zip(*self.step_times_s, strict=True))

    @property
    def step_time_s(self) -> float:
        """Median over steps of the slowest rank."""
        return statistics.median(self.slowest_s)

    @property
    def engine_time_s(self) -> float:
        """Median over steps of the slowest rank's forward + backward + step."""
        slowest: list[float] = [max(times) for times in zip(*self.engine_times_s, strict=True)]
        return statistics.median(slowest)

    @property
    def samples_per_s(self) -> float:
        """Samples per second, end to end."""
        return self.global_batch / self.step_time_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second, end to end."""
        return self.samples_per_s * self.seq_len

    @property
    def samples_per_s_interval(self) -> tuple[float, float]:
        """Samples/s at the quartiles of step time (the slower first)."""
        times = self.slowest_s
        if len(times) < 2:
            return (self.samples_per_s, self.samples_per_s)
        low, _, high = statistics.quantiles(times, n=4, method="inclusive")
        return (self.global_batch / high, self.global_batch / low)

    def to_dict(self) -> dict[str, Any]:
        """Plain data that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Measurement:
        """The inverse of `to_dict`."""
        values: dict[str, Any] = {**data, "peak_memory_bytes": tuple(data["peak_memory_bytes"])}
        for name in ("step_times_s", "engine_times_s"):
            values[name] = tuple(tuple(row) for row in data[name])
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """The end of one trial, good or bad."""

    outcome: Outcome
    reason: str = ""
    """One line for people: why it ended so; empty when it completed."""
    measurement: Measurement | None = None
    """Present when steps were timed."""
    bound_samples_per_s: float | None = None
    """For PRUNED: it cannot be faster than this."""
    peak_memory_bytes: int | None = None
    """Highest of all ranks, known also for trials that failed; None when nothing was read."""
    requested_bytes: int | None = None
    """Size of the request that the allocator refused, where it says so."""
    limit_bytes: int | None = None
    """Memory limit per rank that the trial ran under."""
    wall_s: float = 0.0
    """Launch to the last process gone."""
    phases_s: Mapping[str, float] | None = None
    """`wall_s` split into start, warmup, measure, teardown, as far as it got."""
    log_tail: str = ""
    """Last lines of the ranks' output, for trials that ended badly."""

    @property
    def constraint(self) -> float:
        """How far memory was exceeded, for samplers: <= 0 fits, > 0 does not.

        max((peak + refused request) / limit - 1, 0.01) where memory was the cause; peak / limit - 1 for a trial that
        ran, and -0.01 when that is unknown.
        """
        used = (self.peak_memory_bytes or 0) + (self.requested_bytes or 0)
        ratio = used / self.limit_bytes - 1 if self.limit_bytes and used else None
        if self.outcome.is_memory:
            return max(ratio if ratio is not None else 0.01, 0.01)
        return min(ratio, 0.0) if ratio is not None else -0.01

    @property
    def samples_per_s(self) -> float | None:
        """Samples/s of a complete trial; None for all others, and when the clock gave nonsense."""
        if self.outcome is not Outcome.COMPLETE or self.measurement is None:
            return None
        if not self.measurement.step_time_s > 0:
            return None
        value = self.measurement.samples_per_s
        return value if math.isfinite(value) else None

    def to_dict(self) -> dict[str, Any]:
        """Plain data that JSON can hold."""
        data = {name: getattr(self, name) for name in self.__dataclass_fields__}
        data["outcome"] = self.outcome.value
        data["measurement"] = self.measurement.to_dict() if self.measurement else None
        data["phases_s"] = dict(self.phases_s) if self.phases_s is not None else None
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TrialResult:
        """The inverse of `to_dict`."""
        measurement = data.get("measurement")
        values: dict[str, Any] = {**data, "outcome": Outcome(data["outcome"])}
        values["measurement"] = Measurement.from_dict(measurement) if measurement else None
        return cls(**values)
