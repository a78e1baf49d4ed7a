"""`fit_matmul`: the curve of `MatmulRate` through measured products."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bo_tuner.hardware.rates import MatmulRate

__all__ = ["ProductReading", "fit_matmul"]

_SMALLEST, _LARGEST = 1.0, 1e5
"""Tokens, or features of width, between which half of the rate may be reached."""
_LARGEST_SHARE = 1.25
"""Of the fastest reading, that larger products may be promised: what lies far beyond is anybody's guess."""
_N_TRIED = 15
"""Values a round, of each of the two."""
_N_ROUNDS = 6
"""Each looks at the neighbours of the best more closely."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductReading:
    """How long the products of one layer's forward and backward pass took: x W, dy W, and dy x."""

    n_tokens: int
    """Rows of x and dy."""
    width: int
    """Of the square matrix W."""
    seconds: float

    @property
    def flops(self) -> int:
        """A multiplication and an addition each one operation."""
        return 6 * self.n_tokens * self.width**2

    @property
    def flops_per_s(self) -> float:
        """The rate at which they ran."""
        return self.flops / self.seconds


def fit_matmul(readings: Sequence[ProductReading]) -> MatmulRate:
    """Least sum of absolute errors in the logarithm of the rate: small products count as much as large ones, and one that
    was disturbed counts for little.

    The peak is the fastest reading; where the curve goes on to rise beyond the largest product, its share exceeds 1, a little.

    Args:
        readings: Of several token counts and widths.
    """
    peak = max(reading.flops_per_s for reading in readings)
    tokens = widths = (math.log(_SMALLEST), math.log(_LARGEST))
    best = (math.inf, 0.0, 0.0, 0.0)
    for _ in range(_N_ROUNDS):
        tried = ((*_error(readings, peak, n, k), n, k) for n in _between(*tokens) for k in _between(*widths))
        best = min(best, min(tried))
        tokens, widths = _nearer(best[2], *tokens), _nearer(best[3], *widths)
    _, share, half_tokens, half_width = best
    return MatmulRate(
        peak_flops_per_s=peak, share=share, half_tokens=math.exp(half_tokens), half_width=math.exp(half_width)
    )


def _between(low: float, high: float) -> list[float]:
    return [low + (high - low) * step / (_N_TRIED - 1) for step in range(_N_TRIED)]


def _nearer(middle: float, low: float, high: float) -> tuple[float, float]:
    """A quarter of the interval, about `middle`."""
    return middle - (high - low) / 8, middle + (high - low) / 8


def _error(
    readings: Sequence[ProductReading], peak: float, log_half_tokens: float, log_half_width: float
) -> tuple[float, float]:
    """What is left of the readings' logarithms by the best share for these half-values, and that share."""
    unit = MatmulRate(
        peak_flops_per_s=peak, share=1.0, half_tokens=math.exp(log_half_tokens), half_width=math.exp(log_half_width)
    )
    logs = [
        math.log(reading.flops_per_s / unit.flops_per_s(n_tokens=reading.n_tokens, width=reading.width))
        for reading in readings
    ]
    log_share = min(statistics.median(logs), math.log(_LARGEST_SHARE))
    return sum(abs(log - log_share) for log in logs), math.exp(log_share)
