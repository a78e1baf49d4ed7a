"""How much memory ranks use, and when that ends a trial."""

from bo_tuner.objectives.memory.base import MemoryProbe, MemoryReading
from bo_tuner.objectives.memory.baseline import IDLE_BYTES, Baseline
from bo_tuner.objectives.memory.conditions import Conditions, ConditionsTold
from bo_tuner.objectives.memory.device import DeviceProbe
from bo_tuner.objectives.memory.guard import MemoryGuard
from bo_tuner.objectives.memory.host import HostProbe, OwnPeak

__all__ = [
    "IDLE_BYTES",
    "Baseline",
    "Conditions",
    "ConditionsTold",
    "DeviceProbe",
    "HostProbe",
    "MemoryGuard",
    "MemoryProbe",
    "MemoryReading",
    "OwnPeak",
]
