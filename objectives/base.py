"""The `Objective` protocol: runs one config and says how it went."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from bo_tuner.config import TrainConfig
from bo_tuner.outcome import TrialLimits, TrialResult

__all__ = ["EventSink", "Objective", "TrialEvent", "ignore_events"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialEvent:
    """Something that happened while a trial ran."""

    phase: str
    """`start`, `warmup` or `measure`."""
    step: int = 0
    """Optimizer steps that every rank has finished."""
    n_steps: int = 0
    """Optimizer steps the trial runs at most."""
    memory_bytes: int | None = None
    """Highest of all ranks just now; None when not read."""
    micro_batch: int = 0
    """Which one of the running step is being worked on, from 1, where steps take long enough to tell; else 0."""
    n_micro_batches: int = 0
    """Of a step."""


class EventSink(Protocol):
    """Told of every step and memory reading while a trial runs. Any callable of this shape will do."""

    def __call__(self, event: TrialEvent, /) -> None:
        """Take note; quickly, since the trial is watched by the same thread."""
        ...


class Objective(Protocol):
    """Runs one config and says how it went. Any callable of this shape will do."""

    def __call__(self, config: TrainConfig, *, limits: TrialLimits, on_event: EventSink) -> TrialResult:
        """Run `config` within `limits`.

        Args:
            config: What to run; already legal for this objective.
            limits: Optimizer steps, seconds, bytes per rank, and the incumbent's samples/s to beat.
            on_event: Told of every step and memory reading while the trial runs.

        Returns:
            The outcome with its reason; a measurement when steps were timed. Running out of memory, hanging or
            crashing are outcomes, so they come back here and are not raised.
        """
        ...


def ignore_events(event: TrialEvent) -> None:
    """An `EventSink` that forgets."""
