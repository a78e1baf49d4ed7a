"""`outlook`: one line on what the models expect most of."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from bo_tuner.config import TrainConfig
from bo_tuner.models.choices import Choices, Problem
from bo_tuner.models.cost import times_of
from bo_tuner.models.gentlest import AS_EXPECTED, gentlest
from bo_tuner.models.memory import memory_of
from bo_tuner.text import count, gib, rate

__all__ = ["outlook"]


def outlook(
    problem: Problem, configs: Sequence[TrainConfig], *, limit_bytes: int, longest_step_s: float = math.inf
) -> str:
    """Which config should be the fastest that fits; of those that are about as fast, the one with the smallest step.

    Args:
        problem: What is trained, and on what.
        configs: Those that may be run.
        limit_bytes: Memory limit per rank.
        longest_step_s: Configs with longer optimizer steps are left out, as long as there are others.
    """
    known = [config for config in configs if problem.knows(config)]
    if not known:
        return f"no expectation: every config has more stages than the {count(problem.max_depth, 'layer')} of the model"
    choices = Choices.of(known, problem.n_ranks)
    step_s, needed = times_of(problem, choices).total, memory_of(problem, choices).total
    fits = needed <= limit_bytes
    if not fits.any():
        return f"the cost model expects that nothing fits: {gib(int(needed.min()))} a rank is the least"
    is_quick = step_s <= max(longest_step_s, float(step_s[fits].min()))
    rates = choices.global_batch / step_s
    best = gentlest(np.where(fits & is_quick, np.log(rates), -math.inf), choices.global_batch, alike=AS_EXPECTED)
    expected = rate(float(rates[best])).removesuffix("/s")
    return (
        f"the cost model expects most of {known[best].name}: {expected} samples/s, "
        f"{gib(int(needed[best]))} of memory a rank"
    )
