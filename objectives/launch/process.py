"""Linux facilities that tie the life of a process to its parent's."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import psutil

__all__ = ["adopt_orphans", "die_first", "die_with_parent", "end_group", "end_orphans", "held_devices"]

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
"""Both from linux/prctl.h."""
_LONGEST_END_S = 3.0
"""Killed processes are waited for, so that none is left behind as an orphan; one that hangs in a driver is not."""


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


def die_first() -> None:
    """Have the kernel choose this process when memory runs out, before those that watch it and all that others run.

    See oom_score_adj in proc(5); anybody may raise it.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parent ends, also of those in other groups and sessions (prctl(2))."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_orphans() -> None:
    """Kill and reap every child of this process, and what they leave behind in turn."""
    deadline = time.monotonic() + _LONGEST_END_S
    while time.monotonic() < deadline:
        for pid in _children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            time.sleep(0.005)


def _children() -> list[int]:
    return [child.pid for child in psutil.Process().children()]


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
