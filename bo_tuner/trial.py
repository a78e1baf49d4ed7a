"""`TrialRecord`: a trial as a study keeps it, and how it stands in Optuna's attributes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from bo_tuner.config import TrainConfig
from bo_tuner.goal import THROUGHPUT, Goal
from bo_tuner.outcome import Outcome, TrialResult
from bo_tuner.precision import LaunchNoise
from bo_tuner.stored import must_be_readable

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

__all__ = [
    "TrialRecord",
    "best_of",
    "goal_of",
    "holds",
    "last_limit_bytes",
    "launch_noise",
    "memory_margin",
    "pareto_front",
    "ranked",
    "records_of",
]

RESULT_KEY = "result"
ATTEMPTS_KEY = "attempts"
_SINCE_EVER = ("zero_stage", "micro_batch_size", "grad_accum_steps")
"""Fields that trials of every version have; one that lacks a later field ran with what is its default now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    """One trial: its config, and its result once it has one."""

    number: int
    """As Optuna counts, from 0."""
    config: TrainConfig
    result: TrialResult | None = None
    """None while it runs, and after an interruption."""
    attempts: tuple[TrialResult, ...] = ()
    """Earlier tries of the same trial: that taught nothing (TIMEOUT, FAILED), or were measured with clocks held down."""
    repeats: tuple[TrialResult, ...] = ()
    """Later launches of the same config, which show what launches differ by."""
    confirmation: TrialResult | None = None
    """A later and longer run, of a config that was the best."""
    memory_limit_bytes: int | None = None
    """Of the study today, per rank; the trial may have run under another one. None where the study does not say."""
    goal: Goal = THROUGHPUT
    """Of the study: what its trials are judged by."""

    @classmethod
    def from_optuna(cls, trial: FrozenTrial, goal: Goal = THROUGHPUT) -> TrialRecord:
        """Read a trial of ours; what was learned of it later is kept with the study.

        Raises:
            UnreadableStudyError: It is damaged, or written by a newer version in a way that this one does not know.
        """
        with must_be_readable(f"trial {trial.number}"):
            data = trial.user_attrs.get(RESULT_KEY)
            return cls(
                number=trial.number,
                config=TrainConfig.from_params(trial.params),
                result=TrialResult.from_dict(data) if data is not None else None,
                attempts=tuple(TrialResult.from_dict(attempt) for attempt in trial.user_attrs.get(ATTEMPTS_KEY, [])),
                goal=goal,
            )

    @property
    def samples_per_s(self) -> float | None:
        """Of a complete trial, as it was measured in it."""
        return self.result.samples_per_s if self.result else None

    @property
    def runs(self) -> list[TrialResult]:
        """Of its config, as far as they have ended and count."""
        return [run for run in (self.result, *self.repeats, self.confirmation) if run is not None]

    @property
    def peak_memory_bytes(self) -> int | None:
        """Highest of all ranks and all its runs; None when nothing was read."""
        return max((run.peak_memory_bytes for run in self.runs if run.peak_memory_bytes), default=None)

    @property
    def fits_today(self) -> bool:
        """Its peak is not over a memory limit that was lowered since."""
        peak = self.peak_memory_bytes
        return peak is None or self.memory_limit_bytes is None or peak <= self.memory_limit_bytes

    @property
    def is_confirmed(self) -> bool | None:
        """A longer run held what the trial promised; None before there was one."""
        if self.confirmation is None or self.result is None or self.result.measurement is None:
            return None
        again = self.confirmation.samples_per_s
        return again is not None and again >= self.result.measurement.samples_per_s_interval[0]

    @property
    def least_share(self) -> float:
        """Of the rate of a complete trial, what the lower end of its 95 % interval is."""
        measured = self.result.measurement if self.result else None
        return measured.samples_per_s_interval[0] / measured.samples_per_s if measured else 1.0

    @property
    def standing(self) -> TrialResult | None:
        """What its config is taken to do today: as its confirmation showed, if it has one, which is longer and was not chosen for its rate,
        else as its trial did; with the highest peak of all its runs.

        None where it is not complete, or does not fit any more.
        """
        if self.result is None or self.samples_per_s is None or not self.fits_today:
            return None
        return replace(self.confirmation or self.result, peak_memory_bytes=self.peak_memory_bytes)

    @property
    def standing_samples_per_s(self) -> float | None:
        """Of `standing`; None too where its confirmation failed."""
        standing = self.standing
        return standing.samples_per_s if standing else None

    @property
    def standing_value(self) -> float | None:
        """The same in the unit of the goal; None too where that is not known."""
        standing = self.standing
        return self.goal.value(standing) if standing else None

    @property
    def beside(self) -> str:
        """What is to follow its standing samples/s: the standing value, where the goal is another one."""
        return self.goal.beside(self.standing)

    @property
    def has_run(self) -> bool:
        """Its steps ran, so its config fits."""
        return self.result is not None and self.result.outcome in (Outcome.COMPLETE, Outcome.PRUNED)

    @property
    def wall_s(self) -> float:
        """Seconds of all its tries that ended."""
        tries = [*self.attempts, *([self.result] if self.result else [])]
        return sum(result.wall_s for result in tries)

    def to_dict(self) -> dict[str, Any]:
        """One row of `show --json`."""
        result = self.result
        own = self.config.params()
        extra = dict(self.config.extra)
        params = {name: value for name, value in own.items() if name not in extra}
        is_complete = result is not None and result.outcome is Outcome.COMPLETE
        measured = result.measurement if result and is_complete else None
        return {
            "number": self.number,
            "name": self.config.name,
            "outcome": result.outcome.value if result else None,
            "reason": result.reason if result else "no result yet",
            "samples_per_s": self.samples_per_s,
            "value": self.goal.value(self),
            "step_time_s": measured.step_time_s if measured else None,
            "median_step_time_s": measured.median_step_time_s if measured else None,
            "peak_memory_bytes": self.peak_memory_bytes,
            "power_w": measured.power_w if measured else None,
            "energy_j": measured.energy_j if measured else None,
            "throttling": list(measured.throttling) if measured else [],
            "wall_s": self.wall_s,
            "params": {**params, "extra": extra},
            **self._precision(),
        }

    def _precision(self) -> dict[str, Any]:
        """How well a complete trial is known, and what DeepSpeed's tuner would have said of it."""
        measurement = self.result.measurement if self.result and self.samples_per_s is not None else None
        again = self.confirmation
        return {
            "samples_per_s_interval": [_finite(rate) for rate in measurement.samples_per_s_interval]
            if measurement
            else None,
            "n_steps": len(measurement.slowest_s) if measurement else None,
            "engine_samples_per_s": _finite(measurement.engine_samples_per_s) if measurement else None,
            "bound_samples_per_s": self.result.bound_samples_per_s if self.result else None,
            "fits_today": self.fits_today,
            "standing_samples_per_s": self.standing_samples_per_s,
            "standing_value": self.standing_value,
            "confirmed": self.is_confirmed,
            "confirmation": {
                "outcome": again.outcome.value,
                "reason": again.reason,
                "samples_per_s": again.samples_per_s,
                "peak_memory_bytes": again.peak_memory_bytes,
            }
            if again
            else None,
        }


