"""`StudyStore`: one study, driven by one process at a time, with what it has spent."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bo_tuner.budget import Spent
from bo_tuner.errors import StoreError, StudyBusyError
from bo_tuner.storage.best_note import best_note
from bo_tuner.storage.holder import HolderWatch
from bo_tuner.storage.launch_counts import LaunchCounts
from bo_tuner.storage.lease import Lease
from bo_tuner.storage.lease_row import LeaseRow, fenced
from bo_tuner.storage.location import Location
from bo_tuner.storage.spending import DrivingClock
from bo_tuner.storage.stored_trials import StoredTrials
from bo_tuner.trial import TrialRecord

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["StudyStore"]

_SPENT_KEY = "spent"
_STOP_KEY = "stop"


class StudyStore(StoredTrials):
    """One study: its manifest, trials, spending, and the right to drive it."""

    def __init__(self, location: Location, name: str) -> None:
        """Point at study `name`; it need not exist yet."""
        super().__init__(location, name)
        self.launches = LaunchCounts(self)
        self._lease: Lease | None = None
        self._watch: HolderWatch | None = None
        self._clock: DrivingClock | None = None
        """Runs while this process drives."""
        self._retried: frozenset[int] = frozenset()

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
        storage = self.storage
        row = LeaseRow(storage, self.id)
        self._lease = Lease(study_name=self.name, lock_file=self.folder / "lock", row=row, on_renew=self._save_spent)
        try:
            with self.answers():  # its lock is a file in the study's folder
                self._lease.acquire()
            with fenced(storage, row, self._lease.check):
                self._clock = DrivingClock(self.spent(), n_ranks=n_ranks, since=since)
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
            if self._clock is not None:
                self._clock.stop()
            self._clock = None
            with contextlib.suppress(StoreError), self.answers():
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
            self._watch = HolderWatch(LeaseRow(self.storage, self.id).read)
        with self.answers():
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
        times = self._clock.times() if self._clock is not None else self.attributes().get(_SPENT_KEY, {})
        return Spent(trials=n_trials, **times)

    def _save_spent(self) -> None:
        clock = self._clock  # the thread that renews the lease asks too
        if clock is not None:
            self.set_attribute(_SPENT_KEY, clock.times())

    # -- for people ------------------------------------------------------------------------------------------------

    def note_stop(self, budget: str, reason: str) -> None:
        """Keep the budget, and why the study stopped; no reason while it runs, and after it was killed."""
        self.set_attribute(_STOP_KEY, {"budget": budget, "reason": reason})

    def last_stop(self) -> dict[str, str]:
        """`budget` and `reason` of the last run; nothing before the first."""
        return dict(self.attributes().get(_STOP_KEY) or {})

    def write_note(self) -> None:
        """Our best in the study note that the Optuna dashboard shows; its own best ignores constraints."""
        from optuna_dashboard import save_note

        self._keep_told_values()
        with self.answers():
            save_note(self.study, best_note(self.records(), self.origin))

    def write_figures(self, figures: Mapping[str, go.Figure]) -> None:
        """Figures for the Optuna dashboard, by name; those of the same name are replaced."""
        from optuna_dashboard import save_plotly_graph_object

        with self.answers():
            for name, figure in figures.items():
                save_plotly_graph_object(self.study, figure, graph_object_id=name)
