"""The NVIDIA driver and its devices, asked through NVML; nothing else here talks to it.

What a driver, a device or a permission does not offer (old drivers, MIG, vGPU, WSL) is None. A driver or a device that does not
answer at all is a `DriverError`; devices that nobody asked for are not touched, so that a lost one harms nobody else.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bo_tuner.errors import ClusterError, DriverError
from bo_tuner.visible import VARIABLE, refused, visible_devices

__all__ = ["Device", "DeviceProcess", "Nvml", "has_nvidia_hardware"]

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
        self.n_devices = 0
        """Of this machine, in the order of their PCI bus."""

    def __enter__(self) -> Self:
        """Open it.

        Raises:
            DriverError: There is no driver, or it does not answer.
        """
        _call("nvmlInit")
        try:
            self.n_devices = int(_call("nvmlDeviceGetCount"))
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

    def device(self, index: int) -> Device:
        """The whole GPU of that index.

        Raises:
            DriverError: It does not answer.
        """
        return Device(index, _call_of(index, "nvmlDeviceGetHandleByIndex", index))

    def visible(self) -> list[Device]:
        """The devices that CUDA_VISIBLE_DEVICES leaves, in its order: that of the r-th rank is the r-th.

        An instance of a divided GPU (MIG) is a device of its own. CUDA shows one of them to a process, and NCCL joins none.

        Raises:
            ClusterError: The value names what is not here, or more than CUDA would show.
            DriverError: A visible device does not answer.
        """
        value = os.environ.get(VARIABLE)
        if not self.n_devices:
            return []  # whatever a job's script names, nothing is lost
        named = range(self.n_devices) if value is None else visible_devices(value, self.n_devices, self._uuids)
        devices: list[Device] = []
        for name in named:
            devices += self._parts(name) if isinstance(name, int) else [_instance(name)]
        _check_instances(devices)
        return devices

    def _uuids(self) -> list[str | None]:
        """Of all; None for one that does not answer."""
        uuids: list[str | None] = []
        for index in range(self.n_devices):
            try:
                uuids.append(self.device(index).uuid)
            except DriverError:
                uuids.append(None)
        return uuids

    def _parts(self, index: int) -> list[Device]:
        device = self.device(index)
        return device.instances() if device.is_divided() else [device]


class Device:
    """One GPU, or an instance of a divided one; every reading is fresh. Each may raise `DriverError`, which names the GPU."""

    def __init__(self, index: int, handle: Any, *, parent: Any = None) -> None:
        self.index = index
        """As NVML and nvidia-smi count GPUs."""
        self._handle = handle
        self._parent = parent
        """Of an instance: its GPU."""

    @property
    def is_instance(self) -> bool:
        """A part of a divided GPU."""
        return self._parent is not None

    def is_divided(self) -> bool:
        """In MIG mode, whether or not there are instances."""
        mode = self._ask("nvmlDeviceGetMigMode")
        return mode is not None and bool(mode[0])

    def instances(self) -> list[Device]:
        """Of a divided GPU.

        Raises:
            ClusterError: It has none.
        """
        import pynvml

        found: list[Device] = []
        for number in range(int(self._call("nvmlDeviceGetMaxMigDeviceCount"))):
            try:
                handle = _call_of(self.index, "nvmlDeviceGetMigDeviceHandleByIndex", self._handle, number)
            except DriverError as error:
                if error.code != pynvml.NVML_ERROR_NOT_FOUND:  # numbers have gaps
                    raise
            else:
                found.append(Device(self.index, handle, parent=self._handle))
        if not found:
            raise ClusterError(
                f"GPU {self.index} is in MIG mode and has no instance: make one (nvidia-smi mig -cgi ... -C), end that mode "
                "(nvidia-smi -mig 0), or leave this GPU out (CUDA_VISIBLE_DEVICES names those to use)"
            )
        return found

    def _call(self, name: str) -> Any:
        return _call_of(self.index, name, self._handle)

    def _ask(self, name: str) -> Any:
        try:
            return self._call(name)
        except _NotOfferedError:
            return None

    def _ask_newest(self, names: Sequence[str]) -> Any:
        """What the first that is offered tells."""
        return next((told for told in map(self._ask, names) if told is not None), None)

    @property
    def name(self) -> str:
        """As its maker calls it."""
        return str(self._call("nvmlDeviceGetName"))

    @property
    def uuid(self) -> str:
        """Never changes."""
        return str(self._call("nvmlDeviceGetUUID"))

    @property
    def capability(self) -> int:
        """Major compute capability; 8 is Ampere."""
        whole = self._handle if self._parent is None else self._parent
        return int(_call_of(self.index, "nvmlDeviceGetCudaComputeCapability", whole)[0])

    @property
    def total_bytes(self) -> int:
        """Memory that it has."""
        return int(self._call("nvmlDeviceGetMemoryInfo").total)

    def used_bytes(self) -> int | None:
        """Memory in use by all processes, their CUDA contexts and the driver's own share included: what nvidia-smi shows."""
        told = self._ask("nvmlDeviceGetMemoryInfo")
        return None if told is None else int(told.used)

    def processes(self) -> tuple[DeviceProcess, ...] | None:
        """Who has something on it; empty too where a container hides them."""
        computing = self._ask_newest(_COMPUTE_PROCESSES)
        if computing is None:
            return None
        drawing = self._ask_newest(_GRAPHICS_PROCESSES)
        computing_pids = {int(process.pid) for process in computing}
        return tuple(
            DeviceProcess(pid=int(process.pid), used_bytes=process.usedGpuMemory, is_compute=is_compute)
            for processes, is_compute in ((computing, True), (drawing or (), False))
            for process in processes
            if is_compute or int(process.pid) not in computing_pids
        )

    def clock_reasons(self) -> int | None:
        """Why the clocks are not at their highest, as bits (NVML reference, nvmlClocksEventReasons)."""
        told = self._ask_newest(_CLOCK_REASONS)
        return None if told is None else int(told)

    def power_w(self) -> float | None:
        """What the whole board draws; from Ampere on the mean of the last second."""
        told = self._ask("nvmlDeviceGetPowerUsage")
        return None if told is None else told / 1000

    def energy_j(self) -> float | None:
        """Since the driver was loaded; Volta and later."""
        told = self._ask("nvmlDeviceGetTotalEnergyConsumption")
        return None if told is None else told / 1000

    def tells_power(self) -> bool:
        """What it draws can be read, in one way or the other."""
        return self.power_w() is not None or self.energy_j() is not None