def _finite(value: float) -> float | None:
    """JSON knows no infinity."""
    return value if math.isfinite(value) else None


def records_of(trials: Iterable[FrozenTrial], goal: Goal = THROUGHPUT) -> list[TrialRecord]:
    """The trials of a study that have a config, by number.

    Raises:
        UnreadableStudyError: One cannot be read; the text says which.
    """
    return [TrialRecord.from_optuna(trial, goal) for trial in trials if trial.params.keys() >= set(_SINCE_EVER)]


def goal_of(records: Sequence[TrialRecord]) -> Goal:
    """What these trials of one study are judged by; samples/s where there are none."""
    return records[0].goal if records else THROUGHPUT


def ranked(records: Iterable[TrialRecord]) -> list[TrialRecord]:
    """Complete trials that still fit, by what they are taken to reach, the best first; of equals the one with the lower peak memory.

    Of several trials the highest rate is also the luckiest. So the best of those with a confirmation stays before all that have none, but
    for those that are ahead by more than their interval. One whose value is not known is not among them.
    """
    scored = [
        (record.goal.measure.score(value), record) for record in records if (value := record.standing_value) is not None
    ]
    held = max((score for score, record in scored if record.confirmation is not None), default=math.inf)

    def place(pair: tuple[float, TrialRecord]) -> tuple[float, bool, float, float, int]:
        score, record = pair
        stands_back = record.confirmation is None and score >= held >= score * record.least_share
        counts = held if stands_back else score
        return (-counts, stands_back, -score, record.peak_memory_bytes or math.inf, record.number)

    return [record for _, record in sorted(scored, key=place)]


def pareto_front(records: Iterable[TrialRecord]) -> list[TrialRecord]:
    """Under a goal of two measures the trials that no other one beats in one without being worse in the other; the best by the first
    comes first. Under any other goal none.
    """
    front: list[TrialRecord] = []
    reached = -math.inf
    for record in ranked(records):
        scores = record.goal.scores(record.standing) if record.standing and record.goal.has_front else None
        if scores is not None and scores[-1] > reached:
            reached = scores[-1]
            front.append(record)
    return front


def last_limit_bytes(records: Sequence[TrialRecord]) -> int | None:
    """Memory limit per rank of the study today, or of its newest trial; None where neither is known."""
    if records and records[-1].memory_limit_bytes:
        return records[-1].memory_limit_bytes
    limits = [record.result.limit_bytes for record in records if record.result and record.result.limit_bytes]
    return limits[-1] if limits else None


def memory_margin(record: TrialRecord, limit_bytes: int | None) -> int | None:
    """Bytes per rank that all runs of a config left below the limit; negative over it, None when one of the two is unknown."""
    peak = record.peak_memory_bytes
    return None if peak is None or limit_bytes is None else limit_bytes - peak


def best_of(records: Iterable[TrialRecord]) -> TrialRecord | None:
    """The best of the complete trials that still fit, by the study's goal; None where there is none."""
    return next(iter(ranked(records)), None)


def holds(result: TrialResult, limit_bytes: int) -> bool:
    """A result still says something: what our own limit or the kernel ended does not under a higher limit.

    Args:
        result: Of a trial or of its confirmation.
        limit_bytes: Memory limit per rank today.
    """
    return result.outcome not in (Outcome.GUARDED, Outcome.HOST_OOM) or (result.limit_bytes or 0) >= limit_bytes


def launch_noise(records: Iterable[TrialRecord]) -> LaunchNoise:
    """What launches of one config differ by, as far as those that ran again show it."""
    return LaunchNoise.of(
        [run.measurement.slowest_s for run in record.runs if run.samples_per_s and run.measurement]
        for record in records
    )
