"""`Engine`: ask, run, tell, until the budget is used up or nothing is left to try."""

from __future__ import annotations

import contextlib
import enum
import functools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from bo_tuner.budget import Budget, Spent
from bo_tuner.config import TrainConfig
from bo_tuner.confirmation import LENGTH, confirmation_s, confirmation_steps, next_to_confirm
from bo_tuner.deadlines import trial_deadline_s
from bo_tuner.objectives import EventSink, Objective, TrialEvent
from bo_tuner.open_candidates import OpenCandidates
from bo_tuner.outcome import Outcome, TrialLimits, TrialResult
from bo_tuner.samplers import CandidateSampler, SpaceExhausted
from bo_tuner.space import default_config, lightest
from bo_tuner.storage import Manifest, StudyStore
from bo_tuner.trial import TrialRecord, best_of, reopened

__all__ = ["Engine", "Progress", "Snapshot", "StopReason"]

MOST_KILLS = 2
"""A config is set aside once so many of its launches took the process that drives the study with them."""
_MOST_FAILURES_IN_A_ROW = 3
_USUAL_STEPS = 12
"""For the deadline, where the number of steps is not limited."""
_FEWEST_REPEATS = 2
"""Launches of the first complete config beyond its trial, which show what launches differ by; ..."""
_MOST_REPEATS = 4
"""... so many until another launch is known to lie within ..."""
_NEAR = 0.05
"""... this fraction of a rate, with 95 %; ..."""
_REPEAT_FROM_TRIALS = 8
"""... in studies of at least so many trials, ..."""
_REPEAT_FRACTION = 0.05
"""... and where they take at most this much of the time there is."""
_SMALL_CHANCE = 0.05
"""Of a gain that counts: below it the study ends."""
_LONGEST_OF = 32
"""Micro-batches whose largest the memory of a confirmed config must hold."""


class StopReason(enum.StrEnum):
    """Why a run ended."""

    BUDGET = "the budget is used up"
    EXHAUSTED = "every candidate has run or is ruled out"
    CONVERGED = "hardly any candidate can be faster"
    NOTHING_FITS = "nothing fits: the config that needs least ran out of memory too"
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
    purpose: str = ""
    """Why a trial with a result runs again: `repeat` or `confirm`; empty for a trial's own run."""
    event: TrialEvent | None = None
    """The newest of that trial."""
    memory_limit_bytes: int = 0
    """Per rank."""


