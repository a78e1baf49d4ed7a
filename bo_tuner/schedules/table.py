"""The schedules by name."""

from __future__ import annotations

from bo_tuner.errors import ConfigError
from bo_tuner.schedules.base import Schedule
from bo_tuner.schedules.flushed import GPipe, Interleaved, OneFOneB
from bo_tuner.schedules.two_bw import TwoBW
from bo_tuner.text import did_you_mean

__all__ = ["SCHEDULES", "find_schedule"]

SCHEDULES: dict[str, type[Schedule]] = {schedule.name: schedule for schedule in (GPipe, OneFOneB, Interleaved, TwoBW)}


def find_schedule(name: str, *, n_chunks: int = 1) -> Schedule:
    """A schedule by the name that users write.

    Args:
        name: One of `SCHEDULES`.
        n_chunks: Stages per rank; 1 but for `interleaved`, which needs at least 2.

    Raises:
        ConfigError: There is no such schedule, or it does not run so many chunks.
    """
    if name not in SCHEDULES:
        near = did_you_mean(name, SCHEDULES)
        raise ConfigError(f"pipeline_schedule must be one of {', '.join(SCHEDULES)}; got {name!r}{near}")
    return SCHEDULES[name](n_chunks=n_chunks)
