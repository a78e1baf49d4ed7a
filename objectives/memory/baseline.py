"""`Baseline`: the GPUs are as free before each trial as they were before the first."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence

from bo_tuner.cluster import Cluster
from bo_tuner.errors import DeviceBusyError, DriverError
from bo_tuner.nvml import Device, DeviceProcess, Nvml
from bo_tuner.text import gib

__all__ = ["IDLE_BYTES", "Baseline"]

IDLE_BYTES = 2**30
"""An idle GPU holds up to some 600 MiB for its driver; more belongs to somebody."""
_TOLERANCE_BYTES = 64 * 2**20
"""The driver's own share moves a little as contexts come and go."""
_PATIENCE_S = 10.0
"""Memory of killed processes comes back within a second; a device that is slow about it is not to be blamed on the next."""
_FIRST_PATIENCE_S = 2.0
"""Before the first trial there is nothing of ours to wait for but what an interrupted run leaves for a moment."""
_WAY_OUT = "end that, or leave this GPU out (CUDA_VISIBLE_DEVICES names those to use)"


class Baseline:
    """What the devices of a study hold while no trial runs. One object for all its trials."""

    def __init__(self, *, allow_shared: bool = False, patience_s: float = _PATIENCE_S) -> None:
        """Nothing is read yet.

        Args:
            allow_shared: Other processes may use the devices too; then what they hold is the baseline of each trial.
            patience_s: Seconds to wait for memory to come back.
        """
        self._allow_shared = allow_shared
        self._patience_s = patience_s
        self._first: dict[int, int] = {}
        self._has_warned = False
        self.held: tuple[int, ...] = ()
        """Bytes that the device of each rank held when it was last ready; 0 where the driver does not tell."""

    @contextlib.contextmanager
    def ready(self, cluster: Cluster, *, limit_bytes: int) -> Iterator[list[Device]]:
        """The GPUs of `cluster`, one a rank in the order of ranks, once a trial under `limit_bytes` may start; none on a CPU.

        NVML is open for as long as this context manager is.

        Raises:
            DeviceBusyError: Somebody else computes there, what was held is not given back, or nothing is left under the limit.
            DriverError: The driver does not answer, or shows fewer GPUs than there were.
        """
        if cluster.device == "cpu":
            yield []
            return
        with contextlib.ExitStack() as stack:
            try:
                devices = stack.enter_context(Nvml()).visible()[: cluster.n_ranks]
                if len(devices) < cluster.n_ranks:
                    raise DriverError(f"it shows {len(devices)} of {cluster.n_ranks} GPUs")
                self._warn_of_gaps(devices)
                self.held = self._wait(devices, limit_bytes)
            except DriverError as error:
                raise DriverError(
                    f"the GPU driver must answer before a trial begins, and does not ({error}): mend it (nvidia-smi tells "
                    "more), then run the same command again"
                ) from error
            yield devices

    def _wait(self, devices: Sequence[Device], limit_bytes: int) -> tuple[int, ...]:
        # Ranks of ours that were just killed may be listed for a moment, so nobody is blamed at once.
        patience_s = self._patience_s if self._first else min(self._patience_s, _FIRST_PATIENCE_S)
        deadline = time.monotonic() + patience_s
        while True:
            used = tuple(device.used_bytes() or 0 for device in devices)
            troubles = (self._trouble(device, n_bytes) for device, n_bytes in zip(devices, used, strict=True))
            trouble = None if self._allow_shared else next(filter(None, troubles), None)
            if trouble is None:
                break
            if time.monotonic() > deadline:
                raise trouble
            time.sleep(0.1)
        for device, n_bytes in zip(devices, used, strict=True):
            self._first.setdefault(device.index, n_bytes)
            if n_bytes >= limit_bytes:
                text = (
                    f"GPU {device.index} holds {gib(n_bytes)} before a trial begins, and the limit is {gib(limit_bytes)}: "
                    "raise it (--memory-limit, --memory-reserve), or free the GPU"
                )
                raise _busy(device, n_bytes, device.processes() or (), text)
        return used

    def _trouble(self, device: Device, n_bytes: int) -> DeviceBusyError | None:
        """Why a trial may not start on a device that holds `n_bytes`."""
        told = device.processes()
        processes = told or ()
        computing = [process for process in processes if process.is_compute]
        own = _own_pids() if computing else set[int]()
        strangers = [process for process in computing if process.pid not in own]
        first = self._first.get(device.index)
        if first is not None and n_bytes > first + _TOLERANCE_BYTES:
            who = _names(processes) if processes else "nobody who can be seen from here holds it"
            text = (
                f"GPU {device.index} must be back at the {gib(first)} it held before the first trial, and holds {gib(n_bytes)} after "
                f"{self._patience_s:g} s; {who}: {_WAY_OUT}, then run the same command again"
            )
            return _busy(device, n_bytes, processes, text)
        is_hidden = first is None and n_bytes > IDLE_BYTES and told == ()
        if not strangers and not is_hidden:
            return None
        who = _names(strangers) if strangers else f"processes that cannot be seen from here hold {gib(n_bytes)}"
        text = (
            f"GPU {device.index} must not be used by others while trials are measured; {who}: {_WAY_OUT}, or measure beside "
            "others with --allow-shared-gpu"
        )
        return _busy(device, n_bytes, strangers, text)

    def _warn_of_gaps(self, devices: Sequence[Device]) -> None:
        """Once: what this driver does not tell, and what is therefore not done."""
        if self._has_warned:
            return
        self._has_warned = True
        readings: dict[str, Sequence[Callable[[Device], object]]] = {
            "memory in use (only torch's cap ends a trial at the limit)": [Device.used_bytes],
            "processes (others are not noticed)": [Device.processes],
            "why clocks are low (throttling is not noticed)": [Device.clock_reasons],
            "power": [Device.power_w, Device.energy_j],
        }
        gaps = [
            name
            for name, ways in readings.items()
            if any(all(way(device) is None for way in ways) for device in devices)
        ]
        if gaps:
            warnings.warn(f"the GPU driver does not tell {', '.join(gaps)}", RuntimeWarning, stacklevel=2)


def _busy(device: Device, n_bytes: int, holders: Iterable[DeviceProcess], text: str) -> DeviceBusyError:
    pids = tuple(holder.pid for holder in holders)
    return DeviceBusyError(text, index=device.index, used_bytes=n_bytes, pids=pids)


def _own_pids() -> set[int]:
    """This process and all that it started."""
    import psutil

    this = psutil.Process()
    return {this.pid, *(child.pid for child in this.children(recursive=True))}


def _names(processes: Iterable[DeviceProcess]) -> str:
    """ "process 4242 (python) holds 12.00 GiB", as far as it is known."""
    import psutil

    told: list[str] = []
    for process in processes:
        try:
            name = "this one" if process.pid == os.getpid() else psutil.Process(process.pid).name()
        except psutil.Error:
            name = "not seen from here"
        held = f"holds {gib(process.used_bytes)}" if process.used_bytes else "uses it"
        told.append(f"process {process.pid} ({name}) {held}")
    return ", ".join(told)
