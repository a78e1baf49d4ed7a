"""Opening a study, whatever its figures come from: real training steps, a simulation, or a measured table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from bo_tuner.opening.base import StudyOpening, introduction
from bo_tuner.opening.options import TuneOptions
from bo_tuner.opening.replay import open_replay
from bo_tuner.opening.simulation import open_simulation
from bo_tuner.opening.training import LONGEST_STEP_S, Opening, open_training
from bo_tuner.origin import OriginKind

__all__ = ["LONGEST_STEP_S", "OPENINGS", "Opening", "StudyOpening", "TuneOptions", "introduction"]

OPENINGS: Mapping[OriginKind, Callable[[TuneOptions], AbstractContextManager[StudyOpening]]] = {
    "training": open_training,
    "simulation": open_simulation,
    "replay": open_replay,
}
"""By what the figures come from."""
