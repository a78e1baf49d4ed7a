"""Where trials survive a crash: studies in an Optuna storage, one driver at a time, with what they were started for."""

from bo_tuner.storage.best_note import best_note
from bo_tuner.storage.earlier import learned_noise
from bo_tuner.storage.location import Location
from bo_tuner.storage.manifest import Manifest
from bo_tuner.storage.stored_study import study_names
from bo_tuner.storage.study_store import StudyStore

__all__ = ["Location", "Manifest", "StudyStore", "best_note", "learned_noise", "study_names"]
