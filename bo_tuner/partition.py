"""Cutting a chain of layers into pipeline stages of even cost."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from bo_tuner.errors import ConfigError

__all__ = ["stage_bounds"]


def stage_bounds(costs: Sequence[float], n_stages: int) -> list[int]:
    """Where to cut so that the most expensive stage costs least: stage s holds layers bounds[s] to bounds[s + 1] - 1.

    Exact, by dynamic programming over prefixes (the linear partition problem) in n_layers^2 x n_stages steps. Of cuts that are equally good,
    the one that leaves most to the last stage, and likewise among the stages before it: in a 1F1B pipeline earlier ones keep
    more micro-batches in flight.

    Args:
        costs: Of each layer in any unit, none negative.
        n_stages: How many stages; each gets at least one layer.

    Raises:
        ConfigError: There are fewer layers than stages.
    """
    n_layers = len(costs)
    if not 1 <= n_stages <= n_layers:
        raise ConfigError(f"a pipeline needs from 1 to as many stages as layers, {n_layers}; got {n_stages}")
    total = [0.0, *accumulate(costs)]
    # worst[end]: cost of the most expensive stage when the first `end` layers make the stages so far.
    worst = total[:]
    cuts: list[list[int]] = []
    for stage in range(1, n_stages):
        found: list[tuple[float, int]] = [(float("inf"), 0)] * (n_layers + 1)
        for end in range(stage + 1, n_layers + 1):
            found[end] = min((max(worst[cut], total[end] - total[cut]), cut) for cut in range(stage, end))
        worst = [cost for cost, _ in found]
        cuts.append([cut for _, cut in found])
    bounds = [n_layers]
    for cut_of in reversed(cuts):
        bounds.append(cut_of[bounds[-1]])
    return [0, *reversed(bounds)]
