"""`MemoryGuard`: says when a trial has to end because a rank uses more than the limit."""

from __future__ import annotations

from bo_tuner.errors import ConfigError
from bo_tuner.objectives.memory.base import MemoryProbe, MemoryReading

__all__ = ["MemoryGuard"]


class MemoryGuard:
    """Watches the ranks of one trial from outside; the supervisor kills."""

    def __init__(self, probe: MemoryProbe, *, limit_bytes: int) -> None:
        if limit_bytes <= 0:
            raise ConfigError(f"limit_bytes must be positive, got {limit_bytes}")
        self._probe = probe
        self._limit_bytes = limit_bytes
        self.peak_bytes: int | None = None
        """Highest reading so far."""

    def breach(self) -> MemoryReading | None:
        """Read once; the reading if it is over the limit, else None."""
        reading = self._probe()
        if reading is None:
            return None
        self.peak_bytes = max(self.peak_bytes or 0, reading.used_bytes)
        return reading if reading.used_bytes > self._limit_bytes else None
