"""What the machine has: cores, memory, open files, shared memory, disk."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import shutil
from pathlib import Path

from bo_tuner.cluster import Cluster, DeviceKind
from bo_tuner.doctor.finding import Finding, fail, ok, warn
from bo_tuner.text import count, gib

__all__ = ["cores", "disk", "memory", "open_files", "shared_memory"]

SHARED_BYTES_PER_RANK = 66 * 2**20
"""DeepSpeed's `allreduce_workspace` (csrc/cpu/comm/shm.cpp): 2 x 1 MiB and 2 x 32 MiB."""
_LEAST_MEMORY_PER_RANK = 2**30
"""A rank with torch and DeepSpeed, a small model and room to work."""
_FEWEST_OPEN_FILES = 1024
_LITTLE_DISK = 2**30
_TOO_LITTLE_DISK = 100 * 2**20
"""Logs, a database and a compiled op fit in it."""


def cores(n_ranks: int, *, cpu_max: Path = Path("/sys/fs/cgroup/cpu.max")) -> Finding:
    """CPU cores this process may use, and whether its control group lets it use them.

    Args:
        n_ranks: World size.
        cpu_max: Of the control group: quota and period in microseconds (cgroup v2).
    """
    name, n_cores = "cpu cores", len(os.sched_getaffinity(0))
    quota = float(n_cores)
    with contextlib.suppress(OSError, ValueError):  # no limit reads "max 100000"
        used, period = cpu_max.read_text(encoding="ascii").split()
        quota = int(used) / int(period)
    details = {"n_cores": n_cores, "quota_cores": quota}
    if quota < n_cores:
        mend = f"give whole cores instead, as docker run --cpuset-cpus=0-{max(math.ceil(quota), n_ranks) - 1} does"
        found = f"{n_cores} may be used, for {quota:g} cores' worth of time: threads wait for each other"
        return warn(name, found, mend, **details)
    return ok(name, f"{n_cores}, {count(n_ranks, 'rank')}", **details)


def memory(n_ranks: int) -> Finding:
    """Host memory: the machine's, or its control group's where that is less, and what is free of it."""
    import psutil

    name, machine = "memory", psutil.virtual_memory()
    usable = Cluster.detect(device="cpu", n_ranks=1).memory_bytes
    free = min(usable, int(machine.available))
    details = {"usable_bytes": usable, "free_bytes": free}
    limit = f" (limited by the control group, of {gib(machine.total)})" if usable < machine.total else ""
    found = f"{gib(usable)}{limit}, {gib(free)} free"
    if free < n_ranks * _LEAST_MEMORY_PER_RANK:
        mend = "end other programs, use fewer --ranks, or raise the container's limit (docker run --memory=...)"
        return warn(name, f"{found}; {count(n_ranks, 'rank')} should have {n_ranks} GiB", mend, **details)
    return ok(name, found, **details)


def open_files() -> Finding:
    """How many files a process may have open."""
    name = "open files"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= _FEWEST_OPEN_FILES:
        return ok(name, "no limit" if soft == resource.RLIM_INFINITY else f"up to {soft}", limit=soft)
    is_allowed = hard == resource.RLIM_INFINITY or hard >= _FEWEST_OPEN_FILES
    mend = f"ulimit -n {_FEWEST_OPEN_FILES}" + ("" if is_allowed else " as root: the hard limit is lower too")
    return warn(name, f"up to {soft} a process; data loaders may need {_FEWEST_OPEN_FILES}", mend, limit=soft)


def shared_memory(n_ranks: int, device: DeviceKind, *, folder: Path = Path("/dev/shm")) -> Finding:
    """Shared memory: DeepSpeed takes 66 MiB a rank on a CPU; NCCL too goes through it between GPUs."""
    name, needed = str(folder), n_ranks * SHARED_BYTES_PER_RANK
    size_gib = max(1, math.ceil(2 * needed / 2**30))
    mend = f"mount -o remount,size={size_gib}G {folder} as root; for a container: docker run --shm-size={size_gib}g ..."
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        return fail(name, f"cannot be looked at ({error.strerror})", mend)
    details = {"size_bytes": usage.total, "free_bytes": usage.free, "needed_bytes": needed}
    found = f"{gib(usage.total)}, {gib(usage.free)} free"
    if usage.free >= needed:
        return ok(name, f"{found}; DeepSpeed takes up to {gib(needed)}", **details)
    short = f"{found}; {count(n_ranks, 'rank')} may need {gib(needed)}"
    return (fail if device == "cpu" else warn)(name, short, mend, **details)


def disk(what: str, folder: Path, *, way_out: str) -> Finding:
    """Room on the disk for `what`.

    Args:
        what: For the line's name.
        folder: Need not exist yet; its nearest parent that does is looked at.
        way_out: How to put it elsewhere.
    """
    name = f"disk: {what}"
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(nearest).free
    details = {"path": str(nearest), "free_bytes": free}
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        return fail(name, f"{nearest} cannot be written", f"make it a folder you can write, or {way_out}", **details)
    found = f"{gib(free)} free in {nearest}"
    if free < _LITTLE_DISK:
        verdict = fail if free < _TOO_LITTLE_DISK else warn
        return verdict(name, found, f"free some room, or {way_out}", **details)
    return ok(name, found, **details)
