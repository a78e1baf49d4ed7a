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
            self._stream.write("\r\033[K" + progress_line(snapshot)[:width])
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


def progress_line(snapshot: Snapshot) -> str:
    """Trial, config, step, memory against the limit, best so far, budget left."""
    running, event = snapshot.running, snapshot.event
    parts: list[str] = []
    if running is not None and event is not None:
        parts.append(f"trial {running.number} {running.config.name}")
        parts.append(f"step {event.step}/{event.n_steps}" if event.phase != "start" else "starting")
        if event.memory_bytes is not None:
            parts.append(f"mem {gib(event.memory_bytes)} of {gib(snapshot.memory_limit_bytes)}")
    best = best_of(snapshot.records)
    parts.append(f"best {rate(best.samples_per_s or 0.0)} ({best.config.name})" if best else "no best yet")
    parts.append(snapshot.budget.left(snapshot.spent))
    return "  ".join(parts)


def ending(result: TrialResult | None) -> str:
    """How a trial ended, in a few words."""
    if result is None:
        return "no result yet"
    if result.samples_per_s is not None:
        memory = f", {gib(result.peak_memory_bytes)}" if result.peak_memory_bytes else ""
        return f"{rate(result.samples_per_s)}{memory}"
    return f"{result.outcome.value}: {result.reason}"
