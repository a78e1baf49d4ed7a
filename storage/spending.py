"""`DrivingClock`: how long this process has driven a study, but for the time in which it was stopped."""

from __future__ import annotations

import time

from bo_tuner.budget import Spent
from bo_tuner.storage.pauses import Pauses

__all__ = ["DrivingClock"]


class DrivingClock:
    """Runs while this process drives a study, and goes on from what earlier ones have spent."""

    def __init__(self, before: Spent, *, n_ranks: int, since: float | None = None) -> None:
        """Start it.

        Args:
            before: What was spent so far.
            n_ranks: Devices that are held meanwhile.
            since: Time counts from here (of `time.monotonic`); None for now.
        """
        self._before = before
        self._n_ranks = n_ranks
        self._pauses = Pauses()
        self._pauses.start()
        self._since = time.monotonic() if since is None else since

    def times(self) -> dict[str, float]:
        """The times of `Spent` up to now."""
        seconds = time.monotonic() - self._since - self._pauses.seconds
        return {
            "seconds": self._before.seconds + seconds,
            "device_seconds": self._before.device_seconds + seconds * self._n_ranks,
        }

    def stop(self) -> None:
        """It is not asked any more."""
        self._pauses.stop()
