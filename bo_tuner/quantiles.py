"""Quantiles of a mixture of normal distributions, without a library that would have to be imported beside the ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["half_width"]

_FAR = 4.0
"""Standard deviations, of the widest part, beyond which nothing is looked for."""
_HALVINGS = 32


def half_width(parts: Sequence[tuple[float, float, float]], *, outside: float = 0.05) -> float:
    """How far from zero, on either side, a mixture reaches, but for the share `outside`.

    Args:
        parts: Weight, mean and standard deviation of each normal distribution; weights need not add up to one.
        outside: Of both sides together; much more than lies beyond four standard deviations of a normal distribution.
    """
    allowed = 2 * outside * math.fsum(weight for weight, _, _ in parts)
    scaled = [(weight, mean, math.sqrt(2) * sd) for weight, mean, sd in parts]
    low, high = 0.0, max(abs(mean) + _FAR * sd for _, mean, sd in parts)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        beyond = math.fsum(
            weight * (math.erfc((middle - mean) / sd) + math.erfc((middle + mean) / sd)) for weight, mean, sd in scaled
        )
        low, high = (middle, high) if beyond > allowed else (low, middle)
    return high
