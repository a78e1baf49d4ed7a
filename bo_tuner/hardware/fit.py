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

    The peak is the fastest reading; where the curve goes on to rise beyond the largest product, its share exceeds 1.

    Args:
        readings: Of several token counts and widths.
    """
    peak = max(reading.flops_per_s for reading in readings)
    tokens = widths = (math.log(_SMALLEST), math.log(_LARGEST))
    best = (math.inf, 0.0, 0.0)
    for _ in range(_N_ROUNDS):
        tried = ((_error(readings, n, k), n, k) for n in _between(*tokens) for k in _between(*widths))
        best = min(best, min(tried))
        tokens, widths = _nearer(best[1], *tokens), _nearer(best[2], *widths)
    half_tokens, half_width = math.exp(best[1]), math.exp(best[2])
    return MatmulRate(
        peak_flops_per_s=peak,
        share=math.exp(_offset(readings, half_tokens, half_width)) / peak,
        half_tokens=half_tokens,
        half_width=half_width,
    )


def _between(low: float, high: float) -> list[float]:
    return [low + (high - low) * step / (_N_TRIED - 1) for step in range(_N_TRIED)]


def _nearer(middle: float, low: float, high: float) -> tuple[float, float]:
    """A quarter of the interval, about `middle`."""
    return middle - (high - low) / 8, middle + (high - low) / 8


def _residuals(readings: Sequence[ProductReading], half_tokens: float, half_width: float) -> list[float]:
    """Logarithms of what the measured rates are of a curve with a limit of 1."""
    return [
        math.log(reading.flops_per_s)
        - math.log(reading.n_tokens / (reading.n_tokens + half_tokens))
        - math.log(reading.width / (reading.width + half_width))
        for reading in readings
    ]


def _offset(readings: Sequence[ProductReading], half_tokens: float, half_width: float) -> float:
    return statistics.median(_residuals(readings, half_tokens, half_width))


def _error(readings: Sequence[ProductReading], log_half_tokens: float, log_half_width: float) -> float:
    residuals = _residuals(readings, math.exp(log_half_tokens), math.exp(log_half_width))
    middle = statistics.median(residuals)
    return sum(abs(residual - middle) for residual in residuals)
