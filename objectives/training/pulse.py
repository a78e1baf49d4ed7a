"""Signs of life of ranks: counts that each rank raises in memory it shares with its supervisor.

A mark costs the rank well under a microsecond, wakes nobody and cannot block, so it does not slow the steps that are measured.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

__all__ = ["Heart", "Pulses"]

_COUNT = struct.Struct("=Q")
_MICRO_BATCHES_AT = _COUNT.size
"""In a slot, after the marks."""
_SLOT_BYTES = 64
"""A cache line, so that ranks do not slow each other."""

_T = TypeVar("_T")


class Heart:
    """The rank's side: `beat` at every mark of progress."""

    def __init__(self, file: Path, rank: int) -> None:
        with file.open("r+b") as opened:
            self._shared = mmap.mmap(opened.fileno(), 0)
        self._offset = rank * _SLOT_BYTES
        self._n_beats = 0
        self._n_micro_batches = 0

    def beat(self, *_: object) -> None:
        """A mark: whatever was going on goes on well. Takes any arguments, so as to serve as a module's hook."""
        self._n_beats += 1
        _COUNT.pack_into(self._shared, self._offset, self._n_beats)

    def micro_batch(self) -> None:
        """Another micro-batch of training begins, with the loading of it."""
        self._n_micro_batches += 1
        _COUNT.pack_into(self._shared, self._offset + _MICRO_BATCHES_AT, self._n_micro_batches)

    def beating(self, items: Iterator[_T]) -> Iterator[_T]:
        """`items`, with a mark before and after each is fetched."""
        self.beat()
        for item in items:
            self.beat()
            yield item
            self.beat()


class Pulses:
    """The supervisor's side: how long each rank has been silent, as far as looks in between can tell."""

    def __init__(self, *, n_ranks: int, now: float) -> None:
        """Make the shared memory; it goes when the last process that holds it has ended.

        Args:
            n_ranks: World size.
            now: Of `time.monotonic`, like all times here.
        """
        # Without a file behind it: writing to mapped pages of a disk's file waits for the disk now and then.
        self._fd = os.memfd_create("bo_tuner-pulse")
        os.ftruncate(self._fd, n_ranks * _SLOT_BYTES)
        self._shared = mmap.mmap(self._fd, 0)
        self._counts = [0] * n_ranks
        self._heard = [now] * n_ranks
        self._excused_at = now
        self.longest_s = 0.0
        """The longest silence that ended, since `forget`."""

    @property
    def file(self) -> Path:
        """Where a `Heart` of the same user finds it."""
        return Path(f"/proc/{os.getpid()}/fd/{self._fd}")

    def look(self, now: float) -> None:
        """Read all counts."""
        for rank in range(len(self._counts)):
            (count,) = _COUNT.unpack_from(self._shared, rank * _SLOT_BYTES)
            if count != self._counts[rank]:
                self.longest_s = max(self.longest_s, self.silent_s(rank, now))
                self._counts[rank] = count
                self._heard[rank] = now

    def forget(self, now: float) -> None:
        """Begin anew: what comes has nothing to do with what was."""
        self.longest_s = 0.0
        self._heard = [now] * len(self._heard)
        self.excuse(now)

    def excuse(self, now: float) -> None:
        """No rank has been silent up to now: one of them was at work, and the others may wait for it."""
        self._excused_at = now

    def silent_s(self, rank: int, now: float) -> float:
        """Seconds without an excuse since the last look that found a new mark of `rank`."""
        return now - max(self._heard[rank], self._excused_at)

    def unmarked_s(self, rank: int, now: float) -> float:
        """Seconds since the last look that found a new mark of `rank`, whatever excuses it."""
        return now - self._heard[rank]

    @property
    def n_micro_batches(self) -> int:
        """That the slowest rank has begun, of those that load any: of a pipeline its first and last stages; 0 before the first."""
        counts = [
            _COUNT.unpack_from(self._shared, rank * _SLOT_BYTES + _MICRO_BATCHES_AT)[0]
            for rank in range(len(self._counts))
        ]
        return min(filter(None, counts), default=0)

    def close(self) -> None:
        """Let go of the memory."""
        self._shared.close()
        os.close(self._fd)
