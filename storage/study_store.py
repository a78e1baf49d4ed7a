"""`StudyStore`: one study in an Optuna storage.

Besides Optuna's tables there are only trial and study attributes, so the Optuna dashboard opens any study as it is. A trial
appears whole, in one transaction, with its config and state RUNNING; then its result is written as one attribute; then Optuna
is told. Whatever moment a process is killed at, the next one finds either no trial, a trial to run again, or a result to tell.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bo_tuner.budget import Spent
from bo_tuner.config import TrainConfig
from bo_tuner.errors import StoreError, StudyBusyError, UnreadableStudyError
from bo_tuner.goal import THROUGHPUT, Goal
from bo_tuner.hardware import Hardware
from bo_tuner.launches import prior_of
from bo_tuner.origin import REAL, Origin
from bo_tuner.outcome import Outcome, TrialResult
from bo_tuner.profile import ModelProfile
from bo_tuner.storage.distributions import joined_distributions
from bo_tuner.storage.holder import HolderWatch
from bo_tuner.storage.lease import Lease
from bo_tuner.storage.lease_row import LeaseRow, fenced
from bo_tuner.storage.location import Location, storage_answers
from bo_tuner.storage.manifest import Manifest
from bo_tuner.storage.pauses import Pauses
from bo_tuner.storage.told_values import keep_told_values
from bo_tuner.stored import must_be_readable
from bo_tuner.text import did_you_mean, gib, rate
from bo_tuner.trial import ATTEMPTS_KEY, RESULT_KEY, TrialRecord, best_of, holds, launch_noise, pareto_front, records_of

if TYPE_CHECKING:
    import optuna
    import plotly.graph_objects as go
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler

__all__ = ["StudyStore", "best_note"]

MANIFEST_KEY = "manifest"
_SPENT_KEY = "spent"
_STOP_KEY = "stop"
_LIMIT_KEY = "memory_limit_bytes"
_CALIBRATION_KEY = "calibration"
_PROFILE_KEY = "profile"
CHECKS_KEY = "checks:"
"""Followed by a trial's number: the runs of its config after it was told, when it takes no more attributes."""
_LAUNCHES_KEY = "launches"
"""By trial and purpose, how many launches began whose end was not seen."""
_CONSTRAINT = "memory"


