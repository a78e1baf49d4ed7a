"""Plain progress: one line for every trial that ends, or nothing at all."""

from __future__ import annotations

from typing import TextIO

from bo_tuner.engine import Snapshot
from bo_tuner.goal import Goal
from bo_tuner.outcome import TrialResult
from bo_tuner.report.standing import confirmation_text, plus_minus
from bo_tuner.text import gib, rate
from bo_tuner.trial import TrialRecord, best_of

__all__ = ["LineProgress", "SilentProgress", "ending"]


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
    """Writes a line to a stream for every trial that ends, and nothing in between."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def shows(self, snapshot: Snapshot) -> None:
        """A step is no line."""

    def ended(self, record: TrialRecord, snapshot: Snapshot) -> None:
        """Add a line."""
        best = best_of(snapshot.records)
        mark = " *" if best is not None and best.number == record.number else ""
        text = f"trial {record.number:>3}  {record.config.name:<18} {ending(record.result, record.goal)}{mark}"
        self._stream.write(f"{text}   [{snapshot.budget.left(snapshot.spent)}]\n")
        self._stream.flush()

    def ran_again(self, record: TrialRecord, snapshot: Snapshot) -> None:
        """Add a line."""
        self._stream.write(
            f"again {record.number:>3}  {record.config.name:<18} {running_again(record, snapshot.purpose)}\n"
        )
        self._stream.flush()

    def close(self) -> None:
        """The lines stand."""


def ending(result: TrialResult | None, goal: Goal) -> str:
    """How a trial ended, in a few words: its samples/s, the goal's own value beside it, and memory; or why it did not complete."""
    if result is None:
        return "no result yet"
    if result.samples_per_s is not None:
        memory = f", {gib(result.peak_memory_bytes)}" if result.peak_memory_bytes else ""
        spread = f" {plus_minus(result.measurement)}" if result.measurement else ""
        return f"{rate(result.samples_per_s)}{spread}{goal.beside(result)}{memory}"
    return f"{result.outcome.value}: {result.reason}"


def running_again(record: TrialRecord, purpose: str) -> str:
    """What another run of a trial's config showed, in a few words."""
    if purpose == "confirm":
        return confirmation_text(record)
    return f"{ending(record.repeats[-1], record.goal)} (repeated, to see what launches differ by)"
