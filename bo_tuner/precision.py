"""How well step times are known: when they have settled."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import combinations

__all__ = ["drift", "settled_from"]

FEWEST = 3
"""Steps that an interval, or a judgement of drift, needs."""
_NORMAL = 1.96
_KENDALL_FROM = 5
"""Of four points, one order in twelve is monotone by chance: whether fewer than five drift is told by the size alone."""
_MOST_POINTS = 32
"""All pairs of them are looked at, beside ranks whose speed is measured: the cost of a judgement must not grow with the trial."""
_MOST_TRIED = 16
"""Ends of the warm-up that are tried at a time, since each costs all pairs of the rest."""


def drift(times: Sequence[float]) -> float:
    """How far `times` move from first to last along a straight line, relative to their median.

    The slope is the median of those of all pairs (Theil 1950, Sen 1968), which three stalls in ten cannot bend.
    """
    pairs = combinations(enumerate(times), 2)
    slope = statistics.median((late - early) / (j - i) for (i, early), (j, late) in pairs)
    return slope * (len(times) - 1) / statistics.median(times)


def _thinned(times: Sequence[float]) -> Sequence[float]:
    """At most `_MOST_POINTS` medians of neighbouring times, where there are more than that."""
    size = math.ceil(len(times) / _MOST_POINTS)
    return times if size == 1 else [statistics.median(times[at : at + size]) for at in range(0, len(times), size)]


def settled_from(times: Sequence[float], *, tolerance: float, at_least: int = 1) -> int | None:
    """Number of steps to leave out, so that the rest no longer drifts: the end of the warm-up.

    The first step never counts. The rest has settled when its first step is not the slowest by more than `tolerance`, and its
    drift is within `tolerance` too, or cannot be told from noise by the order of the times (Kendall's S, two-sided at 5 %).

    Args:
        times: Seconds of each step.
        tolerance: Drift over the steps kept that does not matter, relative to their median.
        at_least: Steps known already to belong to the warm-up.

    Returns:
        The smallest such number, of many steps the smallest of some; None while there is none that leaves three steps.
    """
    tried = range(max(at_least, 1), len(times) - FEWEST + 1, max(len(times) // _MOST_TRIED, 1))
    for n_left_out in tried:
        kept = times[n_left_out:]
        slowest = max(max(kept[1:]), statistics.median(kept) * (1 + tolerance))
        if kept[0] > slowest:
            continue
        points = _thinned(kept)
        if abs(drift(points)) <= tolerance or _may_be_noise(points):
            return n_left_out
    return None


def _may_be_noise(times: Sequence[float]) -> bool:
    """Kendall's S is as near to 0 as in 95 % of random orders (normal approximation, continuity-corrected)."""
    n = len(times)
    if n < _KENDALL_FROM:
        return False
    score = sum((late > early) - (late < early) for early, late in combinations(times, 2))
    return abs(score) - 1 <= _NORMAL * math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
