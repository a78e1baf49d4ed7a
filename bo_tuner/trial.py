"""`TrialRecord`: a trial as a study keeps it, and how it stands in Optuna's attributes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bo_tuner.config import TrainConfig
from bo_tuner.outcome import Outcome, TrialResult

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

__all__ = ["TrialRecord", "best_of", "records_of"]

RESULT_KEY = "result"
ATTEMPTS_KEY = "attempts"
_FIELDS = TrainConfig().params().keys()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    """One trial: its config, and its result once it has one."""

    number: int
    """As Optuna counts, from 0."""
    config: TrainConfig
    result: TrialResult | None = None
    """None while it runs, and after an interruption."""
    attempts: tuple[TrialResult, ...] = ()
    """Earlier tries of the same trial that taught nothing (TIMEOUT, FAILED)."""

    @classmethod
    def from_optuna(cls, trial: FrozenTrial) -> TrialRecord:
        """Read a trial of ours."""
        data = trial.user_attrs.get(RESULT_KEY)
        return cls(
            number=trial.number,
            config=TrainConfig.from_params(trial.params),
            result=TrialResult.from_dict(data) if data is not None else None,
            attempts=tuple(TrialResult.from_dict(attempt) for attempt in trial.user_attrs.get(ATTEMPTS_KEY, [])),
        )

    @property
    def samples_per_s(self) -> float | None:
        """Of a complete trial."""
        return self.result.samples_per_s if self.result else None

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
        is_complete = result is not None and result.outcome is Outcome.COMPLETE and result.measurement is not None
        return {
            "number": self.number,
            "name": self.config.name,
            "outcome": result.outcome.value if result else None,
            "reason": result.reason if result else "no result yet",
            "samples_per_s": self.samples_per_s,
            "step_time_s": result.measurement.step_time_s if is_complete and result and result.measurement else None,
            "peak_memory_bytes": result.peak_memory_bytes if result else None,
            "wall_s": self.wall_s,
            "params": {**params, "extra": extra},
        }


def records_of(trials: Iterable[FrozenTrial]) -> list[TrialRecord]:
    """The trials of a study that have a config, by number."""
    return [TrialRecord.from_optuna(trial) for trial in trials if trial.params.keys() >= _FIELDS]


def ranked(records: Iterable[TrialRecord]) -> list[TrialRecord]:
    """Complete trials, fastest first; of equals the one with the lower peak memory."""
    complete = [record for record in records if record.samples_per_s is not None]
    return sorted(
        complete,
        key=lambda record: (
            -(record.samples_per_s or 0.0),
            (record.result.peak_memory_bytes if record.result else None) or math.inf,
            record.number,
        ),
    )


def last_limit_bytes(records: Sequence[TrialRecord]) -> int | None:
    """Memory limit per rank of the newest trial; None before the first has ended."""
    limits = [record.result.limit_bytes for record in records if record.result and record.result.limit_bytes]
    return limits[-1] if limits else None


def best_of(records: Iterable[TrialRecord]) -> TrialRecord | None:
    """The fastest complete trial; None when nothing completed."""
    return next(iter(ranked(records)), None)
