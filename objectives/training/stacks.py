"""Where ranks stand: their Python stacks, which they write to files of their own when they get a signal.

`faulthandler` writes from within the signal handler, so a rank tells also while it is blocked in a collective or loops in native
code. A stopped process cannot.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Stack", "dump_on_signal", "stacks_of"]

_SIGNAL = signal.SIGUSR1
_LONGEST_WRITE_S = 3.0
_SETTLES_S = 0.1
"""A dump is one burst of short writes: a file that does not grow for so long is whole."""
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_MOST_FRAMES = 12
_COLLECTIVES = ("/torch/distributed/", "/deepspeed/comm/")
_COMPILERS = (
    "/torch/_dynamo/convert_frame.py",
    "/torch/_dynamo/symbolic_convert.py",
    "/torch/_subclasses/fake_tensor.py",
    "/torch/fx/experimental/proxy_tensor.py",
    "/torch/_inductor/graph.py",
    "/torch/_inductor/codecache.py",
    "/torch/_inductor/async_compile.py",
    "/torch/_inductor/fx_passes/",
    "/torch/utils/cpp_extension.py",
    "/triton/compiler/",
)
"""What is called while something is compiled, and not when it runs afterwards."""
_LIBRARIES = (
    *{sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")},
    f"{Path(__file__).parents[2]}{os.sep}",
    "<",  # frozen modules, and code made by others
)
_open_files: list[object] = []
"""Kept open, since the signal handler writes to the bare descriptor."""


def dump_on_signal(file: Path) -> None:
    """Have the calling process write the stacks of all its threads to `file` whenever it gets the signal."""
    opened = file.open("wb")
    _open_files.append(opened)
    faulthandler.register(_SIGNAL, file=opened, all_threads=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Where one rank stands."""

    frames: tuple[str, ...]
    """Innermost first, as in "run_step (training/job/engine.py:207)"; none when it did not tell."""
    own_frame: str | None = None
    """The innermost one outside of installed packages, the standard library and this package."""
    is_stopped: bool = False
    """By SIGSTOP or a debugger."""
    is_in_collective: bool = False
    """It waits for other ranks."""
    is_compiling: bool = False
    """It traces, compiles, or waits for those that do."""

    @property
    def where(self) -> str:
        """In words."""
        if self.is_stopped:
            return "it is stopped (SIGSTOP or a debugger)"
        if not self.frames:
            return "it does not tell where it is"
        called = f", called by {self.own_frame}" if self.own_frame not in (None, self.frames[0]) else ""
        return f"it is in {self.frames[0]}{called}"

    def lines(self) -> list[str]:
        """For people."""
        frames = [f"  {frame}" for frame in self.frames[:_MOST_FRAMES]]
        if len(self.frames) > _MOST_FRAMES:
            frames.append(f"  ... and {len(self.frames) - _MOST_FRAMES} more")
        return [self.where, *frames]


def stacks_of(pids: Sequence[int], files: Sequence[Path]) -> list[Stack]:
    """Ask processes where they are; takes up to three seconds.

    Args:
        pids: By rank.
        files: What each wrote to `dump_on_signal`.
    """
    are_stopped = [_is_stopped(pid) for pid in pids]
    starts = [_size(file) for file in files]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, _SIGNAL)
    told = list(zip(files, are_stopped, starts, strict=True))
    asked = [(file, start) for file, is_stopped, start in told if not is_stopped]
    deadline = time.monotonic() + _LONGEST_WRITE_S
    sizes: list[int] = []
    while time.monotonic() < deadline:
        before, sizes = sizes, [_size(file) - start for file, start in asked]
        if sizes == before and all(sizes):
            break
        time.sleep(_SETTLES_S)
    return [_read(file, is_stopped, start) for file, is_stopped, start in told]


def _read(file: Path, is_stopped: bool, start: int) -> Stack:
    try:
        text = file.read_bytes()[start:].decode(errors="replace")
    except OSError:
        text = ""
    threads = text.split("\n\n")
    # The main thread is the one that runs the rank, and that takes signals; others load data, or watch. Of a deep stack only the
    # innermost frames are told.
    own = next(
        (thread for mark in (" in run_rank\n", "Current thread") for thread in threads if mark in thread), threads[0]
    )
    frames = _frames(own)
    told = tuple(f"{name} ({_short(path)}:{line})" for path, line, name in frames)
    outside = (number for number, (path, _, _) in enumerate(frames) if not path.startswith(_LIBRARIES))
    nearest = next(outside, None)
    return Stack(
        frames=told,
        own_frame=None if nearest is None else told[nearest],
        is_stopped=is_stopped,
        is_in_collective=any(part in path for path, _, _ in frames[:4] for part in _COLLECTIVES),
        is_compiling=any(part in path for path, _, _ in frames for part in _COMPILERS),
    )


def _frames(thread: str) -> list[tuple[str, str, str]]:
    """(file, line, function) of one thread, innermost first."""
    found = map(_FRAME.match, thread.splitlines())
    return [(frame["file"], frame["line"], frame["function"]) for frame in found if frame]


def _short(path: str) -> str:
    return "/".join(path.split("/")[-3:])


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _is_stopped(pid: int) -> bool:
    """State T or t of proc(5)."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] in ("T", "t")
