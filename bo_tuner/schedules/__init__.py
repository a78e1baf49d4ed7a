"""Pipeline schedules as pure functions, and their simulator."""

from bo_tuner.schedules.actions import Action, Backward, Forward, Update
from bo_tuner.schedules.base import EvenPipeline, Schedule
from bo_tuner.schedules.simulator import DeadlockError, Timeline, simulate
from bo_tuner.schedules.table import SCHEDULES, find_schedule

__all__ = [
    "SCHEDULES",
    "Action",
    "Backward",
    "DeadlockError",
    "EvenPipeline",
    "Forward",
    "Schedule",
    "Timeline",
    "Update",
    "find_schedule",
    "simulate",
]
