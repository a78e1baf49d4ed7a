"""`Cluster`: the devices a study runs on, detected or given."""

from __future__ import annotations

import contextlib
import os
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from bo_tuner.errors import ClusterError, ConfigError, DriverError
from bo_tuner.hardware.catalogue import CPU_CORE
from bo_tuner.hardware.names import find_device
from bo_tuner.nvml import Nvml
from bo_tuner.stored import known_fields
from bo_tuner.text import count, fraction_in, gib

__all__ = ["Cluster", "DeviceKind", "MemoryLimit"]

_UNITS = {
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "b": 1,
}
_USUAL_LIMIT = 0.92
"""Of a device: what is left takes what the driver and communication need late, and fragments."""
DeviceKind = Literal["cpu", "cuda"]
_NOTATION = re.compile(r"(?P<counts>(\d+\s*x\s*){0,2})(?P<name>[^@]+?)\s*(@\s*(?P<network>\d+(\.\d+)?)\s*Gb/s)?")
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def _say_nothing(text: str) -> None:
    """Nobody listens."""


@dataclass(frozen=True, slots=True)
class _Gpu:
    name: str
    memory_bytes: int
    capability: int
    """Major compute capability; 8 is Ampere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The devices of a study: `n_ranks` alike, one a rank, on `n_nodes` machines alike."""

    device: DeviceKind
    """What a rank computes on."""
    n_ranks: int
    """World size."""
    device_name: str
    """As the driver or the kernel calls it."""
    memory_bytes: int
    """Of one device; on a CPU one rank's even share of the machine."""
    threads_per_rank: int = 1
    """CPU threads a rank computes with; matters on a CPU only."""
    usual_precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """What people train in on it: fp32 on a CPU, bf16 on a GPU that has it (compute capability 8 and up), else fp16."""
    n_nodes: int = 1
    """Machines that the ranks are spread over evenly."""
    network_bytes_per_s: float | None = None
    """Of one machine, in one direction; None for what such machines usually have."""

    @classmethod
    def described(cls, notation: str) -> Cluster:
        """One that need not be here: `8x8xV100-16GB` (nodes, devices of each, device), `8xA100-80GB` (one node), `H100`.

        `@400Gb/s` behind it tells the network of a node, where it is not the usual one.

        Raises:
            ConfigError: It cannot be read.
            ClusterError: The device is unknown; the text names the nearest.
        """
        match = _NOTATION.fullmatch(notation.strip())
        counts = [int(count) for count in re.findall(r"\d+", match["counts"])] if match else []
        network_bytes_per_s = float(match["network"]) * 1e9 / 8 if match and match["network"] else None
        if match is None or 0 in counts or network_bytes_per_s == 0:
            raise ConfigError(
                "--cluster must be nodes x devices x name, as in 8x8xV100-16GB, 8xA100-80GB, H100 or 2x8xA100@400Gb/s; "
                f"got {notation!r}"
            )
        if re.search(r"[+/,]\s*\d+\s*x", match["name"]):
            raise ConfigError(f"--cluster: all nodes must be alike, and have as many devices; got {notation!r}")
        sheet, note = find_device(match["name"])
        if sheet is None:
            raise ClusterError(f"--cluster must name devices whose figures are known; got {notation!r}: {note}")
        n_nodes, n_devices = [1, 1, *counts][-2:]
        on_gpu = sheet is not CPU_CORE
        return cls(
            device="cuda" if on_gpu else "cpu",
            n_ranks=n_nodes * n_devices,
            device_name=sheet.name,
            memory_bytes=sheet.memory_bytes,
            usual_precision=("bf16" if "bf16" in sheet.peak_flops_per_s else "fp16") if on_gpu else "fp32",
            n_nodes=n_nodes,
            network_bytes_per_s=network_bytes_per_s,
        )

    @classmethod
    def detect(
        cls, *, device: str = "auto", n_ranks: int | None = None, tell: Callable[[str], None] = _say_nothing
    ) -> Cluster:
        """What this machine has.

        Args:
            device: `cpu`, `cuda`, or `auto` for the GPUs where there are any; a GPU that is there and does not work is an error.
            n_ranks: Ranks to use; None for all visible GPUs, or for two CPU ranks.
            tell: Is told, in a line, where GPUs are there and hidden.

        Raises:
            ClusterError: The device is not here, or has fewer than `n_ranks`; or CUDA_VISIBLE_DEVICES names what is not here.
            DriverError: The GPU driver or a visible GPU does not answer.
        """
        if device not in ("auto", "cpu", "cuda"):
            raise ClusterError(f"--device must be auto, cpu or cuda; got {device!r}")
        if n_ranks is not None and n_ranks < 1:
            raise ClusterError(f"--ranks must be at least 1; got {n_ranks}")
        gpus = _visible_gpus(tell) if device != "cpu" else []
        if device == "cuda" and not gpus:
            raise ClusterError("--device cuda needs a visible NVIDIA GPU, and the driver shows none; use --device cpu")
        if gpus:
            return cls._of_gpus(gpus, n_ranks)
        n_cores = len(os.sched_getaffinity(0))
        wanted = n_ranks if n_ranks is not None else min(2, n_cores)
        if wanted > n_cores:
            raise ClusterError(
                f"--ranks must be at most the {n_cores} CPU cores this process may use; got {wanted}: "
                f"use --ranks {n_cores} or fewer"
            )
        return cls(
            device="cpu",
            n_ranks=wanted,
            device_name=_cpu_name(),
            memory_bytes=_host_memory() // wanted,
            threads_per_rank=n_cores // wanted,
        )

    @classmethod
    def _of_gpus(cls, gpus: list[_Gpu], n_ranks: int | None) -> Cluster:
        wanted = n_ranks if n_ranks is not None else len(gpus)
        if wanted > len(gpus):
            raise ClusterError(
                f"--ranks must be at most the {count(len(gpus), 'visible GPU')}; got {wanted}: use --ranks {len(gpus)} or fewer, "
                "or show more in CUDA_VISIBLE_DEVICES"
            )
        used = gpus[:wanted]
        return cls(
            device="cuda",
            n_ranks=wanted,
            device_name=" + ".join(sorted({gpu.name for gpu in used})),
            memory_bytes=min(gpu.memory_bytes for gpu in used),
            usual_precision="bf16" if all(gpu.capability >= 8 for gpu in used) else "fp16",
        )

    @property
    def label(self) -> str:
        """Short, for names: `2cpu`, `8cuda`."""
        return f"{self.n_ranks}{self.device}"

    def __str__(self) -> str:
        noun = "rank" if self.n_ranks == 1 else "ranks"
        where = f" on {self.n_nodes} nodes" if self.n_nodes > 1 else ""
        return f"{self.n_ranks} {self.device} {noun}{where} ({self.device_name}, {gib(self.memory_bytes)} each)"

    def to_dict(self) -> dict[str, Any]:
        """Plain data that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Cluster:
        """The inverse of `to_dict`."""
        return cls(**known_fields(cls, data))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """Memory that a rank may use: a fraction of its device, bytes, or all but a reserve."""

    fraction: float | None = None
    """Above 0, at most 1."""
    limit_bytes: int | None = None
    """Bytes."""
    reserve_bytes: int | None = None
    """Bytes of each device that stay free."""

    @classmethod
    def of(
        cls, *, memory_limit: str | float | MemoryLimit | None = None, memory_reserve: str | None = None
    ) -> MemoryLimit:
        """From either option; None of them means 92 % of the device.

        Raises:
            ConfigError: Both are given, or the one that is cannot be read.
        """
        if memory_reserve is None:
            return cls.parse(_USUAL_LIMIT if memory_limit is None else memory_limit)
        if memory_limit is not None:
            raise ConfigError(
                f"--memory-limit and --memory-reserve say the same in two ways; got {memory_limit} and {memory_reserve}: give one"
            )
        reserve_bytes = _bytes_in(memory_reserve)
        if reserve_bytes is None:
            raise ConfigError(f'--memory-reserve must be bytes as in "2GiB"; got {memory_reserve!r}')
        return cls(reserve_bytes=reserve_bytes)

    @classmethod
    def parse(cls, value: str | float | MemoryLimit) -> MemoryLimit:
        """Read "0.92", "92%", "3GiB", "800MiB" or a fraction.

        Raises:
            ConfigError: It is none of these, or not a usable amount.
        """
        if isinstance(value, MemoryLimit):
            return value
        text = str(value).strip().lower().replace(" ", "")
        wanted = f'--memory-limit must be a fraction as in 0.92, or bytes a rank as in "3GiB"; got {value!r}'
        limit_bytes = _bytes_in(text)
        if limit_bytes is not None:
            return cls(limit_bytes=limit_bytes)
        fraction = fraction_in(text)
        if fraction is not None and 0 < fraction <= 1:
            return cls(fraction=fraction)
        raise ConfigError(wanted)

    def bytes_on(self, cluster: Cluster) -> int:
        """Bytes per rank on `cluster`.

        Raises:
            ConfigError: More bytes than the device has.
        """
        if self.reserve_bytes is not None:
            if self.reserve_bytes >= cluster.memory_bytes:
                raise ConfigError(
                    f"--memory-reserve must be less than the {gib(cluster.memory_bytes)} of one rank; "
                    f"got {gib(self.reserve_bytes)}: lower it"
                )
            return cluster.memory_bytes - self.reserve_bytes
        if self.limit_bytes is None:
            return int((self.fraction or 1.0) * cluster.memory_bytes)
        if self.limit_bytes > cluster.memory_bytes:
            raise ConfigError(
                f"--memory-limit must be at most the {gib(cluster.memory_bytes)} of one rank; "
                f"got {gib(self.limit_bytes)}: lower it, or leave it out for 92 %"
            )
        return self.limit_bytes


def _bytes_in(value: str) -> int | None:
    """Bytes of "3GiB"; None unless it is a positive amount with a unit."""
    text = value.strip().lower().replace(" ", "")
    unit = next((unit for unit in _UNITS if text.endswith(unit)), None)
    if unit is None:
        return None
    with contextlib.suppress(ValueError, OverflowError):
        n_bytes = int(float(text.removesuffix(unit)) * _UNITS[unit])
        return n_bytes if n_bytes > 0 else None
    return None


def _visible_gpus(tell: Callable[[str], None]) -> list[_Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, in its order; none where there is no driver or no GPU, or all are hidden.

    Raises:
        DriverError: There is a driver, and it or a visible GPU does not answer.
        ClusterError: The variable names what is not here.
    """
    with contextlib.ExitStack() as stack:
        try:
            nvml = stack.enter_context(Nvml())
        except DriverError as error:
            if error.is_missing:
                return []
            raise DriverError(f"the GPU driver does not answer ({error}); mend it, or use --device cpu") from error
        try:
            gpus = [_Gpu(device.name, device.total_bytes, device.capability) for device in nvml.visible()]
        except DriverError as error:
            raise DriverError(
                f"every visible GPU must answer, and one does not ({error}): leave it out (CUDA_VISIBLE_DEVICES names those to "
                "use), mend it (nvidia-smi tells more), or use --device cpu"
            ) from error
        if nvml.n_devices and not gpus:
            tell(
                f"CUDA_VISIBLE_DEVICES hides the {count(nvml.n_devices, 'GPU')} of this machine: it is taken as without one"
            )
        return gpus


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _host_memory() -> int:
    """Bytes this process and its children may use: the machine's, or its control group's where that is less."""
    import psutil

    limits = [int(psutil.virtual_memory().total)]
    for path in _CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):
            limits.append(int(Path(path).read_text(encoding="ascii")))
    return min(limits)
