"""Whether configs fit a memory limit: as predicted, against peaks that were measured and against trials under such a limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bo_tuner.config import TrainConfig
from bo_tuner.objectives import Objective, ignore_events
from bo_tuner.outcome import Outcome, TrialLimits

__all__ = ["EdgeTrial", "Verdicts", "run_at_edge", "verdicts_at"]

_STEPS = 3
"""From the second on the optimizer's state is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdicts:
    """What predictions say of one limit."""

    percentile: int
    """Of the measured peaks, where the limit is set."""
    limit_bytes: float
    n_over: int
    """Configs that were measured over it."""
    precision: float | None
    """Of configs predicted over it, the share that was measured so; None where none was predicted."""
    recall: float | None
    """Of configs measured over it, the share that was predicted so; None where none was measured."""


def verdicts_at(percentile: int, *, predicted_bytes: Sequence[float], measured_bytes: Sequence[float]) -> Verdicts:
    """Predicted over the limit against measured over it.

    Args:
        percentile: 0 to 100, of `measured_bytes`.
        predicted_bytes: Of each config.
        measured_bytes: In the same order.
    """
    limit = float(np.percentile(measured_bytes, percentile))
    predicted, measured = np.array(predicted_bytes) > limit, np.array(measured_bytes) > limit
    both = int(np.sum(predicted & measured))
    return Verdicts(
        percentile=percentile,
        limit_bytes=limit,
        n_over=int(measured.sum()),
        precision=both / int(predicted.sum()) if predicted.any() else None,
        recall=both / int(measured.sum()) if measured.any() else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeTrial:
    """One config under a limit that it is predicted to just fit, or to just exceed."""

    name: str
    limit_bytes: int
    predicted_bytes: float
    outcome: Outcome

    @property
    def is_as_predicted(self) -> bool:
        """It fitted, or did not, as predicted."""
        return (self.predicted_bytes > self.limit_bytes) == self.outcome.is_memory


def run_at_edge(
    objective: Objective,
    configs: Sequence[TrainConfig],
    predicted_bytes: NDArray[np.float64],
    *,
    limits: TrialLimits,
    n_trials: int,
) -> list[EdgeTrial]:
    """Run for a few steps those configs whose prediction is nearest to the memory limit, half of them from either side.

    Args:
        objective: Runs them.
        configs: To choose from.
        predicted_bytes: Of each.
        limits: Of memory above all.
        n_trials: How many are run.
    """
    limit_bytes = limits.memory_bytes
    distance = np.abs(np.log(predicted_bytes / limit_bytes))
    nearest = np.argsort(distance, kind="stable")
    sides = (nearest[(predicted_bytes > limit_bytes)[nearest] == is_over] for is_over in (False, True))
    limits = replace(limits, max_steps=_STEPS)
    return [
        EdgeTrial(
            name=configs[index].name,
            limit_bytes=limit_bytes,
            predicted_bytes=float(predicted_bytes[index]),
            outcome=objective(configs[index], limits=limits, on_event=ignore_events).outcome,
        )
        for side in sides
        for index in side[: n_trials // 2]
    ]
