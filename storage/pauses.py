"""`Pauses`: how long this process was stopped, which is nobody's spending."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["Pauses"]

_BEAT_S = 1.0
_LEAST_S = 10.0
"""Shorter gaps between two beats may be a machine under load."""


class Pauses:
    """Beats in a thread of its own: a long gap between two beats is time in which this process could not run.

    SIGSTOP, a scheduler that suspends jobs, and a debugger make such gaps. A machine that sleeps makes none, since `time.monotonic` stands still
    meanwhile (clock_gettime(2), CLOCK_MONOTONIC).
    """

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, beat_s: float = _BEAT_S, least_s: float = _LEAST_S
    ) -> None:
        """Nothing beats before `start`.

        Args:
            clock: Seconds.
            beat_s: Between two beats.
            least_s: Gaps that are longer count.
        """
        self._clock = clock
        self._beat_s = beat_s
        self._least_s = least_s
        self._lock = threading.Lock()
        self._seconds = 0.0
        self._last = clock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="bo_tuner-pauses", daemon=True)

    def start(self) -> None:
        """Count from now on."""
        self._last = self._clock()
        self._thread.start()

    def stop(self) -> None:
        """Count no more."""
        self._end.set()
        self._thread.join()

    @property
    def seconds(self) -> float:
        """Of all pauses so far, up to now."""
        with self._lock:
            now = self._clock()
            gap_s, self._last = now - self._last, now
            if gap_s > self._least_s:
                self._seconds += gap_s - self._beat_s
            return self._seconds

    def _beat(self) -> None:
        while not self._end.wait(self._beat_s):
            _ = self.seconds
