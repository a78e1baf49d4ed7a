"""The training job itself: model, data, DeepSpeed engine, one optimizer step.

Nothing here imports bo_tuner. `bo-tuner export` puts a copy of this folder beside the exported script, so that what runs there is
the very code that was measured.
"""

from .data import Watched, describe, micro_batches, n_ahead
from .engine import StepTimes, build_engine, join_group, load_model, place_model, run_step
from .errors import JobError

__all__ = [
    "JobError",
    "StepTimes",
    "Watched",
    "build_engine",
    "describe",
    "join_group",
    "load_model",
    "micro_batches",
    "n_ahead",
    "place_model",
    "run_step",
]
