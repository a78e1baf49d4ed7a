"""Memory of GPUs, seen from outside the ranks.

What counts against the limit is all that a device holds, as nvidia-smi shows it: allocator, CUDA context, NCCL, the driver's own
share, and whoever else was let onto it. That is what the device's own refusals follow from, and it means the same in a
container, where the driver does not tell who holds how much.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from bo_tuner.nvml import Device
from bo_tuner.objectives.memory.base import MemoryReading

__all__ = ["DeviceProbe"]

_PROCESSES_EVERY_S = 0.5
"""Between two looks at who holds how much: slower than reading a device's total, and nothing is decided by it."""


class DeviceProbe:
    """A `MemoryProbe` over the GPUs of a trial. Reading may raise `DriverError`."""

    def __init__(self, devices: Sequence[Device], pids: Sequence[int]) -> None:
        """Watch `devices`, one a rank in the order of ranks; `pids` are the ranks'."""
        self._devices = devices
        self._pids = pids
        self._device_peaks: dict[int, int] = {}
        self._process_peaks: dict[int, int] = {}
        self._looked_at = -_PROCESSES_EVERY_S

    def __call__(self) -> MemoryReading | None:
        """The device that holds most; None where the driver does not tell."""
        readings: list[MemoryReading] = []
        for rank, device in enumerate(self._devices):
            used = device.used_bytes()
            if used is not None:
                self._device_peaks[rank] = max(used, self._device_peaks.get(rank, 0))
                readings.append(MemoryReading(rank=rank, used_bytes=used, device_index=device.index))
        if time.monotonic() - self._looked_at >= _PROCESSES_EVERY_S:
            self._look_at_processes()
        return max(readings, key=lambda reading: reading.used_bytes, default=None)

    def _look_at_processes(self) -> None:
        self._looked_at = time.monotonic()
        for rank, (device, pid) in enumerate(zip(self._devices, self._pids, strict=True)):
            used = max(
                (process.used_bytes or 0 for process in device.processes() or () if process.pid == pid), default=0
            )
            if used:
                self._process_peaks[rank] = max(used, self._process_peaks.get(rank, 0))

    @property
    def device_peaks(self) -> tuple[int, ...] | None:
        """Most that each rank's device was seen to hold, in bytes; None where one of them was not told."""
        return self._by_rank(self._device_peaks)

    @property
    def process_peaks(self) -> tuple[int, ...] | None:
        """Most that each rank's process was seen to hold, in bytes; None where one of them was not told."""
        return self._by_rank(self._process_peaks)

    def _by_rank(self, peaks: dict[int, int]) -> tuple[int, ...] | None:
        ranks = range(len(self._devices))
        return tuple(peaks[rank] for rank in ranks) if peaks and all(rank in peaks for rank in ranks) else None