def _instance(uuid: str) -> Device:
    """The MIG instance of that UUID."""
    import pynvml

    try:
        handle = _call("nvmlDeviceGetHandleByUUID", uuid)
        parent = _call("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)
        return Device(int(_call("nvmlDeviceGetIndex", parent)), handle, parent=parent)
    except DriverError as error:
        if error.code not in (pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_ERROR_INVALID_ARGUMENT):
            raise DriverError(f"{uuid}: {error}", code=error.code) from error
        raise refused(os.environ[VARIABLE], f"there is no instance {uuid!r} (nvidia-smi -L lists them)") from error


def _check_instances(devices: Sequence[Device]) -> None:
    if len(devices) > 1 and any(device.is_instance for device in devices):
        uuids = ", ".join(device.uuid for device in devices)
        raise ClusterError(
            f"of divided GPUs (MIG) one instance must be visible: CUDA shows a process no more than one, and NCCL, through which ranks exchange, "
            f"takes ranks on instances of a GPU for ranks on the same GPU, and refuses them; there are {uuids}: name one in "
            f"CUDA_VISIBLE_DEVICES, or use --device cpu"
        )


def has_nvidia_hardware(folder: Path = Path("/sys/bus/pci/devices")) -> bool:
    """A display or compute device of NVIDIA is plugged in (vendor 10de, class 03), whether or not its driver runs."""
    for device in folder.glob("*"):
        with contextlib.suppress(OSError):
            vendor, kind = ((device / name).read_text(encoding="ascii").strip() for name in ("vendor", "class"))
            if vendor == "0x10de" and kind.startswith("0x03"):
                return True
    return False


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
        code = int(error.value)  # pyright: ignore[reportAttributeAccessIssue]  # set in __new__
        if code in {getattr(pynvml, constant, None) for constant in _NOT_OFFERED}:
            raise _NotOfferedError(f"{name}: {error}", code=code) from error
        is_missing = code == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND or (
            code == pynvml.NVML_ERROR_DRIVER_NOT_LOADED and not has_nvidia_hardware()
        )
        raise DriverError(str(error), is_missing=is_missing, code=code) from error


def _call_of(index: int, name: str, *arguments: Any) -> Any:
    """As `_call`, of a GPU, which an error names."""
    try:
        return _call(name, *arguments)
    except DriverError as error:
        raise type(error)(f"GPU {index}: {error}", code=error.code) from error
