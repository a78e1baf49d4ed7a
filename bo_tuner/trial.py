"""`TrialRecord`: a trial as a study keeps it, and how it stands in Optuna's attributes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from bo_tuner.config import TrainConfig
from bo_tuner.goal import THROUGHPUT, Goal
from bo_tuner.launches import Launch, LaunchNoise, NoisePrior
from bo_tuner.outcome import Measurement, Outcome, TrialResult
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
    "launches_of",
    "memory_margin",
    "pareto_front",
    "ranked",
    "records_of",
    "reopened",
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
    confirmations: tuple[TrialResult, ...] = ()
    """Later and longer runs, of a config that was among the best; after one that was not complete there is no other."""
    memory_limit_bytes: int | None = None
    """Of the study today, per rank; the trial may have run under another one. None where the study does not say."""
    goal: Goal = THROUGHPUT
    """Of the study: what its trials are judged by."""
    noise: LaunchNoise | None = field(default=None, compare=False)
    """Of the study today: what launches of one config differ by; None where the study does not say."""

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
    def confirmation(self) -> TrialResult | None:
        """All its confirmations as one run, or the one that was not complete; None before there is any."""
        if not self.confirmations:
            return None
        last = self.confirmations[-1]
        return last if last.samples_per_s is None else _together(self.confirmations)

    @property
    def told(self) -> TrialResult | None:
        """The run whose figures stand for the config: its confirmation where that is complete, which is longer and was not chosen for its
        rate, else the trial's own; with the highest peak of all its runs. None before the trial has ended.
        """
        again = self.confirmation
        run = again if again is not None and again.samples_per_s is not None else self.result
        return run and replace(run, peak_memory_bytes=self.peak_memory_bytes)

    @property
    def samples_per_s(self) -> float | None:
        """Of the config of a complete trial, as `told`."""
        return self.told.samples_per_s if self.told and self.trial_samples_per_s is not None else None

    @property
    def trial_samples_per_s(self) -> float | None:
        """Of a complete trial, as it was measured in it."""
        return self.result.samples_per_s if self.result else None

    @property
    def samples_per_s_interval(self) -> tuple[float, float] | None:
        """Where the rate of another launch of its config lies with 95 %, by what is known of launches today; the slower first, 0 and infinity
        where one step says nothing. None unless the trial is complete.
        """
        if self.told is None or self.told.measurement is None or self.samples_per_s is None:
            return None
        return self._another(self.told.measurement, n_launches=max(len(self.confirmations), 1))

    def interval_of(self, run: TrialResult) -> tuple[float, float] | None:
        """The same by one of its complete runs alone."""
        return None if run.measurement is None or run.samples_per_s is None else self._another(run.measurement)

    def _another(self, measurement: Measurement, *, n_launches: int = 1) -> tuple[float, float]:
        low, high = measurement.step_time_interval_s
        if self.noise is not None:
            low, high = self.noise.another(measurement.step_time_s, (low, high), n_launches=n_launches)
        return (measurement.global_batch / high, measurement.global_batch / low if low > 0 else math.inf)

    @property
    def half_width_against(self) -> float:
        """As `TrialLimits.launch_half_width`, of a trial that runs against this one."""
        measured = self.told.measurement if self.told else None
        if measured is None or self.noise is None:
            return 0.0
        return self.noise.against(measured.step_time_s, measured.step_time_interval_s)

    @property
    def bound_samples_per_s(self) -> float | None:
        """Of a trial that was ended early: another launch of its config is slower than this with 97.5 %, by what is known of launches today."""
        if self.result is None or self.result.outcome is not Outcome.PRUNED:
            return None
        measured, by_steps = self.result.measurement, self.result.steps_bound_samples_per_s
        if self.noise is None or measured is None or by_steps is None:
            return self.result.bound_samples_per_s
        return self.noise.bound(measured.samples_per_s, max(by_steps, measured.samples_per_s))

    @property
    def runs(self) -> list[TrialResult]:
        """Of its config, as far as they have ended and count."""
        return [run for run in (self.result, *self.repeats, *self.confirmations) if run is not None]

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
        again = self.confirmation
        if again is None or self.result is None or self.result.measurement is None:
            return None
        return again.samples_per_s is not None and again.samples_per_s >= self._another(self.result.measurement)[0]

    @property
    def least_share(self) -> float:
        """Of the rate of a complete trial, what the lower end of its 95 % interval is."""
        interval, rate = self.samples_per_s_interval, self.samples_per_s
        return interval[0] / rate if interval is not None and rate else 1.0

    @property
    def standing(self) -> TrialResult | None:
        """What its config is taken to do today, as `told`. None where it is not complete, its confirmation failed, or it does not fit any more."""
        has_failed = bool(self.confirmations) and self.confirmations[-1].samples_per_s is None
        return None if self.samples_per_s is None or has_failed or not self.fits_today else self.told

    @property
    def standing_samples_per_s(self) -> float | None:
        """Of `standing`."""
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
        measured = self.told.measurement if self.told and is_complete else None
        return {
            "number": self.number,
            "name": self.config.name,
            "outcome": result.outcome.value if result else None,
            "reason": result.reason if result else "no result yet",
            "samples_per_s": self.samples_per_s,
            "trial_samples_per_s": self.trial_samples_per_s,
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
        measurement = self.told.measurement if self.told and self.samples_per_s is not None else None
        interval, again = self.samples_per_s_interval, self.confirmation
        return {
            "samples_per_s_interval": [_finite(rate) for rate in interval] if interval else None,
            "n_steps": len(measurement.slowest_s) if measurement else None,
            "n_skipped": measurement.n_skipped if measurement else None,
            "engine_samples_per_s": _finite(measurement.engine_samples_per_s) if measurement else None,
            "bound_samples_per_s": None if self.bound_samples_per_s is None else _finite(self.bound_samples_per_s),
            "fits_today": self.fits_today,
            "standing_samples_per_s": self.standing_samples_per_s,
            "standing_value": self.standing_value,
            "confirmed": self.is_confirmed,
            "confirmation": {
                "outcome": again.outcome.value,
                "n_launches": len(self.confirmations),
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


def launch_noise(records: Iterable[TrialRecord], prior: NoisePrior) -> LaunchNoise:
    """What launches of one config differ by, as far as those that ran again show it."""
    return prior.given(launches_of(record.runs) for record in records if len(record.runs) > 1)


def launches_of(runs: Iterable[TrialResult]) -> list[Launch]:
    """Those of one config's runs that are complete."""
    return [
        Launch.of(run.measurement.step_time_s, run.measurement.step_time_interval_s)
        for run in runs
        if run.samples_per_s and run.measurement
    ]


