"""`Engine`: ask, run, tell, until the budget is used up or nothing is left to try."""

from __future__ import annotations

import contextlib
import enum
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from bo_tuner.budget import Budget, Spent
from bo_tuner.config import TrainConfig
from bo_tuner.objectives import EventSink, Objective, TrialEvent
from bo_tuner.open_candidates import OpenCandidates
from bo_tuner.outcome import TrialLimits, TrialResult
from bo_tuner.samplers import CandidateSampler, SpaceExhausted
from bo_tuner.space import default_config, lightest
from bo_tuner.storage import StudyStore
from bo_tuner.trial import TrialRecord, best_of

__all__ = ["Engine", "Progress", "Snapshot", "StopReason"]

_FIRST_DEADLINE_S = 600.0
_LEAST_DEADLINE_S = 90.0
_PATIENCE = 10.0
"""A trial may take this many times what the slowest rate so far would need."""
_MOST_FAILURES_IN_A_ROW = 3


class StopReason(enum.StrEnum):
    """Why a run ended."""

    BUDGET = "the budget is used up"
    EXHAUSTED = "every candidate has run or is ruled out"
    BROKEN = "three trials in a row failed or hung, and none completed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Where a study stands, for whoever shows it."""

    records: Sequence[TrialRecord]
    budget: Budget
    spent: Spent
    taken_at: float = field(default_factory=time.monotonic)
    """Of `time.monotonic`: the moment that `spent` holds for."""
    running: TrialRecord | None = None
    """The trial that runs now."""
    running_since: float | None = None
    """Of `time.monotonic`: when its present try began; None when nobody knows."""
    event: TrialEvent | None = None
    """The newest of that trial."""
    memory_limit_bytes: int = 0
    """Per rank."""


class Progress(Protocol):
    """Told of a study's progress. `shows` is called often, `ended` once a trial, `close` when nothing more comes."""

    def shows(self, snapshot: Snapshot) -> None:
        """A step was made."""
        ...

    def ended(self, record: TrialRecord, snapshot: Snapshot) -> None:
        """A trial has its result."""
        ...

    def close(self) -> None:
        """The run is over, or was interrupted: leave the terminal as it was found."""
        ...


class Engine:
    """Runs one study."""

    def __init__(
        self,
        *,
        store: StudyStore,
        sampler: CandidateSampler,
        candidates: OpenCandidates,
        objective: Objective,
        budget: Budget,
        memory_bytes: int,
        n_ranks: int,
        progress: Progress,
    ) -> None:
        """Put the parts together.

        Args:
            store: The study, created already and driven by this process.
            sampler: Chooses.
            candidates: What it chooses from.
            objective: Runs.
            budget: For the study as a whole, earlier runs included.
            memory_bytes: Limit per rank.
            n_ranks: World size.
            progress: Is told.
        """
        self._store = store
        self._sampler = sampler
        self._candidates = candidates
        self._objective = objective
        self._budget = budget
        self._memory_bytes = memory_bytes
        self._n_ranks = n_ranks
        self._progress = progress

    def run(self) -> StopReason:
        """Go on with the study until it ends; then the progress is closed.

        Raises:
            StoreError: The storage stopped answering.
            StudyBusyError: Another process took the study over.
            LaunchError: Trials cannot be started at all.
        """
        with contextlib.closing(self._progress):
            return self._run()

    def _run(self) -> StopReason:
        self._store.use_sampler(self._sampler)
        n_before = len(self._store.records())
        for interrupted in self._store.settle():
            self._run_trial(interrupted)
        while True:
            self._store.check_lease()
            records = self._store.records()
            if self._budget.is_used_up(self._store.spent(records)):
                return StopReason.BUDGET
            if best_of(records) is None and _is_broken(records[n_before:]):  # a mended machine gets another chance
                return StopReason.BROKEN
            try:
                config = self._next_config(records)
            except SpaceExhausted:
                return StopReason.EXHAUSTED
            self._run_trial(self._store.begin(config, self._sampler.search_space))

    def _next_config(self, records: Sequence[TrialRecord]) -> TrainConfig:
        """The sampler's choice, once something has run.

        First of all comes the default config, against which the gain is told; where it does not run, the lightest candidate
        shows whether the model trains at all.
        """
        if not records:
            return default_config(self._candidates.all)
        if not any(record.has_run for record in records):
            config = lightest(self._candidates.all)
            if config in self._candidates.open(records):
                return config
        return self._sampler.next_config(records)

    def _run_trial(self, record: TrialRecord) -> None:
        while True:
            records = self._store.records()
            result = self._objective(
                record.config, limits=self._limits(record.config, records), on_event=self._sink(record, records)
            )
            if result.outcome.teaches or record.attempts:
                break
            record = self._store.add_attempt(record, result)
        self._store.finish(record, result)
        self._progress.ended(replace(record, result=result), self._snapshot(self._store.records()))

    def _limits(self, config: TrainConfig, records: Sequence[TrialRecord]) -> TrialLimits:
        best = best_of(records)
        return TrialLimits(
            memory_bytes=self._memory_bytes,
            deadline_s=self._deadline_s(config, records),
            incumbent_samples_per_s=best.samples_per_s if best else None,
        )

    def _deadline_s(self, config: TrainConfig, records: Sequence[TrialRecord]) -> float:
        """Generous: the longest start so far and all steps at the slowest rate so far, times ten."""
        rates = [rate for record in records if (rate := record.samples_per_s)]
        if not rates:
            return _FIRST_DEADLINE_S
        starts = [(record.result.phases_s or {}).get("start", 0.0) for record in records if record.result]
        steps_s = TrialLimits(memory_bytes=1).max_steps * config.global_batch(self._n_ranks) / min(rates)
        return max(_LEAST_DEADLINE_S, _PATIENCE * (max(starts) + steps_s))

    def _sink(self, record: TrialRecord, records: Sequence[TrialRecord]) -> EventSink:
        started = time.monotonic()

        def sink(event: TrialEvent) -> None:
            snapshot = self._snapshot(records)
            self._progress.shows(replace(snapshot, running=record, running_since=started, event=event))

        return sink

    def _snapshot(self, records: Sequence[TrialRecord]) -> Snapshot:
        return Snapshot(
            records=records,
            budget=self._budget,
            spent=self._store.spent(records),
            memory_limit_bytes=self._memory_bytes,
        )


def _is_broken(records: Sequence[TrialRecord]) -> bool:
    last: list[TrialResult] = [record.result for record in records if record.result][-_MOST_FAILURES_IN_A_ROW:]
    return len(last) == _MOST_FAILURES_IN_A_ROW and not any(result.outcome.teaches for result in last)
