"""`misfit`: why nothing can fit a machine, where that is sure enough not to try."""

from __future__ import annotations

from collections.abc import Sequence

from bo_tuner.config import TrainConfig
from bo_tuner.models.choices import Choices, Problem
from bo_tuner.models.memory import memory_of
from bo_tuner.text import gib

__all__ = ["misfit"]

_CERTAINTY = 2.0
"""Times the memory there is. On published tables the memory model is hardly ever off by 1.3 (`docs/validation.md`), but a wrong refusal
costs a user more than a trial that fails."""


def misfit(problem: Problem, configs: Sequence[TrainConfig], *, device_bytes: int) -> str | None:
    """One line on the config that needs least, where it needs far more than a device has; None where something may fit.

    A limit that is lower than the device is no reason: trying it harms nobody.

    Args:
        problem: What is trained, and on what.
        configs: Those that may be run.
        device_bytes: Memory of a rank's device.
    """
    known = [config for config in configs if problem.knows(config)]
    if len(known) < len(configs) or not known:
        return None
    needed = memory_of(problem, Choices.of(known, problem.n_ranks)).total
    least = int(needed.argmin())
    if needed[least] <= _CERTAINTY * device_bytes:
        return None
    return (
        f"a config must fit in the {gib(device_bytes)} that a rank has, and {known[least].name}, which needs least, should need "
        f"{gib(int(needed[least]))}"
    )
