"""Linux facilities that tie the life of a process to its parent's."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

__all__ = ["die_with_parent", "end_group", "held_devices"]

_PR_SET_PDEATHSIG = 1
"""From linux/prctl.h."""


def die_with_parent(parent_pid: int, *, with_signal: signal.Signals) -> None:
    """Have the kernel signal this process when its parent ends, however it ends.

    Args:
        parent_pid: The parent as it was before the fork; when it is gone already, this process ends at once.
        with_signal: What to send.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(with_signal), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        os._exit(1)


def end_group(leader_pid: int) -> None:
    """Kill a process group; nothing happens when it is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader_pid, signal.SIGKILL)


def held_devices() -> str | None:
    """Why this process must not be forked by ranks that use a GPU; None when it has started no CUDA.

    CUDA does not survive a fork. Initialising it opens the driver's unified-memory device, which asking NVML, as torch and
    DeepSpeed do while they are imported, does not.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "torch has initialised CUDA"
    for entry in os.scandir("/proc/self/fd"):
        try:
            target = os.readlink(entry.path)
        except OSError:
            continue
        if target.startswith("/dev/nvidia-uvm"):
            return f"{target} is open"
    return None
