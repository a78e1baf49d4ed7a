"""The `MemoryProbe` protocol: reads how much memory the ranks of a trial use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

__all__ = ["MemoryProbe", "MemoryReading"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """The rank that uses most, at one moment."""

    rank: int
    used_bytes: int
    device_index: int | None = None
    """Of its GPU, as NVML counts; None for memory of the machine."""


class MemoryProbe(Protocol):
    """Reads the highest use of all ranks from outside them. Any callable of this shape will do."""

    def __call__(self) -> MemoryReading | None:
        """Read once; None when there is nothing to read yet or any more."""
        ...
