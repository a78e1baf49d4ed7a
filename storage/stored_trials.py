"""`StoredTrials`: the trials of a study, and what is learned of them later.

A trial appears whole, in one transaction, with its config and state RUNNING; then its result is written as one attribute; then Optuna
is told. Whatever moment a process is killed at, the next one finds either no trial, a trial to run again, or a result to tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bo_tuner.config import TrainConfig
from bo_tuner.launches import prior_of
from bo_tuner.outcome import TrialResult
from bo_tuner.storage.distributions import joined_distributions
from bo_tuner.storage.stored_study import StoredStudy
from bo_tuner.storage.told_values import keep_told_values
from bo_tuner.stored import must_be_readable
from bo_tuner.trial import ATTEMPTS_KEY, RESULT_KEY, TrialRecord, holds, launch_noise, records_of

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution

__all__ = ["CHECKS_KEY", "StoredTrials"]

_LIMIT_KEY = "memory_limit_bytes"
CHECKS_KEY = "checks:"
"""Followed by a trial's number: the runs of its config after it was told, when it takes no more attributes."""
_CONSTRAINT = "memory"


class StoredTrials(StoredStudy):
    """Trials: begun, told to Optuna, and completed by what is learned of their configs afterwards."""

    def note_memory_limit(self, limit_bytes: int) -> None:
        """Keep the limit per rank that holds from now on: what an earlier one ended or allowed is seen by it."""
        self.set_attribute(_LIMIT_KEY, limit_bytes)

    def records(self) -> list[TrialRecord]:
        """All trials, by number, with what was learned of them since.

        Raises:
            UnreadableStudyError: A trial is damaged, or written by a newer version; the text says which.
        """
        goal, trials, attributes = self.goal, self._trials(), self.attributes()
        with self.readable():
            completed = [self._completed(record, attributes) for record in records_of(trials, goal)]
        manifest = self._own_manifest()
        if manifest is None or not manifest.origin.can_confirm:
            return completed
        noise = launch_noise(completed, manifest.noise or prior_of(manifest.cluster.device))
        return [replace(record, noise=noise) for record in completed]

    def _trials(self, *states: optuna.trial.TrialState) -> list[optuna.trial.FrozenTrial]:
        """Those in one of these states; of all states where none is given."""
        with self.answers():
            try:
                return self.study.get_trials(deepcopy=False, states=states or None)
            except (ValueError, KeyError):  # Optuna does not say which
                self._find_unreadable()
                raise

    def _find_unreadable(self) -> None:
        from sqlalchemy import text

        with self.storage.engine.connect() as connection:
            query = "SELECT number, trial_id FROM trials WHERE study_id = :id ORDER BY number"
            trials = list(connection.execute(text(query), {"id": self.id}))
        for number, trial_id in trials:
            with self.readable(), must_be_readable(f"trial {number}"):
                self.storage.get_trial(trial_id)

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

        with self.answers():
            template = optuna.trial.create_trial(
                state=optuna.trial.TrialState.RUNNING,
                params=config.params(),
                distributions=joined_distributions(self.storage, self.id, space),
                user_attrs={"name": config.name},
            )
            trial_id = self.storage.create_new_trial(self.id, template_trial=template)
            record = TrialRecord.from_optuna(self.storage.get_trial(trial_id), self.goal)
            return self._completed(record, self.attributes())

    def add_attempt(self, record: TrialRecord, result: TrialResult) -> TrialRecord:
        """Keep a try that does not count; the trial goes on running."""
        return self.keep_attempts(record, (*record.attempts, result))

    def keep_attempts(self, record: TrialRecord, attempts: tuple[TrialResult, ...]) -> TrialRecord:
        """Keep these as the tries that do not count."""
        with self.answers():
            self.storage.set_trial_user_attr(
                self._trial_id(record), ATTEMPTS_KEY, [attempt.to_dict() for attempt in attempts]
            )
        self._save_spent()
        return replace(record, attempts=attempts)

    def finish(self, record: TrialRecord, result: TrialResult) -> None:
        """Write the result, then tell Optuna."""
        with self.answers():
            trial_id = self._trial_id(record)
            self.storage.set_trial_user_attr(trial_id, RESULT_KEY, result.to_dict())
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

        with self.answers():
            keep_told_values(self.storage, self.id, self.records())
            if self._study is not None:  # Optuna never reads the values of a trial that is over again
                self._study = optuna.load_study(study_name=self.name, storage=self.storage, sampler=self._study.sampler)

    def _add_check(self, record: TrialRecord) -> TrialRecord:
        checks: dict[str, Any] = {"repeats": [repeat.to_dict() for repeat in record.repeats]}
        if record.confirmations:
            checks["confirmations"] = [run.to_dict() for run in record.confirmations]
        self.set_attribute(f"{CHECKS_KEY}{record.number}", checks)
        self._save_spent()
        return record

    def settle(self) -> list[TrialRecord]:
        """After an interruption: tell Optuna results that it was not told.

        Returns:
            Trials that have no result, to be run again.
        """
        import optuna

        with self.readable():
            running = records_of(self._trials(optuna.trial.TrialState.RUNNING), self.goal)
        unfinished: list[TrialRecord] = []
        for record in running:
            if record.result is None:
                unfinished.append(record)
            else:
                with self.answers():
                    self._tell(self._trial_id(record), record.result)
        return unfinished

    def _tell(self, trial_id: int, result: TrialResult) -> None:
        import optuna

        self.storage.set_trial_user_attr(trial_id, "outcome", result.outcome.value)
        self.storage.set_trial_user_attr(trial_id, "reason", result.reason)
        # Optuna 5 reads the second; dashboards up to 0.21 read only the first.
        self.storage.set_trial_system_attr(trial_id, "constraints", [result.constraint])
        self.storage.set_trial_system_attr(trial_id, f"constraints:{_CONSTRAINT}", result.constraint)
        values, state = self.goal.values(result), optuna.trial.TrialState.COMPLETE
        if values is None:  # also where steps were timed, and the goal's own figure is not known
            state = optuna.trial.TrialState.PRUNED if result.outcome.teaches else optuna.trial.TrialState.FAIL
        self.storage.set_trial_state_values(trial_id, state, values)

    def _trial_id(self, record: TrialRecord) -> int:
        return self.storage.get_trial_id_from_study_id_trial_number(self.id, record.number)

    def _save_spent(self) -> None:
        """Called whenever a run has ended: whoever drives keeps what was spent, too."""
