"""The schedules by name: built-in ones, those of installed packages, and those that a program registers."""

from __future__ import annotations

from typing import Any

from bo_tuner.errors import ConfigError
from bo_tuner.registry import Registry
from bo_tuner.schedules.base import Schedule
from bo_tuner.schedules.gpipe import GPipe
from bo_tuner.schedules.interleaved import Interleaved
from bo_tuner.schedules.one_f_one_b import OneFOneB
from bo_tuner.schedules.two_bw import TwoBW
from bo_tuner.text import did_you_mean

__all__ = ["SCHEDULES", "check_schedule", "find_schedule", "register_schedule"]


def _name_of(schedule: Any) -> str:
    if not (isinstance(schedule, type) and issubclass(schedule, Schedule)):
        raise ConfigError(f"a schedule must be a class that derives from Schedule; got {schedule!r}")
    return str(schedule.name)


SCHEDULES = Registry[type[Schedule]](
    "pipeline_schedule",
    group="bo_tuner.schedules",
    name_of=_name_of,
    built_in=(OneFOneB, GPipe, TwoBW, Interleaved),
)
"""Entry points of the group `bo_tuner.schedules` name classes."""

register_schedule = SCHEDULES.register
"""Decorates a class that derives from `Schedule`."""


def check_schedule(name: Any, what: str = "pipeline_schedule") -> None:
    """A config may have the schedule `name`: one that needs no number of chunks, which configs have not.

    Raises:
        ConfigError: It may not.
    """
    if not isinstance(name, str) or name not in SCHEDULES or SCHEDULES[name].has_chunks:
        known = [one for one, schedule in SCHEDULES.items() if not schedule.has_chunks]
        near = did_you_mean(name, known) if isinstance(name, str) else ""
        raise ConfigError(f"{what} must be one of {', '.join(known)}; got {name!r}{near}")


def find_schedule(name: str, *, n_chunks: int = 1) -> Schedule:
    """A schedule by the name that users write.

    Args:
        name: One of `SCHEDULES`.
        n_chunks: Stages per rank; 1 but for `interleaved`, which needs at least 2.

    Raises:
        ConfigError: There is no such schedule, or it does not run so many chunks.
    """
    return SCHEDULES.find(name)(n_chunks=n_chunks)
