"""Models and functions that came as Python objects: where a run finds them, and where a study keeps them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bo_tuner.dimension import Dimension
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


def keep_pickles(sources: JobSources, dimensions: Sequence[Dimension], store: StudyStore, *, folder: Path) -> None:
    """Copy them from a run's folder into the study's, for exports in other processes."""
    changes = [file for file in (folder / f"{dimension.source}.pkl" for dimension in dimensions) if file.is_file()]
    if sources.pickles or changes:
        store.folder.mkdir(parents=True, exist_ok=True)
        sources.copied_to(store.folder)
    for file in changes:
        shutil.copyfile(file, store.folder / file.name)