class StudyStore:
    """One study: its manifest, trials, spending, and the right to drive it."""

    def __init__(self, location: Location, name: str) -> None:
        """Point at study `name`; it need not exist yet."""
        self.location = location
        self.name = name
        self._study: optuna.Study | None = None
        self._lease: Lease | None = None
        self._watch: HolderWatch | None = None
        self._spent_before = Spent()
        self._driving_since = 0.0
        self._pauses = Pauses()
        self._n_ranks = 0
        self._manifest: Manifest | None = None
        self._retried: frozenset[int] = frozenset()

    @classmethod
    def existing(cls, location: Location, name: str) -> StudyStore:
        """A study that must be there.

        Raises:
            StoreError: It is not; the text lists those that are.
        """
        names = study_names(location)
        if name not in names:
            known = (
                f"studies there: {', '.join(names)}" if names else "there is none yet: bo-tuner tune MODEL starts one"
            )
            raise StoreError(f"no study {name!r} in {location.shown_url}{did_you_mean(name, names)}; {known}")
        return cls(location, name)

    # -- what it is ------------------------------------------------------------------------------------------------

    def manifest(self) -> Manifest | None:
        """What the study was started for, which never changes; None when it does not exist, or died before that was written.

        Raises:
            StoreError: It exists, and is not one of ours, or cannot be read.
        """
        if self._manifest is not None:
            return self._manifest
        if not self.location.holds_anything or self.name not in study_names(self.location):
            return None
        data = self._user_attrs().get(MANIFEST_KEY)
        if data is None:
            if self._trials():
                raise self._foreign()
            return None
        with self._readable():
            self._manifest = Manifest.from_dict(data)
        return self._manifest

    def create(self, manifest: Manifest) -> Manifest:
        """Write a new study; a study without a manifest is completed.

        Returns:
            The manifest that holds: that of another process, if one was faster.

        Raises:
            StudyMismatchError: Another process was faster, with something else.
            StoreError: The study is not one of ours.
        """
        import optuna

        storage = self.location.open()
        with self._answers():
            self._study = optuna.create_study(
                study_name=self.name, storage=storage, directions=manifest.goal.directions, load_if_exists=True
            )
            stored = self._user_attrs().get(MANIFEST_KEY)
            if stored is None:
                if [direction.name.lower() for direction in self._study.directions] != manifest.goal.directions:
                    raise self._foreign()
                storage.set_study_user_attr(self.id, MANIFEST_KEY, manifest.to_dict())
                return manifest
        with self._readable():
            first = Manifest.from_dict(stored)
        first.check_same(manifest, study_name=self.name)
        return first

    @property
    def origin(self) -> Origin:
        """Where its figures come from; of a study that died before that was written, or is none of ours, it counts as real."""
        manifest = self._own_manifest()
        return REAL if manifest is None else manifest.origin

    @property
    def goal(self) -> Goal:
        """What its trials are judged by; samples/s for a study that died before that was written, or is none of ours."""
        manifest = self._own_manifest()
        return THROUGHPUT if manifest is None else manifest.goal

    def _own_manifest(self) -> Manifest | None:
        try:
            return self.manifest()
        except UnreadableStudyError:
            raise
        except StoreError:
            return None

    @property
    def study(self) -> optuna.Study:
        """The Optuna study."""
        if self._study is None:
            import optuna

            storage = self.location.open()
            with self._answers():
                # The sampler is set by whoever asks; naming one spares Optuna from importing its default.
                self._study = optuna.load_study(
                    study_name=self.name, storage=storage, sampler=optuna.samplers.RandomSampler()
                )
        return self._study

    def use_sampler(self, sampler: BaseSampler) -> None:
        """The sampler that `ask` asks."""
        self.study.sampler = sampler

    @property
    def folder(self) -> Path:
        """Logs lie here."""
        return self.location.study_folder(self.name)

    # -- trials ----------------------------------------------------------------------------------------------------

    def records(self) -> list[TrialRecord]:
        """All trials, by number, with what was learned of them since.

        Raises:
            UnreadableStudyError: A trial is damaged, or written by a newer version; the text says which.
        """
        goal, trials, attributes = self.goal, self._trials(), self._user_attrs()
        with self._readable():
            completed = [self._completed(record, attributes) for record in records_of(trials, goal)]
        manifest = self._own_manifest()
        if manifest is None or not manifest.origin.can_confirm:
            return completed
        noise = launch_noise(completed, manifest.noise or prior_of(manifest.cluster.device))
        return [replace(record, noise=noise) for record in completed]

    def _trials(self, *states: optuna.trial.TrialState) -> list[optuna.trial.FrozenTrial]:
        """Those in one of these states; of all states where none is given."""
        with self._answers():
            try:
                return self.study.get_trials(deepcopy=False, states=states or None)
            except (ValueError, KeyError):  # Optuna does not say which
                self._find_unreadable()
                raise

    def _find_unreadable(self) -> None:
        from sqlalchemy import text

        storage = self.location.open()
        with storage.engine.connect() as connection:
            query = "SELECT number, trial_id FROM trials WHERE study_id = :id ORDER BY number"
            trials = list(connection.execute(text(query), {"id": self.id}))
        for number, trial_id in trials:
            with self._readable(), must_be_readable(f"trial {number}"):
                storage.get_trial(trial_id)

    def _completed(self, record: TrialRecord, attributes: Mapping[str, Any]) -> TrialRecord:
        with must_be_readable(f"trial {record.number}"):
            return self._with_checks(record, attributes)

    def _with_checks(self, record: TrialRecord, attributes: Mapping[str, Any]) -> TrialRecord:
        checks = attributes.get(f"{CHECKS_KEY}{record.number}", {})
        limit_bytes: int | None = attributes.get(_LIMIT_KEY)
        stored = checks.get("confirmations", [checks["confirmation"]] if "confirmation" in checks else [])
        confirmations = [TrialResult.from_dict(run) for run in stored]
        if limit_bytes:  # what a lower limit ended is to be made again
            confirmations = [run for run in confirmations if holds(run, limit_bytes)]
        return replace(
            record,
            repeats=tuple(TrialResult.from_dict(repeat) for repeat in checks.get("repeats", [])),
            confirmations=tuple(confirmations),
            memory_limit_bytes=limit_bytes,
        )

    def begin(self, config: TrainConfig, space: Mapping[str, BaseDistribution]) -> TrialRecord:
        """Add a running trial, in one transaction."""
        import optuna

        storage = self.location.open()
        with self._answers():
            template = optuna.trial.create_trial(
                state=optuna.trial.TrialState.RUNNING,
                params=config.params(),
                distributions=joined_distributions(storage, self.id, space),
                user_attrs={"name": config.name},
            )
            trial_id = storage.create_new_trial(self.id, template_trial=template)
            record = TrialRecord.from_optuna(storage.get_trial(trial_id), self.goal)
            return self._completed(record, self._user_attrs())

    def add_attempt(self, record: TrialRecord, result: TrialResult) -> TrialRecord:
        """Keep a try that does not count; the trial goes on running."""
        return self.keep_attempts(record, (*record.attempts, result))

    def keep_attempts(self, record: TrialRecord, attempts: tuple[TrialResult, ...]) -> TrialRecord:
        """Keep these as the tries that do not count."""
        with self._answers():
            self.location.open().set_trial_user_attr(
                self._trial_id(record), ATTEMPTS_KEY, [attempt.to_dict() for attempt in attempts]
            )
        self._save_spent()
        return replace(record, attempts=attempts)

    def finish(self, record: TrialRecord, result: TrialResult) -> None:
        """Write the result, then tell Optuna."""
        storage = self.location.open()
        with self._answers():
            trial_id = self._trial_id(record)
            storage.set_trial_user_attr(trial_id, RESULT_KEY, result.to_dict())
            self._tell(trial_id, result)
        self._save_spent()

    def add_repeat(self, record: TrialRecord, result: TrialResult) -> TrialRecord:
        """Keep another launch of a trial's config."""
        return self._add_check(replace(record, repeats=(*record.repeats, result)))

    def confirm(self, record: TrialRecord, result: TrialResult) -> TrialRecord:
        """Keep a longer run that a trial was confirmed by, or was not."""
        confirmed = self._add_check(replace(record, confirmations=(*record.confirmations, result)))
        self._keep_told_values()
        return confirmed

    def _keep_told_values(self) -> None:
        import optuna

        with self._answers():
            keep_told_values(self.location.open(), self.id, self.records())
            if self._study is not None:  # Optuna never reads the values of a trial that is over again
                self._study = optuna.load_study(
                    study_name=self.name, storage=self.location.open(), sampler=self._study.sampler
                )

    def _add_check(self, record: TrialRecord) -> TrialRecord:
        checks: dict[str, Any] = {"repeats": [repeat.to_dict() for repeat in record.repeats]}
        if record.confirmations:
            checks["confirmations"] = [run.to_dict() for run in record.confirmations]
        self._set_attr(f"{CHECKS_KEY}{record.number}", checks)
        self._save_spent()
        return record

    @contextlib.contextmanager
    def launching(self, record: TrialRecord, purpose: str = "") -> Generator[None]:
        """Count a launch of a trial's config until its end is seen, good or bad: one that stays counted took this process with it."""
        key = _launch_key(record, purpose)
        before = self._launches()
        self._set_attr(_LAUNCHES_KEY, {**before, key: before.get(key, 0) + 1})
        try:
            yield
        except KeyboardInterrupt:
            self.location.open().is_patient = False  # it ends now, whether the storage answers or not
            raise
        finally:
            with contextlib.suppress(
                StoreError, StudyBusyError
            ):  # what follows a storage that fails is told by the next write
                self._set_attr(_LAUNCHES_KEY, before)

    def n_kills(self, record: TrialRecord, purpose: str = "") -> int:
        """Launches of a trial's config that took the process that drove the study with them, or the machine; none may run now."""
        return self._launches().get(_launch_key(record, purpose), 0)

    def _launches(self) -> dict[str, int]:
        launches: dict[str, int] = self._user_attrs().get(_LAUNCHES_KEY, {})
        return launches

    def settle(self) -> list[TrialRecord]:
        """After an interruption: tell Optuna results that it was not told.

        Returns:
            Trials that have no result, to be run again.
        """
        import optuna

        with self._readable():
            running = records_of(self._trials(optuna.trial.TrialState.RUNNING), self.goal)
        unfinished: list[TrialRecord] = []
        for record in running:
            if record.result is None:
                unfinished.append(record)
            else:
                with self._answers():
                    self._tell(self._trial_id(record), record.result)
        return unfinished

    def _tell(self, trial_id: int, result: TrialResult) -> None:
        import optuna

        storage = self.location.open()
        storage.set_trial_user_attr(trial_id, "outcome", result.outcome.value)
        storage.set_trial_user_attr(trial_id, "reason", result.reason)
        # Optuna 5 reads the second; dashboards up to 0.21 read only the first.
        storage.set_trial_system_attr(trial_id, "constraints", [result.constraint])
        storage.set_trial_system_attr(trial_id, f"constraints:{_CONSTRAINT}", result.constraint)
        values, state = self.goal.values(result), optuna.trial.TrialState.COMPLETE
        if values is None:  # also where steps were timed, and the goal's own figure is not known
            state = optuna.trial.TrialState.PRUNED if result.outcome.teaches else optuna.trial.TrialState.FAIL
        storage.set_trial_state_values(trial_id, state, values)

    def _trial_id(self, record: TrialRecord) -> int:
        return self.location.open().get_trial_id_from_study_id_trial_number(self.id, record.number)

    # -- driving ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def drive(self, *, n_ranks: int, budget: str = "", since: float | None = None) -> Generator[None]:
        """Hold the lease, and count the time as spent, but for that in which this process was stopped.

        Args:
            n_ranks: Devices that are held meanwhile.
            budget: For people who look while it runs.
            since: Time counts from here (of `time.monotonic`); None for now.

        Raises:
            StudyBusyError: Another process drives the study.
            StoreError: The storage, or the study's folder, takes no writes.
        """
        storage = self.location.open()
        row = LeaseRow(storage, self.id)
        self._lease = Lease(study_name=self.name, lock_file=self.folder / "lock", row=row, on_renew=self._save_spent)
        try:
            with self._answers():  # its lock is a file in the study's folder
                self._lease.acquire()
            with fenced(storage, row, self._lease.check):
                self._spent_before = self.spent()
                self._n_ranks = n_ranks
                self._pauses = Pauses()
                self._pauses.start()
                self._driving_since = time.monotonic() if since is None else since
                self.note_stop(budget, "")
                try:
                    yield
                except BaseException:
                    storage.is_patient = False  # it ends now, whether the storage answers or not
                    raise
                finally:
                    with contextlib.suppress(StoreError, StudyBusyError):
                        self._save_spent()
        finally:
            if self._driving_since:
                self._pauses.stop()
            self._driving_since = 0.0
            with contextlib.suppress(StoreError), self._answers():
                self._lease.release()
            self._lease = None
            storage.is_patient = True

    def check_lease(self) -> None:
        """Stop when the right to drive is lost.

        Raises:
            StudyBusyError: Another process took over.
            StoreError: The storage stopped answering.
        """
        if self._lease is not None and self._lease.lost is not None:
            raise self._lease.lost

    def driver(self) -> Mapping[str, Any] | None:
        """The process that drives the study now, here or elsewhere: its `host`, `pid` and `folder`; None when none does.

        One that cannot be seen from here is watched for some seconds at first, until it renews its lease.
        """
        if self._watch is None:
            self._watch = HolderWatch(LeaseRow(self.location.open(), self.id).read)
        with self._answers():
            return self._watch.look()[1]

    def retry_failed(self) -> frozenset[int]:
        """Numbers of the trials whose end says nothing about their config; as long as this process drives, they count for nothing."""
        failed = (record.number for record in self.records() if record.result and not record.result.outcome.teaches)
        self._retried = frozenset(failed)
        return self._retried

    def spent(self, records: Sequence[TrialRecord] | None = None) -> Spent:
        """What the study has used, up to now: time on the clock, or where no trial is real, what its trials would have taken.

        Args:
            records: The trials, where they are at hand; None reads them.
        """
        records = self.records() if records is None else records
        n_trials = len({record.config for record in records if record.result and record.number not in self._retried})
        manifest = self.manifest()
        if manifest is not None and not manifest.origin.is_real:
            seconds = sum(run.wall_s for record in records for run in (*record.attempts, *record.runs))
            return Spent(trials=n_trials, seconds=seconds, device_seconds=seconds * manifest.cluster.n_ranks)
        times = self._times_spent() if self._driving_since else self._user_attrs().get(_SPENT_KEY, {})
        return Spent(trials=n_trials, **times)

    def _save_spent(self) -> None:
        if self._driving_since:
            self._set_attr(_SPENT_KEY, self._times_spent())

    def _times_spent(self) -> dict[str, float]:
        """The times of `Spent` up to now, while this process drives."""
        seconds = time.monotonic() - self._driving_since - self._pauses.seconds
        return {
            "seconds": self._spent_before.seconds + seconds,
            "device_seconds": self._spent_before.device_seconds + seconds * self._n_ranks,
        }

    # -- for people ------------------------------------------------------------------------------------------------

    def note_stop(self, budget: str, reason: str) -> None:
        """Keep the budget, and why the study stopped; no reason while it runs, and after it was killed."""
        self._set_attr(_STOP_KEY, {"budget": budget, "reason": reason})

    def note_memory_limit(self, limit_bytes: int) -> None:
        """Keep the limit per rank that holds from now on: what an earlier one ended or allowed is seen by it."""
        self._set_attr(_LIMIT_KEY, limit_bytes)

    def note_calibration(self, hardware: Hardware) -> None:
        """Keep how fast the machine was measured to be; a resume reads it instead of measuring again, and never compares it."""
        self._set_attr(_CALIBRATION_KEY, hardware.to_dict())

    def calibration(self) -> Hardware | None:
        """What `note_calibration` kept last; None before that, and where another version kept it in another form."""
        stored = self._user_attrs().get(_CALIBRATION_KEY)
        with contextlib.suppress(UnreadableStudyError), self._readable():
            return None if stored is None else Hardware.from_dict(stored)
        return None

    def note_profile(self, found: ModelProfile | str) -> None:
        """Keep what the model costs, or why nobody knows; a resume reads it instead of tracing again, and never compares it."""
        self._set_attr(_PROFILE_KEY, found if isinstance(found, str) else found.to_dict())

    def profile(self) -> ModelProfile | str | None:
        """What `note_profile` kept last; None before that, and where another version kept it in another form."""
        stored = self._user_attrs().get(_PROFILE_KEY)
        with contextlib.suppress(UnreadableStudyError), self._readable():
            return stored if stored is None or isinstance(stored, str) else ModelProfile.from_dict(stored)
        return None

    def last_stop(self) -> dict[str, str]:
        """`budget` and `reason` of the last run; nothing before the first."""
        return dict(self._user_attrs().get(_STOP_KEY) or {})

    def write_note(self) -> None:
        """Our best in the study note that the Optuna dashboard shows; its own best ignores constraints."""
        from optuna_dashboard import save_note

        self._keep_told_values()
        with self._answers():
            save_note(self.study, best_note(self.records(), self.origin))

    def write_figures(self, figures: Mapping[str, go.Figure]) -> None:
        """Figures for the Optuna dashboard, by name; those of the same name are replaced."""
        from optuna_dashboard import save_plotly_graph_object

        with self._answers():
            for name, figure in figures.items():
                save_plotly_graph_object(self.study, figure, graph_object_id=name)

    # -- plumbing --------------------------------------------------------------------------------------------------

    def _foreign(self) -> StoreError:
        return StoreError(f"study {self.name!r} was not made by bo_tuner; choose another name with --study")

    @property
    def id(self) -> int:
        """As Optuna and its dashboard number the study."""
        storage = self.location.open()
        with self._answers():
            return storage.get_study_id_from_name(self.name)

    def _user_attrs(self) -> dict[str, Any]:
        storage, study_id = self.location.open(), self.id
        with self._answers(), self._readable("its attributes"):
            return storage.get_study_user_attrs(study_id)

    def _set_attr(self, key: str, value: Any) -> None:
        with self._answers():
            self.location.open().set_study_user_attr(self.id, key, value)

    def _answers(self) -> contextlib.AbstractContextManager[None]:
        return storage_answers(self.location.shown_url)

    @contextlib.contextmanager
    def _readable(self, part: str = "") -> Generator[None]:
        with must_be_readable(f"study {self.name!r}" + (f": {part}" if part else "")):
            yield


