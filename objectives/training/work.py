"""`Work`: whether a rank that makes no marks is at work all the same: itself, or through child processes, as compilers are."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import psutil

__all__ = ["Work"]

_LEAST_SHARE = 0.1
"""Of a core. A pool of idle workers takes a small part of that; a compiler takes more, also on a crowded machine."""


@dataclass(frozen=True, slots=True)
class _Spent:
    """Processor seconds, at a moment."""

    at: float
    by_children_s: float
    by_itself_s: float
    """By the main thread."""


class Work:
    """Compares what a rank and its child processes have spent at one look and at the next; a look is a walk over /proc."""

    def __init__(self, pid: int) -> None:
        """Look after the rank of this process."""
        self._pid = pid
        self._spent: _Spent | None = None
        self.by_children_s = 0.0
        """Time between the last two looks where child processes were at work meanwhile, else 0."""
        self.is_busy = False
        """Its main thread was at work between the last two looks."""

    def forget(self) -> None:
        """What comes has nothing to do with what was."""
        self._spent, self.by_children_s, self.is_busy = None, 0.0, False

    def look(self, now: float, *, every_s: float) -> None:
        """Look, unless the last look is less than `every_s` ago."""
        before = self._spent
        if before is not None and now - before.at < every_s:
            self.by_children_s = 0.0  # is told once
            return
        with contextlib.suppress(psutil.Error):  # it ends, which others notice
            self._spent = spent = _spent(self._pid, now)
            if before is not None:
                passed_s = now - before.at
                worked = spent.by_children_s - before.by_children_s > _LEAST_SHARE * passed_s
                self.by_children_s = passed_s if worked else 0.0
                self.is_busy = spent.by_itself_s - before.by_itself_s > _LEAST_SHARE * passed_s


def _spent(pid: int, now: float) -> _Spent:
    rank = psutil.Process(pid)
    of_rank = rank.cpu_times()
    # What a child spent goes over to its parent when it has ended.
    by_children_s = of_rank.children_user + of_rank.children_system
    for child in rank.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            by_children_s += sum(child.cpu_times()[:4])
    by_itself_s = sum(thread.user_time + thread.system_time for thread in rank.threads() if thread.id == pid)
    return _Spent(now, by_children_s, by_itself_s)
