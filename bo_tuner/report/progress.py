"""One progress line while tuning, and one line for every trial that ends."""

from __future__ import annotations

import shutil
import sys
from typing import TextIO

from bo_tuner.engine import Snapshot
from bo_tuner.outcome import TrialResult
from bo_tuner.text import gib, rate
from bo_tuner.trial import TrialRecord, best_of

__all__ = ["LineProgress", "SilentProgress"]


class SilentProgress:
    """Shows nothing."""

    def shows(self, snapshot: Snapshot) -> None:
        """A step was made."""

    def ended(self, record: TrialRecord, snapshot: Snapshot) -> None:
        """A trial has its result."""


class LineProgress:
    """Writes to a stream: on a terminal one line that is rewritten, and everywhere one line per finished trial."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._is_terminal = self._stream.isatty()

    def shows(self, snapshot: Snapshot) -> None:
        """Rewrite the line."""
        if self._is_terminal:
            width = shutil.get_terminal_size().columns - 1
            self._stream.write("\r\033[K" + progress_line(snapshot, width))
            self._stream.flush()

    def ended(self, record: TrialRecord, snapshot: Snapshot) -> None:
        """Add a line."""
        if self._is_terminal:
            self._stream.write("\r\033[K")
        best = best_of(snapshot.records)
        mark = " *" if best is not None and best.number == record.number else ""
        text = f"trial {record.number:>3}  {record.config.name:<18} {ending(record.result)}{mark}"
        self._stream.write(f"{text}   [{snapshot.budget.left(snapshot.spent)}]\n")
        self._stream.flush()


def progress_line(snapshot: Snapshot, width: int | None = None) -> str:
    """Trial, config, step, memory against the limit, best so far, budget left.

    Args:
        snapshot: Where the study stands.
        width: Columns there are; words, then the name of the best, are left out where it is too narrow. None for all.
    """
    lines = [
        _line(snapshot, has_words=words, has_name=name) for words, name in ((True, True), (False, True), (False, False))
    ]
    if width is None:
        return lines[0]
    return next((line for line in lines if len(line) <= width), lines[-1][:width])


def _line(snapshot: Snapshot, *, has_words: bool, has_name: bool) -> str:
    running, event = snapshot.running, snapshot.event
    parts: list[str] = []
    if running is not None and event is not None:
        parts.append(f"trial {running.number} {running.config.name}")
        step = f"{event.step}/{event.n_steps}"
        parts.append("starting" if event.phase == "start" else f"step {step}" if has_words else step)
        if event.memory_bytes is not None:
            used, limit = gib(event.memory_bytes), gib(snapshot.memory_limit_bytes)
            parts.append(f"mem {used} of {limit}" if has_words else f"{used}/{limit}".replace(" ", ""))
    best = best_of(snapshot.records)
    if best is None:
        parts.append("no best yet")
    else:
        name = f" ({best.config.name})" if has_name else ""
        parts.append(f"best {rate(best.samples_per_s or 0.0)}{name}")
    left = snapshot.budget.left(snapshot.spent)
    parts.append(left if has_words else left.removesuffix(" left"))
    return "  ".join(parts)


def ending(result: TrialResult | None) -> str:
    """How a trial ended, in a few words."""
    if result is None:
        return "no result yet"
    if result.samples_per_s is not None:
        memory = f", {gib(result.peak_memory_bytes)}" if result.peak_memory_bytes else ""
        return f"{rate(result.samples_per_s)}{memory}"
    return f"{result.outcome.value}: {result.reason}"
