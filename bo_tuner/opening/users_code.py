"""Models and functions that came as Python objects: where a run finds them, and where a study keeps them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bo_tuner.errors import ModelError
from bo_tuner.objectives.training.sources import MODEL_FILE, JobSources, write_object
from bo_tuner.storage import StudyStore

__all__ = ["hand_over", "keep_pickles"]


def hand_over(model: Any, folder: Path) -> None:
    """Write a module's structure into a run's folder, where its jobs look for it.

    Raises:
        ModelError: It cannot be taken apart or pickled.
    """
    from bo_tuner.objectives.training.job import JobError
    from bo_tuner.objectives.training.job.structure import structure_of

    try:
        write_object(structure_of(model), folder / MODEL_FILE, "a model")
    except JobError as error:
        raise ModelError(str(error)) from error


def keep_pickles(sources: JobSources, store: StudyStore) -> None:
    """Copy them into the study's folder, for exports in other processes."""
    if sources.pickles:
        store.folder.mkdir(parents=True, exist_ok=True)
        sources.copied_to(store.folder)