def _launch_key(record: TrialRecord, purpose: str) -> str:
    return f"{record.number} {purpose}".strip()


def study_names(location: Location) -> list[str]:
    """Studies in a database, newest last; none when the database does not exist."""
    if not location.holds_anything:
        return []
    from sqlalchemy import text

    storage = location.open()
    with storage_answers(location.shown_url), storage.engine.connect() as connection:
        # Optuna would read all attributes too, and stop at the first that is damaged.
        return [str(name) for (name,) in connection.execute(text("SELECT study_name FROM studies ORDER BY study_id"))]


def best_note(records: list[TrialRecord], origin: Origin = REAL) -> str:
    """The best trial in Markdown; first of all that it is not real, where it is not."""
    best, warning = best_of(records), f"**{origin.warning}.**\n\n" if origin.warning else ""
    if best is None or best.result is None:
        return f"{warning}bo_tuner: no trial has completed yet."
    peak = gib(best.result.peak_memory_bytes) if best.result.peak_memory_bytes else "unknown"
    front = ", ".join(f"`{record.config.name}` (trial {record.number})" for record in pareto_front(records))
    n_memory = sum(record.result is not None and record.result.outcome.is_memory for record in records)
    return (
        f"{warning}### Best: `{best.config.name}` (trial {best.number})\n\n"
        f"**{rate(best.standing_samples_per_s or 0.0)}** samples{best.beside}, peak memory {peak} a rank. "
        f"{len(records)} trials, {n_memory} ended by memory ({Outcome.OOM}, {Outcome.GUARDED} or {Outcome.HOST_OOM})."
        + (f"\n\nFront of samples/s against peak memory: {front}." if front else "")
    )