class Progress(Protocol):
    """Told of a study's progress: `shows` often, `ended` once a trial, `ran_again` once a repeat, `close` when nothing more comes."""

    def shows(self, snapshot: Snapshot) -> None:
        """A step was made."""
        ...

    def ended(self, record: TrialRecord, snapshot: Snapshot) -> None:
        """A trial has its result."""
        ...

    def ran_again(self, record: TrialRecord, snapshot: Snapshot) -> None:
        """A trial's config was repeated, or confirmed: its record holds the result, and the snapshot the purpose."""
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
        limits: TrialLimits,
        n_ranks: int,
        progress: Progress,
        confirms: bool = True,
        min_gain: float = 0.0,
        first: Sequence[TrainConfig] = (),
    ) -> None:
        """Put the parts together.

        Args:
            store: The study, created already and driven by this process.
            sampler: Chooses.
            candidates: What it chooses from.
            objective: Runs.
            budget: For the study as a whole, earlier runs included.
            limits: Memory, steps and precision of every trial; deadline, incumbent and the noise of launches are filled in.
            n_ranks: World size.
            progress: Is told.
            confirms: The first complete config is repeated, and the winner confirmed.
            min_gain: The study ends once a candidate that is faster than the best by more than this fraction is unlikely, as far as the
                sampler can tell; 0 never ends it for that.
            first: Configs that run before the sampler is asked, as far as they are open.
        """
        self._store = store
        self._sampler = sampler
        self._candidates = candidates
        self._objective = objective
        self._budget = budget
        self._usual_limits = limits
        self._n_ranks = n_ranks
        self._progress = progress
        self._confirms = confirms
        self._min_gain = min_gain
        self._first = first
        self.chance_of_gain: float | None = None
        """That any open candidate gains more than `min_gain`, when last asked; None while nothing can be told."""

    def run(self) -> StopReason:
        """Go on with the study until it ends; then the progress is closed.

        Raises:
            StoreError: The storage stopped answering.
            StudyBusyError: Another process took the study over.
            LaunchError: Trials cannot be started at all.
        """
        with contextlib.closing(self._progress):
            self._store.use_sampler(self._sampler)
            self._store.note_memory_limit(self._usual_limits.memory_bytes)
            reason = self._search()
            while (
                self._settle_best()
                and reason is StopReason.CONVERGED
                and not self._has_converged(self._store.records())
            ):
                reason = self._search()
            return reason

    def _search(self) -> StopReason:
        n_before = len(self._store.records())
        interrupted = self._store.settle()
        while True:
            self._store.check_lease()
            records = self._store.records()
            if self._is_used_up(records):
                return StopReason.BUDGET
            if interrupted:
                if not self._run_trial(interrupted.pop(0)):
                    return StopReason.BUDGET
                continue
            has_completed = any(record.standing_samples_per_s is not None for record in records)
            if not has_completed and _is_broken(records[n_before:]):  # a mended machine gets another chance
                return StopReason.BROKEN
            if self._nothing_fits(records):
                return StopReason.NOTHING_FITS
            has_converged = self._has_converged(records)
            try:
                config = self._baseline(records) if has_converged else self._next_config(records)
            except SpaceExhausted:
                return StopReason.EXHAUSTED
            if config is None:
                return StopReason.CONVERGED
            if not self._run_trial(self._store.begin(config, self._sampler.search_space)):
                return StopReason.BUDGET
            self._repeat_first()

    def _has_converged(self, records: Sequence[TrialRecord]) -> bool:
        if self._min_gain <= 0:
            return False
        self.chance_of_gain = self._sampler.chance_of_gain(records, self._min_gain)
        return self.chance_of_gain is not None and self.chance_of_gain < _SMALL_CHANCE

    def _baseline(self, records: Sequence[TrialRecord]) -> TrainConfig | None:
        """The default config, against which the gain is told, as long as it has not run and may fit."""
        config = default_config(self._candidates.all)
        return config if config in self._candidates.open(records) else None

    def _next_config(self, records: Sequence[TrialRecord]) -> TrainConfig:
        """The sampler's choice, from the first trial on if it knows what to expect.

        Otherwise the default config comes first, against which the gain is told; where it does not run, the lightest candidate
        shows whether the model trains at all. After a trial that ran out of memory it does so in any case, as long as nothing has run.
        """
        still_open = set(self._candidates.open(records)) if self._first else ()
        for config in self._first:
            if config in still_open:
                return config
        standing = self._candidates.standing(records)
        if not standing and not self._sampler.expects:
            return default_config(self._candidates.all)
        is_blind = not self._sampler.expects or any(_ended_by_memory(record) for record in standing)
        if is_blind and not any(record.has_run for record in standing):
            config = lightest(self._candidates.all)
            if config in self._candidates.open(records):
                return config
        return self._sampler.next_config(records)

    def _nothing_fits(self, records: Sequence[TrialRecord]) -> bool:
        """The lightest candidate ran out of memory, and nothing else has run."""
        standing = self._candidates.standing(records)
        if any(record.has_run for record in standing):
            return False
        least = lightest(self._candidates.all)
        return any(record.config == least and _ended_by_memory(record) for record in standing)

    def _run_trial(self, record: TrialRecord, *, to_its_end: bool = False) -> bool:
        """Run a trial to its end; False where the budget ended it: it stays interrupted, and runs again under a larger one.

        Args:
            record: It runs.
            to_its_end: It is not ended for being slow.
        """
        while True:
            records = self._store.records()
            limits = replace(self._limits(record.config, records), left_s=self._search_s_left(records))
            if to_its_end:
                limits = replace(limits, incumbent_samples_per_s=None)
            result = self._launch(record, limits, records)
            if limits.ran_out(result):
                if self._manifest.origin.is_real and not self._is_used_up(records):
                    continue  # this process was stopped meanwhile, and the clock of the trial went on
                return False
            if not _deserves_another_try(result, record.attempts) or self._store.launches.n_kills(record) >= MOST_KILLS:
                break
            record = self._store.add_attempt(record, result)
        counts = _that_counts(result, record.attempts)
        if counts is not result:
            others = tuple(attempt for attempt in record.attempts if attempt is not counts)
            record, result = self._store.keep_attempts(record, (*others, result)), counts
        self._store.finish(record, result)
        records = self._store.records()
        now = next((known for known in records if known.number == record.number), record)
        self._progress.ended(now, self._snapshot(records))
        return True

    def _launch(
        self, record: TrialRecord, limits: TrialLimits, records: Sequence[TrialRecord], purpose: str = ""
    ) -> TrialResult:
        """Run a config once; not if this process, or the machine, died of it twice."""
        n_kills = self._store.launches.n_kills(record, purpose)
        if n_kills >= MOST_KILLS:
            return TrialResult(
                outcome=Outcome.FAILED,
                reason=f"set aside: this process was killed, or the machine went down, {n_kills} times while it ran",
                limit_bytes=limits.memory_bytes,
            )
        with self._store.launches.counted(record, purpose):
            return self._objective(record.config, limits=limits, on_event=self._sink(record, records, purpose))

    # -- running configs again -------------------------------------------------------------------------------------

    def _repeat_first(self) -> None:
        """Once something is complete, run it again, to learn what launches differ by."""
        records = self._store.records()
        first = next((record for record in records if record.samples_per_s is not None), None)
        if first is None or first.repeats or not self._may_repeat(first):
            return
        for draw in range(1, _MOST_REPEATS + 1):
            result = self._run_again(first, "repeat", replace(self._limits(first.config, records), data_draw=draw))
            self._store.add_repeat(first, result)
            first = next(record for record in self._store.records() if record.number == first.number)
            self._tell_again(first, "repeat")
            noise = first.noise
            if draw >= _FEWEST_REPEATS and (noise is None or math.sqrt(2) * noise.half_width <= _NEAR):
                break

    def _may_repeat(self, first: TrialRecord) -> bool:
        if not self._confirms or (self._budget.trials or _REPEAT_FROM_TRIALS) < _REPEAT_FROM_TRIALS:
            return False
        spent = self._store.spent()
        left = self._budget.seconds_left(spent)
        return left is None or first.wall_s * _MOST_REPEATS <= _REPEAT_FRACTION * left

    def _settle_best(self) -> bool:
        """Confirm the finalists, and run trials to their end that were ended early and might be the best after all, while there is time.

        Returns:
            Something ran.
        """
        n_confirmed, n_reopened = 0, 0
        while True:
            records = self._store.records()
            finalist = self._finalist(records)
            again = next(iter(reopened(records)), None)
            needs = (
                LENGTH if n_confirmed else 1.0
            )  # for the first, time was kept back, of which starts and ends take some
            if finalist is not None and self._has_time(finalist, records, times=needs):
                self._confirm(finalist, records)
                n_confirmed += 1
            elif again is not None and self._has_time(again, records):
                trial = self._store.begin(again.config, self._sampler.search_space)
                if not self._run_trial(trial, to_its_end=True):
                    return True
                n_reopened += 1
            else:
                return n_confirmed + n_reopened > 0

    def _finalist(self, records: Sequence[TrialRecord]) -> TrialRecord | None:
        if not self._confirms:
            return None
        return next_to_confirm(records, self._sampler.promising(records), min_gain=self._min_gain)

    def _has_time(self, record: TrialRecord, records: Sequence[TrialRecord], *, times: float = 1.0) -> bool:
        """So many times what a trial took is left."""
        left_s = self._budget.seconds_left(self._store.spent(records))
        return left_s is None or left_s > times * record.wall_s

    def _confirm(self, record: TrialRecord, records: Sequence[TrialRecord]) -> None:
        """Run a finalist again, longer, on other data than any run before; of a round all see the same."""
        assert record.result is not None and record.result.measurement is not None
        limits = replace(
            self._limits(record.config, records),
            min_steps=confirmation_steps(record.result.measurement),
            max_steps=None,
            data_draw=_MOST_REPEATS + 1 + len(record.confirmations),
            longest_of=_LONGEST_OF,
        )
        result = self._run_again(record, "confirm", limits)
        if _deserves_another_try(result, ()):
            result = _that_counts(self._run_again(record, "confirm", limits), [result])
        self._tell_again(self._store.confirm(record, result), "confirm")

    def _run_again(self, record: TrialRecord, purpose: str, limits: TrialLimits) -> TrialResult:
        """Another launch of a trial's config, never ended for being slow."""
        self._store.check_lease()
        limits = replace(limits, incumbent_samples_per_s=None, longest_step_s=None)
        return self._launch(record, limits, self._store.records(), purpose)

    def _tell_again(self, record: TrialRecord, purpose: str) -> None:
        self._progress.ran_again(record, replace(self._snapshot(self._store.records()), purpose=purpose))

    def _is_used_up(self, records: Sequence[TrialRecord]) -> bool:
        """Nothing is left to run a trial with, or less time than the shortest one took."""
        left_s = self._search_s_left(records)
        shortest_s = min((record.result.wall_s for record in records if record.result and record.has_run), default=0.0)
        is_short = left_s is not None and left_s <= shortest_s
        return is_short or self._budget.is_used_up(self._store.spent(records))

    def _search_s_left(self, records: Sequence[TrialRecord]) -> float | None:
        """Seconds that trials may still take, so that the winner's confirmation fits too; None where time is not limited."""
        left_s = self._budget.seconds_left(self._store.spent(records))
        return None if left_s is None else left_s - self._kept_back_s(records)

    def _kept_back_s(self, records: Sequence[TrialRecord]) -> float:
        """Seconds of the budget that the winner's confirmation will take; none before there is one."""
        return confirmation_s(records) if self._confirms else 0.0

    # -- limits ----------------------------------------------------------------------------------------------------

    def _limits(self, config: TrainConfig, records: Sequence[TrialRecord]) -> TrialLimits:
        best = best_of(records) if self._manifest.goal.follows_rate else None
        return replace(
            self._usual_limits,
            deadline_s=self._deadline_s(config, records),
            longest_step_s=self._candidates.step_limit_s(config),
            incumbent_samples_per_s=best.standing_samples_per_s if best else None,
            launch_half_width=best.half_width_against if best else 0.0,
        )

    @functools.cached_property
    def _manifest(self) -> Manifest:
        """Read once: it never changes."""
        manifest = self._store.manifest()
        assert manifest is not None, "a study that is driven has its manifest"
        return manifest

    def _deadline_s(self, config: TrainConfig, records: Sequence[TrialRecord]) -> float:
        return trial_deadline_s(
            config,
            records,
            n_steps=self._usual_limits.max_steps or _USUAL_STEPS,
            workload=self._manifest.workload,
            device=self._manifest.cluster.device,
            n_ranks=self._n_ranks,
        )

    def _sink(self, record: TrialRecord, records: Sequence[TrialRecord], purpose: str = "") -> EventSink:
        started = time.monotonic()

        def sink(event: TrialEvent) -> None:
            snapshot = self._snapshot(records)
            now = replace(snapshot, running=record, running_since=started, event=event, purpose=purpose)
            self._progress.shows(now)

        return sink

    def _snapshot(self, records: Sequence[TrialRecord]) -> Snapshot:
        return Snapshot(
            records=records,
            budget=self._budget,
            spent=self._store.spent(records),
            memory_limit_bytes=self._usual_limits.memory_bytes,
        )


def _deserves_another_try(result: TrialResult, before: Sequence[TrialResult]) -> bool:
    """Once after an end that teaches nothing, and once after steps that were timed with clocks held down."""
    if not result.outcome.teaches:
        return all(attempt.outcome.teaches for attempt in before)
    return result.is_throttled and not any(attempt.is_throttled for attempt in before)


def _that_counts(last: TrialResult, before: Sequence[TrialResult]) -> TrialResult:
    """Of all tries of a trial the one measured under the best conditions; the last where none was measured."""
    measured = [result for result in (last, *before) if result.samples_per_s is not None]
    if not measured or (last.outcome.teaches and last not in measured):
        return last
    return min(measured, key=lambda result: (result.is_throttled, -(result.samples_per_s or 0.0)))


def _ended_by_memory(record: TrialRecord) -> bool:
    return record.result is not None and record.result.outcome.is_memory


def _is_broken(records: Sequence[TrialRecord]) -> bool:
    last: list[TrialResult] = [record.result for record in records if record.result][-_MOST_FAILURES_IN_A_ROW:]
    return len(last) == _MOST_FAILURES_IN_A_ROW and not any(result.outcome.teaches for result in last)
