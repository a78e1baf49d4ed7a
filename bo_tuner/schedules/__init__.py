"""Pipeline schedules as pure functions, and their simulator."""

from bo_tuner.schedules.actions import Action, Backward, Forward, Update
from bo_tuner.schedules.base import Numbers, Pipeline, Schedule, one_by_one, positive_part
from bo_tuner.schedules.simulator import DeadlockError, Timeline, simulate
from bo_tuner.schedules.table import SCHEDULES, check_schedule, find_schedule, register_schedule

__all__ = [
    "SCHEDULES",
    "Action",
    "Backward",
    "DeadlockError",
    "Forward",
    "Numbers",
    "Pipeline",
    "Schedule",
    "Timeline",
    "Update",
    "check_schedule",
    "find_schedule",
    "one_by_one",
    "positive_part",
    "register_schedule",
    "simulate",
]
