"""How much memory ranks use, and when that ends a trial."""

from bo_tuner.objectives.memory.base import MemoryProbe, MemoryReading
from bo_tuner.objectives.memory.guard import MemoryGuard
from bo_tuner.objectives.memory.host import HostProbe, OwnPeak

__all__ = ["HostProbe", "MemoryGuard", "MemoryProbe", "MemoryReading", "OwnPeak"]
