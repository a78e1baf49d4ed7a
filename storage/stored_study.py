"""`StoredStudy`: a study in an Optuna storage, what it was started for, and what was found out before its first trial.

Besides Optuna's tables there are only trial and study attributes, so the Optuna dashboard opens any study as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from bo_tuner.errors import StoreError, UnreadableStudyError
from bo_tuner.goal import THROUGHPUT, Goal
from bo_tuner.hardware import Hardware
from bo_tuner.origin import REAL, Origin
from bo_tuner.profile import ModelProfile
from bo_tuner.storage.location import Location, storage_answers
from bo_tuner.storage.manifest import Manifest
from bo_tuner.stored import must_be_readable
from bo_tuner.text import did_you_mean

if TYPE_CHECKING:
    import optuna
    from optuna.samplers import BaseSampler

    from bo_tuner.storage.patience import PatientStorage

__all__ = ["MANIFEST_KEY", "StoredStudy", "study_names"]

MANIFEST_KEY = "manifest"
_CALIBRATION_KEY = "calibration"
_PROFILE_KEY = "profile"


class StoredStudy:
    """A study by its name: its manifest, its attributes, and the same study as Optuna has it."""

    def __init__(self, location: Location, name: str) -> None:
        """Point at study `name`; it need not exist yet."""
        self.location = location
        self.name = name
        self._study: optuna.Study | None = None
        self._manifest: Manifest | None = None

    @property
    def storage(self) -> PatientStorage:
        """Optuna's storage, connected.

        Raises:
            StoreError: The database does not answer, or cannot be written.
        """
        return self.location.open()

    @classmethod
    def existing(cls, location: Location, name: str) -> Self:
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

    def manifest(self) -> Manifest | None:
        """What the study was started for, which never changes; None when it does not exist, or died before that was written.

        Raises:
            StoreError: It exists, and is not one of ours, or cannot be read.
        """
        if self._manifest is not None:
            return self._manifest
        if not self.location.holds_anything or self.name not in study_names(self.location):
            return None
        data = self.attributes().get(MANIFEST_KEY)
        if data is None:
            if self._has_trials():
                raise self._foreign()
            return None
        with self.readable():
            self._manifest = Manifest.from_dict(data)
        return self._manifest

    def _has_trials(self) -> bool:
        """Also such as nobody can read."""
        from sqlalchemy import text

        study_id = self.id
        with self.answers(), self.storage.engine.connect() as connection:
            query = text("SELECT 1 FROM trials WHERE study_id = :id LIMIT 1")
            return connection.execute(query, {"id": study_id}).first() is not None

    def create(self, manifest: Manifest) -> Manifest:
        """Write a new study; a study without a manifest is completed.

        Returns:
            The manifest that holds: that of another process, if one was faster.

        Raises:
            StudyMismatchError: Another process was faster, with something else.
            StoreError: The study is not one of ours.
        """
        import optuna

        with self.answers():
            self._study = optuna.create_study(
                study_name=self.name, storage=self.storage, directions=manifest.goal.directions, load_if_exists=True
            )
            stored = self.attributes().get(MANIFEST_KEY)
            if stored is None:
                if [direction.name.lower() for direction in self._study.directions] != manifest.goal.directions:
                    raise self._foreign()
                self.storage.set_study_user_attr(self.id, MANIFEST_KEY, manifest.to_dict())
                return manifest
        with self.readable():
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

    def _foreign(self) -> StoreError:
        return StoreError(f"study {self.name!r} was not made by bo_tuner; choose another name with --study")

    @property
    def study(self) -> optuna.Study:
        """The Optuna study."""
        if self._study is None:
            import optuna

            with self.answers():
                # The sampler is set by whoever asks; naming one spares Optuna from importing its default.
                self._study = optuna.load_study(
                    study_name=self.name, storage=self.storage, sampler=optuna.samplers.RandomSampler()
                )
        return self._study

    def use_sampler(self, sampler: BaseSampler) -> None:
        """The sampler that `ask` asks."""
        self.study.sampler = sampler

    @property
    def folder(self) -> Path:
        """Logs lie here."""
        return self.location.study_folder(self.name)

    # -- what was found out ----------------------------------------------------------------------------------------

    def note_calibration(self, hardware: Hardware) -> None:
        """Keep how fast the machine was measured to be; a resume reads it instead of measuring again, and never compares it."""
        self.set_attribute(_CALIBRATION_KEY, hardware.to_dict())

    def calibration(self) -> Hardware | None:
        """What `note_calibration` kept last; None before that, and where another version kept it in another form."""
        stored = self.attributes().get(_CALIBRATION_KEY)
        with contextlib.suppress(UnreadableStudyError), self.readable():
            return None if stored is None else Hardware.from_dict(stored)
        return None

    def note_profile(self, found: ModelProfile | str) -> None:
        """Keep what the model costs, or why nobody knows; a resume reads it instead of tracing again, and never compares it."""
        self.set_attribute(_PROFILE_KEY, found if isinstance(found, str) else found.to_dict())

    def profile(self) -> ModelProfile | str | None:
        """What `note_profile` kept last; None before that, and where another version kept it in another form."""
        stored = self.attributes().get(_PROFILE_KEY)
        with contextlib.suppress(UnreadableStudyError), self.readable():
            return stored if stored is None or isinstance(stored, str) else ModelProfile.from_dict(stored)
        return None

    # -- attributes ------------------------------------------------------------------------------------------------

    @property
    def id(self) -> int:
        """As Optuna and its dashboard number the study."""
        with self.answers():
            return self.storage.get_study_id_from_name(self.name)

    def attributes(self) -> dict[str, Any]:
        """All that is kept with the study, by key."""
        study_id = self.id
        with self.answers(), self.readable("its attributes"):
            return self.storage.get_study_user_attrs(study_id)

    def set_attribute(self, key: str, value: Any) -> None:
        """Keep something with the study that JSON can hold."""
        with self.answers():
            self.storage.set_study_user_attr(self.id, key, value)

    def answers(self) -> contextlib.AbstractContextManager[None]:
        """Within it a database that does not answer is a `StoreError`."""
        return storage_answers(self.location.shown_url)

    @contextlib.contextmanager
    def readable(self, part: str = "") -> Generator[None]:
        """Within it what another version wrote, or nobody can read, is an `UnreadableStudyError` that names the study."""
        with must_be_readable(f"study {self.name!r}" + (f": {part}" if part else "")):
            yield


def study_names(location: Location) -> list[str]:
    """Studies in a database, newest last; none when the database does not exist."""
    if not location.holds_anything:
        return []
    from sqlalchemy import text

    storage = location.open()
    with storage_answers(location.shown_url), storage.engine.connect() as connection:
        # Optuna would read all attributes too, and stop at the first that is damaged.
        return [str(name) for (name,) in connection.execute(text("SELECT study_name FROM studies ORDER BY study_id"))]
