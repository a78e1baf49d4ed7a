"""Plain progress: one line for every trial that ends, and where steps take long some in between; or nothing at all."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

from bo_tuner.engine import Snapshot
from bo_tuner.outcome import TrialResult
from bo_tuner.report.standing import confirmation_text, plus_minus
from bo_tuner.text import gib, rate
from bo_tuner.trial import TrialRecord, best_of

__all__ = ["LineProgress", "SilentProgress", "ending"]


_WORD_EVERY_S = 15.0
"""On a step that takes long."""


class SilentProgress:
    """Shows nothing."""

    def shows(self, snapshot: Snapshot) -> None:
        """A step was made."""

    def ended(self, record: TrialRecord, snapshot: Snapshot) -> None:
        """A trial has its result."""

    def ran_again(self, record: TrialRecord, snapshot: Snapshot) -> None:
        """A trial's config was repeated, or confirmed."""

    def close(self) -> None:
        """The run is over."""


class LineProgress:
    """Writes a line to a stream for every trial that ends; in between only where steps take long, how far the running one is."""

    def __init__(self, stream: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._written_at = clock()

    def shows(self, snapshot: Snapshot) -> None:
        """A step is no line, but a long one is worth a word now and then."""
        running, event = snapshot.running, snapshot.event
        if running is None or event is None or not event.micro_batch:
            return
        if self._clock() - self._written_at > _WORD_EVERY_S:
            where = f"step {event.step + 1}"
            if event.n_micro_batches > 1:
                where += f", micro-batch {event.micro_batch} of {event.n_micro_batches}"
            self._write(f"      {running.number:>3}  {running.config.name:<18} {where}\n")

    def _write(self, line: str) -> None:
        self._stream.write(line)
        self._stream.flush()
        self._written_at = self._clock()

    def ended(self, record: TrialRecord, snapshot: Snapshot) -> None:
        """Add a line."""
        best = best_of(snapshot.records)
        mark = " *" if best is not None and best.number == record.number else ""
        text = f"trial {record.number:>3}  {record.config.name:<18} {ending(record)}{mark}"
        self._write(f"{text}   [{snapshot.budget.left(snapshot.spent)}]\n")

    def ran_again(self, record: TrialRecord, snapshot: Snapshot) -> None:
        """Add a line."""
        self._write(f"again {record.number:>3}  {record.config.name:<18} {running_again(record, snapshot.purpose)}\n")

    def close(self) -> None:
        """The lines stand."""


def ending(record: TrialRecord, run: TrialResult | None = None) -> str:
    """How a trial ended, in a few words: its samples/s, the goal's own value beside it, and memory; or why it did not complete.

    Args:
        record: The trial.
        run: One of its runs; None for what stands for its config.
    """
    result = run or record.told
    if result is None:
        return "no result yet"
    if result.samples_per_s is not None:
        memory = f", {gib(result.peak_memory_bytes)}" if result.peak_memory_bytes else ""
        spread = f" {plus_minus(record, run)}"
        return f"{rate(result.samples_per_s)}{spread}{record.goal.beside(result)}{memory}"
    return f"{result.outcome.value}: {result.reason}"


def running_again(record: TrialRecord, purpose: str) -> str:
    """What another run of a trial's config showed, in a few words."""
    if purpose == "confirm":
        return confirmation_text(record)
    return f"{ending(record, record.repeats[-1])} (repeated, to see what launches differ by)"
