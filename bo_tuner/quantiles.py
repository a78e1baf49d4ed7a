"""Quantiles of Student's t, without a library that would have to be imported beside the ranks."""

from __future__ import annotations

__all__ = ["student"]

_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""97.5 % quantile with 1 to 10 degrees of freedom (Abramowitz and Stegun, table 26.10)."""
_NORMAL = 1.96


def student(n_free: int) -> float:
    """97.5 % quantile of Student's t; past the table its expansion to the third order (Abramowitz and Stegun, 26.7.5)."""
    if n_free <= len(_STUDENT):
        return _STUDENT[n_free - 1]
    z, v = _NORMAL, n_free
    return z + (z**3 + z) / (4 * v) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
