"""`LaunchCounts`: how often a launch of a config took the process that drives the study with it, or the machine."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from bo_tuner.errors import StoreError, StudyBusyError
from bo_tuner.storage.stored_study import StoredStudy
from bo_tuner.trial import TrialRecord

__all__ = ["LaunchCounts"]

_LAUNCHES_KEY = "launches"
"""By trial and purpose, how many launches began whose end was not seen."""


class LaunchCounts:
    """Counts launches of a study that have begun, until their end is seen."""

    def __init__(self, study: StoredStudy) -> None:
        """Of this study; nothing is read yet."""
        self._study = study

    @contextlib.contextmanager
    def counted(self, record: TrialRecord, purpose: str = "") -> Generator[None]:
        """Count a launch of a trial's config until its end is seen, good or bad: one that stays counted took this process with it."""
        key, before = _key(record, purpose), self._stored()
        self._study.set_attribute(_LAUNCHES_KEY, {**before, key: before.get(key, 0) + 1})
        try:
            yield
        except KeyboardInterrupt:
            self._study.storage.is_patient = False  # it ends now, whether the storage answers or not
            raise
        finally:
            # What follows a storage that fails is told by the next write.
            with contextlib.suppress(StoreError, StudyBusyError):
                self._study.set_attribute(_LAUNCHES_KEY, before)

    def n_kills(self, record: TrialRecord, purpose: str = "") -> int:
        """Launches of a trial's config that took the process that drove the study with them, or the machine; none may run now."""
        return self._stored().get(_key(record, purpose), 0)

    def _stored(self) -> dict[str, int]:
        launches: dict[str, int] = self._study.attributes().get(_LAUNCHES_KEY, {})
        return launches


def _key(record: TrialRecord, purpose: str) -> str:
    return f"{record.number} {purpose}".strip()
