"""How a trial ended, what it measured, and the limits it ran under."""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bo_tuner.pace import Pace, pace
from bo_tuner.stored import known_fields

__all__ = ["Measurement", "Outcome", "TrialLimits", "TrialResult"]

_UNEVEN = 0.05
"""The mean is off the median by so much before it is worth a word."""


class Outcome(enum.StrEnum):
    """How a trial ended."""

    COMPLETE = "complete"
    """Steps were timed."""
    PRUNED = "pruned"
    """It could not beat the incumbent, or its step takes longer than may be measured; it was ended early."""
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

    max_steps: int | None = None
    """Optimizer steps, warm-up included; None for as many as a few seconds hold, within bounds."""
    min_steps: int = 3
    """Optimizer steps that are measured at least, unless `max_steps` forbids it."""
    precision_target: float = 0.02
    """Measuring ends once the 95 % interval of the mean step time is narrower than this fraction of it."""
    deadline_s: float = 180.0
    """Seconds from launch to the last step; past it the ranks are killed."""
    left_s: float | None = None
    """Seconds that the study's budget leaves for it, whatever it does; None for no end."""
    memory_bytes: int
    """Bytes per rank; a rank above it ends the trial."""
    incumbent_samples_per_s: float | None = None
    """The best so far, in samples/s; a trial that cannot reach it is ended. None before the first complete trial."""
    data_draw: int = 0
    """Which samples the trial draws: runs of one config with other numbers see other data."""
    longest_step_s: float | None = None
    """Seconds that an optimizer step may take: a trial whose steps show that they take longer is ended; None for any."""
    longest_of: int = 0
    """Before anything is measured, train on the largest of this many micro-batches, where they differ in size."""
    launch_half_width: float = 0.0
    """How much slower than the incumbent the trial must be to be ended, in logarithms of step time and beyond what its own steps explain:
    what launches of both may differ by, and how well the incumbent's steps are known."""

    def ran_out(self, result: TrialResult) -> bool:
        """The budget ended the trial, which says nothing of its config."""
        return result.outcome is Outcome.TIMEOUT and self.left_s is not None and result.wall_s >= self.left_s


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
    process_peak_bytes: tuple[int, ...] | None = None
    """Peak of each rank's process on its GPU, CUDA context included; None where the driver does not tell."""
    device_peak_bytes: tuple[int, ...] | None = None
    """Peak of all that each rank's GPU held; None where the driver does not tell."""
    power_w: float | None = None
    """Mean over the measured steps, all devices together; None where it is not known."""
    energy_j: float | None = None
    """Over the measured steps, all devices together; None where it is not known."""
    throttling: tuple[str, ...] = ()
    """What held clocks down over the measured steps, by name."""
    is_loss_finite: bool = True
    """False when a step gave a loss of NaN or infinity."""
    n_warmup: int = 0
    """Steps run before those measured."""
    n_skipped: int = 0
    """Steps that changed no weights, since gradients overflowed, as first steps in fp16 do; they count nowhere else."""
    is_settled: bool = True
    """False when step times still drifted at the last step."""
    loader_period: int = 1
    """Steps after which the workers of the user's data loader, if they hold up any, hold up another one; 1 without workers."""

    @property
    def slowest_s(self) -> tuple[float, ...]:
        """Time of each step on the rank that took longest for all of them: ranks wait for each other, so all take as long."""
        return _slowest(self.step_times_s)

    @property
    def pace(self) -> Pace:
        """What a step takes in the long run, as far as these steps show it."""
        return pace(self.slowest_s, self.loader_period)

    @property
    def step_time_s(self) -> float:
        """Seconds a step: those of all that count over their number."""
        return self.pace.mean_s

    @property
    def median_step_time_s(self) -> float:
        """Of the slowest rank: what half of its steps took at most."""
        return statistics.median(self.slowest_s)

    @property
    def engine_time_s(self) -> float:
        """Seconds of forward + backward + step alone, a step, on the rank that took longest for them."""
        return pace(_slowest(self.engine_times_s), self.loader_period).mean_s

    @property
    def unevenness(self) -> str:
        """What is to be said where steps differ so that their median is not what training does; else empty."""
        found, middle = self.pace, self.median_step_time_s
        if found.left_out is not None:
            longest = self.slowest_s[found.left_out] / middle
            return f"one of {len(self.slowest_s)} steps took {longest:.1f} times the median and is left out"
        if abs(found.mean_s - middle) <= max(found.half_width_s, _UNEVEN * middle):
            return ""
        steps = f"steps repeat every {found.period}" if found.period > 1 else "steps are uneven"
        return f"{steps}: the mean, which counts, is {found.mean_s / middle:.2f} times the median"

    @property
    def samples_per_s(self) -> float:
        """Samples per second, end to end."""
        return self.global_batch / self.step_time_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second, end to end."""
        return self.samples_per_s * self.seq_len

    @property
    def tokens_per_j(self) -> float | None:
        """Tokens of the measured steps over the energy that all devices together took for them; None where that is not known."""
        if not self.energy_j:
            return None
        return len(self.slowest_s) * self.global_batch * self.seq_len / self.energy_j

    @property
    def engine_samples_per_s(self) -> float:
        """Samples per second as DeepSpeed's tuner counts: forward, backward and step alone, data loading left out."""
        return self.global_batch / self.engine_time_s if self.engine_time_s else math.inf

    @property
    def overstatement(self) -> float:
        """How far DeepSpeed's count is above the end-to-end rate, as a fraction of it; 0 where the clocks give nonsense."""
        ratio = self.step_time_s / self.engine_time_s if self.engine_time_s else 1.0
        return max(ratio - 1.0, 0.0)

    @property
    def step_time_interval_s(self) -> tuple[float, float]:
        """95 % interval of the step time in this launch: how well its steps tell it. Another launch may lie outside: `LaunchNoise`."""
        return self.pace.interval_s

    def to_dict(self) -> dict[str, Any]:
        """Plain data that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Measurement:
        """The inverse of `to_dict`."""
        values = known_fields(cls, data)
        for name in ("peak_memory_bytes", "process_peak_bytes", "device_peak_bytes", "throttling"):
            if values.get(name) is not None:
                values[name] = tuple(values[name])
        for name in ("step_times_s", "engine_times_s"):
            values[name] = tuple(tuple(row) for row in data[name])
        return cls(**values)


def _slowest(rows: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """The row with the largest sum; all must be equally long."""
    assert list(zip(*rows, strict=True)), "something was measured"
    return max(rows, key=math.fsum)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """The end of one trial, good or bad."""

    outcome: Outcome
    reason: str = ""
    """One line for people: why it ended so; empty when it completed."""
    measurement: Measurement | None = None
    """Present when steps were timed."""
    bound_samples_per_s: float | None = None
    """For PRUNED: it is slower than this, with 97.5 %."""
    step_limit_s: float | None = None
    """For PRUNED: seconds that its step may take, and takes longer; None where it was ended for another reason."""
    steps_bound_samples_per_s: float | None = None
    """For PRUNED: what its steps alone left it to reach at most; None where something else ended it, and in older studies."""
    peak_memory_bytes: int | None = None
    """Highest of all ranks, known also for trials that failed; None when nothing was read."""
    rank_peaks_bytes: tuple[int, ...] = ()
    """By rank, known also for trials that failed; 0 for a rank that was not read."""
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
    def is_throttled(self) -> bool:
        """Its steps were timed while clocks were held down."""
        return self.measurement is not None and bool(self.measurement.throttling)

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
        data["rank_peaks_bytes"] = list(self.rank_peaks_bytes)
        data["phases_s"] = dict(self.phases_s) if self.phases_s is not None else None
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TrialResult:
        """The inverse of `to_dict`."""
        measurement = data.get("measurement")
        values: dict[str, Any] = {**known_fields(cls, data), "outcome": Outcome(data["outcome"])}
        values["measurement"] = Measurement.from_dict(measurement) if measurement else None
        values["rank_peaks_bytes"] = tuple(data.get("rank_peaks_bytes", ()))
        return cls(**values)