def reopened(records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Trials that were ended early, and might be the best after all: it is now taken to be slower than they may be, or launches differ by more
    than was known. The most promising come first; one whose config has been run again to its end is settled.
    """
    best = best_of(records)
    rate = best.standing_samples_per_s if best else None
    done = {record.config for record in records if record.result and record.result.outcome is not Outcome.PRUNED}
    found = [
        (bound, record)
        for record in records
        if record.config not in done
        and (
            record.result is None or record.result.step_limit_s is None
        )  # it is not ended for being slower than others
        and (bound := record.bound_samples_per_s) is not None
    ]
    found.sort(key=lambda pair: -pair[0])
    return [record for bound, record in found if rate is not None and bound > rate]


def _together(runs: Sequence[TrialResult]) -> TrialResult:
    """Complete runs of one config as one: all their steps, the highest peaks, the newest of what else they tell."""
    measured = [run.measurement for run in runs if run.measurement is not None]
    if len(measured) == 1:
        return runs[-1]
    last = measured[-1]
    powers, energies = ([getattr(one, name) for one in measured] for name in ("power_w", "energy_j"))
    joined = replace(
        last,
        step_times_s=_side_by_side([one.step_times_s for one in measured]),
        engine_times_s=_side_by_side([one.engine_times_s for one in measured]),
        peak_memory_bytes=tuple(map(max, *(one.peak_memory_bytes for one in measured))),
        power_w=None if None in powers else statistics.fmean(powers),
        energy_j=None if None in energies else sum(energies),
        throttling=tuple(sorted({reason for one in measured for reason in one.throttling})),
        is_loss_finite=all(one.is_loss_finite for one in measured),
        is_settled=all(one.is_settled for one in measured),
        n_warmup=sum(one.n_warmup for one in measured),
        n_skipped=sum(one.n_skipped for one in measured),
    )
    return replace(runs[-1], measurement=joined, wall_s=sum(run.wall_s for run in runs))


def _side_by_side(runs: Sequence[tuple[tuple[float, ...], ...]]) -> tuple[tuple[float, ...], ...]:
    """Times of several runs, by rank, as those of one."""
    return tuple(tuple(time for row in rows for time in row) for rows in zip(*runs, strict=True))
