"""`Estimate`: what a dimension of the user's own is told when it says what it changes in a step's time or memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bo_tuner.errors import ConfigError
from bo_tuner.models.choices import Choices, Floats, Problem

__all__ = ["Estimate", "with_terms"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Many configs at once, a row each. Under memory all arrays have a second axis, one element for every sort of pipeline stage or one for all."""

    problem: Problem
    """Model, devices and framework."""
    choices: Choices
    """The configs; their arrays have one axis."""
    values: NDArray[Any]
    """Of the dimension."""
    parts: dict[str, Floats]
    """What is expected without it: seconds of a step by `TIME_PARTS`, or bytes of a rank by `MEMORY_PARTS`."""
    n_parameters: Floats
    """Trained ones that a rank updates."""


def with_terms(
    kind: Literal["time", "memory"],
    problem: Problem,
    choices: Choices,
    parts: dict[str, Floats],
    *,
    n_parameters: Floats,
) -> dict[str, Floats]:
    """`parts` as the dimensions of `problem` change them, one after the other.

    Args:
        kind: Which term of a dimension is asked.
        problem: What is trained, and on what.
        choices: Of one depth.
        parts: By name.
        n_parameters: See `Estimate`.

    Raises:
        ConfigError: A term names a part that there is not.
    """
    for dimension in problem.dimensions:
        term = getattr(dimension, kind)
        if term is None or dimension.name not in choices.extra:
            continue
        values = choices.extra[dimension.name]
        told = Estimate(
            problem=problem,
            choices=choices,
            values=values if kind == "time" else values[:, None],
            parts=dict(parts),
            n_parameters=n_parameters,
        )
        changed = term(told)
        if not changed.keys() <= parts.keys():
            raise ConfigError(
                f"dimension {dimension.name} must change parts of {kind}, some of {', '.join(parts)}; got {', '.join(changed)}"
            )
        parts = parts | {name: np.asarray(value, dtype=np.float64) for name, value in changed.items()}
    return parts
