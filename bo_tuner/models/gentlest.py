"""`gentlest`: of configs that are about equally good, the one whose optimizer step holds the fewest samples."""

from __future__ import annotations

import math

import numpy as np

from bo_tuner.models.choices import Floats

__all__ = ["AS_EXPECTED", "AS_MEASURED", "gentlest"]

AS_MEASURED = math.log(1.03)
"""Of logarithms of rates: about what launches of one config differ by on a quiet machine, so that no trial can tell such configs apart."""
AS_EXPECTED = math.log(1.1)
"""By which the expectations of two configs must differ to count, before anything was measured: about what the cost model is off by."""
_EQUAL = 1e-9
"""The first of equals is taken, which has the defaults of dimensions that nothing is known of."""


def gentlest(log_worth: Floats, global_batch: Floats, *, alike: float = AS_MEASURED) -> int:
    """The place of the config to take.

    Of those that cannot be told from the best, the one with the smallest step: a larger batch changes how a model learns and takes
    longer to measure, and its gain has to pay for both. Of equally large steps the one that is worth most.

    Args:
        log_worth: Logarithm of what each config is worth; not empty.
        global_batch: Samples of an optimizer step of each.
        alike: What is worth so much less than the best cannot be told from it.
    """
    near = np.flatnonzero(log_worth >= log_worth.max() - alike)
    smallest = near[global_batch[near] == global_batch[near].min()]
    return int(smallest[log_worth[smallest] >= log_worth[smallest].max() - _EQUAL][0])
