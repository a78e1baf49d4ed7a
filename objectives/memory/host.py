"""Host memory of CPU ranks: what a process holds beyond the process it was forked from.

Only anonymous memory counts. Pages of shared libraries are faulted in by each fork as it touches them, belong to all
ranks together, and would drown a small model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from bo_tuner.objectives.memory.base import MemoryReading

__all__ = ["HostProbe", "OwnPeak"]

_FIELDS = ("VmHWM", "RssAnon", "RssFile", "RssShmem")


def _status(pid: int | str) -> dict[str, int]:
    """Bytes by field name of /proc/PID/status (proc(5)); empty when the process is gone.

    Read 25 times a second beside ranks whose speed is measured, hence neither buffers nor patterns: a third of their time.
    """
    try:
        with open(f"/proc/{pid}/status", "rb", buffering=0) as file:
            text = file.read(2**14)
    except (FileNotFoundError, ProcessLookupError):
        return {}
    found: dict[str, int] = {}
    for name in _FIELDS:
        _, is_there, rest = text.partition(f"\n{name}:".encode())
        if is_there:
            found[name] = int(rest[: rest.index(b"kB")]) * 1024
    return found


def _anonymous_peak(status: Mapping[str, int]) -> int:
    """Most anonymous memory since VmHWM was reset, in bytes.

    The kernel keeps one high-water mark of all resident pages; the file-backed ones of now are taken off it.
    """
    peak = status.get("VmHWM", 0) - status.get("RssFile", 0) - status.get("RssShmem", 0)
    return max(peak, status.get("RssAnon", 0))


class OwnPeak:
    """Peak of the calling process since this object was made."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets VmHWM, proc(5)
        self.baseline_bytes = _status("self").get("RssAnon", 0)
        """What the process held already."""

    def read(self) -> int:
        """Peak in bytes above the baseline."""
        return _anonymous_peak(_status("self")) - self.baseline_bytes


class HostProbe:
    """A `MemoryProbe` over processes of this machine that made an `OwnPeak`: peaks between two readings are seen too."""

    def __init__(self, pids: Mapping[int, int], baselines: Mapping[int, int]) -> None:
        """Watch `pids` (by rank); a rank is read once its baseline is known, so `baselines` may fill up later."""
        self._pids = pids
        self._baselines = baselines

    def __call__(self) -> MemoryReading | None:
        """The rank that held most above its baseline since the trial began."""
        readings = [
            MemoryReading(rank=rank, used_bytes=max(_anonymous_peak(status) - self._baselines[rank], 0))
            for rank, pid in self._pids.items()
            if rank in self._baselines and "RssAnon" in (status := _status(pid))
        ]
        return max(readings, key=lambda reading: reading.used_bytes, default=None)
