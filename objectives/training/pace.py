"""`Pace`: how far the running optimizer step is, and whether its micro-batches show that a step takes longer than it may."""

from __future__ import annotations

__all__ = ["Pace"]

_CERTAINTY = 1.25
"""A step must be expected to take this many times as long as it may: micro-batches differ."""
_LEAST_SEEN = 0.25
"""Of what a step may take: a stall is shorter than this."""
_FIRST_TAKES = 7.0
"""The first micro-batch may take this many times as long as a step may: memory is got in it, and a rank that hangs is to be known as such."""


class Pace:
    """Follows micro-batches as they begin. Times are of `time.monotonic`."""

    def __init__(self, *, n_micro_batches: int, longest_s: float | None) -> None:
        """Nothing has begun.

        Args:
            n_micro_batches: Of an optimizer step.
            longest_s: Seconds that a step may take; None for any.
        """
        self._n_of_step = n_micro_batches
        self._longest_s = longest_s
        self._n_begun = 0
        self._began: float | None = None
        self._step_began: float | None = None
        self._last_step_s = 0.0
        self._n_steps = 0
        self._second_began: float | None = None
        self._n_left_out = 0

    def note(self, now: float, *, n_begun: int, n_steps: int) -> None:
        """Take note of where the slowest rank is.

        Args:
            now: Training goes on.
            n_begun: Micro-batches that it has begun, those included that are still being loaded.
            n_steps: Optimizer steps that every rank has finished.
        """
        if self._began is None or self._step_began is None:
            self._began = self._step_began = now
        if n_steps > self._n_steps:
            self._last_step_s = (now - self._step_began) / (n_steps - self._n_steps)
            self._n_steps, self._step_began = n_steps, now
        # The slowest rank seems to be another one, and further back, once a late one has begun its first.
        self._n_begun = max(self._n_begun, n_begun, n_steps * self._n_of_step + 1)
        if self._n_begun > 1 and self._second_began is None:
            self._second_began = now

    def wait(self, now: float) -> None:
        """Nothing that training does goes on: neither the time so far nor what was done in it tells how long a step takes."""
        if self._second_began is not None:
            self._second_began = self._step_began = now
            self._n_left_out = self._n_begun - 2

    @property
    def micro_batch(self) -> int:
        """Which one of the running step is being worked on, from 1; 0 before the first."""
        return min(max(self._n_begun - self._n_steps * self._n_of_step, 0), self._n_of_step)

    def running_s(self, now: float) -> float:
        """What the running step has taken so far, or the last one took, whichever is more."""
        return 0.0 if self._step_began is None else max(now - self._step_began, self._last_step_s)

    def too_long(self, now: float, *, excused_s: float = 0.0) -> float | None:
        """Seconds that a step takes at least, once they are known to be more than it may take; None until then.

        The first micro-batch does not count, unless it takes far longer than a whole step may.

        Args:
            now: Training goes on.
            excused_s: What it may take beside that: kernels are compiled in it.
        """
        if self._longest_s is None or self._began is None:
            return None
        if self._second_began is None:
            first_s = now - self._began - excused_s
            return first_s if first_s > _FIRST_TAKES * self._longest_s else None
        seen_s, n_seen = (
            now - self._second_began,
            self._n_begun - 1 - self._n_left_out,
        )  # the running one counts as if it were done
        at_least_s = seen_s * self._n_of_step / n_seen / _CERTAINTY
        return at_least_s if seen_s > _LEAST_SEEN * self._longest_s and at_least_s > self._longest_s else None
