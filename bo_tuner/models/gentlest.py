"""`gentlest`: of configs that are about equally good, the one whose optimizer step holds the fewest samples."""

from __future__ import annotations

import math

import numpy as np

from bo_tuner.models.choices import Floats
from bo_tuner.precision import PRIOR

__all__ = ["ALIKE", "gentlest"]

ALIKE = math.log(1 + PRIOR.half_width)
"""Of logarithms of rates: what launches of one config usually differ by; the cost model is off by more."""
_EQUAL = 1e-9
"""The first of equals is taken, which has the defaults of dimensions that nothing is known of."""


def gentlest(log_worth: Floats, global_batch: Floats) -> int:
    """The place of the config to take.

    Of those that no launch could tell from the best, the one with the smallest step: a larger batch changes how a model learns and takes
    longer to measure, and its gain has to pay for both. Of equally large steps the one that is worth most.

    Args:
        log_worth: Logarithm of what each config is worth; not empty.
        global_batch: Samples of an optimizer step of each.
    """
    near = np.flatnonzero(log_worth >= log_worth.max() - ALIKE)
    smallest = near[global_batch[near] == global_batch[near].min()]
    return int(smallest[log_worth[smallest] >= log_worth[smallest].max() - _EQUAL][0])
