"""The NVIDIA driver and its devices, asked through NVML; nothing else here talks to it.

What a driver, a device or a permission does not offer (old drivers, MIG, vGPU, WSL) is None. A driver that does not answer at
all is a `DriverError`.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from bo_tuner.errors import DriverError

__all__ = ["Device", "DeviceProcess", "Nvml", "visible_indices"]

_NOT_OFFERED = (
    "NVML_ERROR_NOT_SUPPORTED",
    "NVML_ERROR_NO_PERMISSION",
    "NVML_ERROR_FUNCTION_NOT_FOUND",
    "NVML_ERROR_ARGUMENT_VERSION_MISMATCH",
    "NVML_ERROR_DEPRECATED",
)
"""NVML reference, nvmlReturn_t."""
# Newest first. By their versioned names: pynvml's unversioned ones raise something else where the driver lacks them.
_COMPUTE_PROCESSES = ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2")
_GRAPHICS_PROCESSES = ("nvmlDeviceGetGraphicsRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v2")
_CLOCK_REASONS = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProcess:
    """A process that has something on a device."""

    pid: int
    used_bytes: int | None
    """None where the driver does not tell it."""
    is_compute: bool
    """It computes there; the others only draw, as a desktop does."""


class Nvml:
    """The driver, while this context manager is open. May be opened more than once at a time."""

    def __init__(self) -> None:
        self.devices: list[Device] = []
        """All of this machine, in the order of their PCI bus."""

    def __enter__(self) -> Self:
        """Open it.

        Raises:
            DriverError: There is no driver, or it does not answer.
        """
        _call("nvmlInit")
        try:
            self.devices = [
                Device(index, _call("nvmlDeviceGetHandleByIndex", index))
                for index in range(_call("nvmlDeviceGetCount"))
            ]
        except DriverError:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        with contextlib.suppress(DriverError):  # one that is gone needs no closing
            _call("nvmlShutdown")

    @property
    def version(self) -> str:
        """Of the driver."""
        return str(_call("nvmlSystemGetDriverVersion"))

    @property
    def cuda(self) -> tuple[int, int]:
        """The newest CUDA that it runs; 12040 is CUDA 12.4 (NVML reference, nvmlSystemGetCudaDriverVersion)."""
        number = int(_call("nvmlSystemGetCudaDriverVersion_v2"))
        return number // 1000, number % 1000 // 10

    def visible(self) -> list[Device]:
        """The devices that CUDA_VISIBLE_DEVICES leaves, in its order: that of the r-th rank is the r-th."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            return list(self.devices)
        return [self.devices[index] for index in visible_indices(visible, [device.uuid for device in self.devices])]


class Device:
    """One GPU; every reading is fresh. Each may raise `DriverError`."""

    def __init__(self, index: int, handle: Any) -> None:
        self.index = index
        """As NVML and nvidia-smi count."""
        self._handle = handle

    @property
    def name(self) -> str:
        """As its maker calls it."""
        return str(_call("nvmlDeviceGetName", self._handle))

    @property
    def uuid(self) -> str:
        """Never changes."""
        return str(_call("nvmlDeviceGetUUID", self._handle))

    @property
    def capability(self) -> int:
        """Major compute capability; 8 is Ampere."""
        return int(_call("nvmlDeviceGetCudaComputeCapability", self._handle)[0])

    @property
    def total_bytes(self) -> int:
        """Memory that it has."""
        return int(_call("nvmlDeviceGetMemoryInfo", self._handle).total)

    def used_bytes(self) -> int | None:
        """Memory in use by all processes, their CUDA contexts and the driver's own share included: what nvidia-smi shows."""
        told = _ask("nvmlDeviceGetMemoryInfo", self._handle)
        return None if told is None else int(told.used)

    def processes(self) -> tuple[DeviceProcess, ...] | None:
        """Who has something on it; empty too where a container hides them."""
        computing = _ask_newest(_COMPUTE_PROCESSES, self._handle)
        if computing is None:
            return None
        drawing = _ask_newest(_GRAPHICS_PROCESSES, self._handle)
        computing_pids = {int(process.pid) for process in computing}
        return tuple(
            DeviceProcess(pid=int(process.pid), used_bytes=process.usedGpuMemory, is_compute=is_compute)
            for processes, is_compute in ((computing, True), (drawing or (), False))
            for process in processes
            if is_compute or int(process.pid) not in computing_pids
        )

    def clock_reasons(self) -> int | None:
        """Why the clocks are not at their highest, as bits (NVML reference, nvmlClocksEventReasons)."""
        told = _ask_newest(_CLOCK_REASONS, self._handle)
        return None if told is None else int(told)

    def power_w(self) -> float | None:
        """What the whole board draws; from Ampere on the mean of the last second."""
        told = _ask("nvmlDeviceGetPowerUsage", self._handle)
        return None if told is None else told / 1000

    def energy_j(self) -> float | None:
        """Since the driver was loaded; Volta and later."""
        told = _ask("nvmlDeviceGetTotalEnergyConsumption", self._handle)
        return None if told is None else told / 1000

    def tells_power(self) -> bool:
        """What it draws can be read, in one way or the other."""
        return self.power_w() is not None or self.energy_j() is not None


def visible_indices(visible: str, uuids: list[str]) -> list[int]:
    """Device indices that a CUDA_VISIBLE_DEVICES value leaves: as CUDA does, it stops at the first unknown entry."""
    indices: list[int] = []
    for entry in (part.strip() for part in visible.split(",")):
        matches = [index for index, uuid in enumerate(uuids) if entry and uuid.startswith(entry)]
        if entry.isdigit() and int(entry) < len(uuids):
            indices.append(int(entry))
        elif len(matches) == 1:
            indices.append(matches[0])
        else:
            break
    return indices


class _NotOfferedError(DriverError):
    """This driver, device or permission has not got that."""


def _call(name: str, *arguments: Any) -> Any:
    """Call a function of NVML.

    Raises:
        DriverError: It failed.
    """
    import pynvml

    function = getattr(pynvml, name, None)
    if function is None:  # an older pynvml
        raise _NotOfferedError(f"{name} is not known")
    try:
        return function(*arguments)
    except pynvml.NVMLError as error:
        code = error.value  # pyright: ignore[reportAttributeAccessIssue]  # set in __new__
        if code in {getattr(pynvml, constant, None) for constant in _NOT_OFFERED}:
            raise _NotOfferedError(f"{name}: {error}") from error
        raise DriverError(str(error), is_missing=code == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND) from error


def _ask(name: str, *arguments: Any) -> Any:
    """As `_call`; None where it is not offered."""
    try:
        return _call(name, *arguments)
    except _NotOfferedError:
        return None


def _ask_newest(names: tuple[str, ...], handle: Any) -> Any:
    """What the first that is offered tells."""
    for name in names:
        told = _ask(name, handle)
        if told is not None:
            return told
    return None
