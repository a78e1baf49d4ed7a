"""`Stages`: how a model's layers are dealt to the stages of a pipeline, alike stages taken together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from bo_tuner.models.choices import Choices, Floats, Problem
from bo_tuner.models.software import Software
from bo_tuner.partition import stage_bounds
from bo_tuner.profile import LayerProfile, ModelProfile

__all__ = ["Stages", "by_depth", "stages_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """The stages of one depth: `n_layers[s, k]` layers of kind k in the stages of sort s."""

    kinds: tuple[LayerProfile, ...]
    """Layers that differ."""
    n_layers: Floats
    """Shape (sorts, kinds)."""
    sort_of: tuple[int, ...]
    """Of every stage in order."""
    n_stages: Floats
    """Stages of each sort; shape (sorts,)."""
    earliest: Floats
    """Index of the first stage of each sort, which keeps most micro-batches; shape (sorts,)."""
    n_shared: Floats
    """Parameters that layers of one stage share with each other, of each sort; shape (sorts,)."""
    n_tied: int
    """Parameters that two stages hold both."""

    def each(self, attribute: str, *, recomputed: bool = False) -> Floats:
        """An attribute of every kind of layer, under recomputation where it differs there; shape (kinds,)."""
        sources = [kind.recomputed or kind if recomputed else kind for kind in self.kinds]
        return np.array([getattr(source, attribute) for source in sources], dtype=np.float64)

    @property
    def repeated(self) -> Floats:
        """Share of the forward pass that is computed again under recomputation, of every kind of layer; shape (kinds,)."""
        return np.array([kind.recomputed.share if kind.recomputed else 0.0 for kind in self.kinds])

    def total(self, attribute: str) -> Floats:
        """Its sum over the layers of each sort of stage; shape (sorts,)."""
        return self.n_layers @ self.each(attribute)


def by_depth(
    parts: Iterable[str],
    expect: Callable[[Problem, Choices, Stages], dict[str, Floats]],
    problem: Problem,
    choices: Choices,
) -> dict[str, Floats]:
    """Put together what `expect` says of the configs of each depth, part by part.

    Args:
        parts: Names of what it says.
        expect: Told of configs of one depth, and its stages.
        problem: What is trained, and on what.
        choices: Depths that the model has layers for.
    """
    found = {part: np.zeros(len(choices)) for part in parts}
    for depth in np.unique(choices.depth):
        chosen = choices.depth == depth
        stages = stages_of(problem.profile, int(depth), problem.software, problem.layer_costs)
        for part, values in expect(problem, choices.at(chosen), stages).items():
            found[part][chosen] = values
    return found


@lru_cache(maxsize=512)
def stages_of(profile: ModelProfile, depth: int, software: Software, costs: tuple[float, ...] = ()) -> Stages:
    """Deal the layers of `profile` to `depth` stages as `software` does.

    Args:
        profile: At least `depth` layers, unless the rule leaves stages empty.
        depth: Stages.
        software: Says by what rule.
        costs: Of each layer, measured, for the rule `cost`; empty takes the arithmetic.

    Raises:
        ConfigError: There are fewer layers than stages.
    """
    kinds = tuple(dict.fromkeys(profile.layers))
    bounds = _bounds(profile, depth, software, costs)
    dealt = [Counter(kinds.index(layer) for layer in profile.layers[start:end]) for start, end in pairwise(bounds)]
    shared = [
        sum(tie.n_parameters for tie in profile.ties if start <= tie.first and tie.second < end)
        for start, end in pairwise(bounds)
    ]
    n_tied = sum(tie.n_parameters for tie in profile.ties) - sum(shared)
    rows = [(*(counts[kind] for kind in range(len(kinds))), extra) for counts, extra in zip(dealt, shared, strict=True)]
    sorts = list(dict.fromkeys(rows))
    return Stages(
        kinds=kinds,
        n_layers=np.array([sort[:-1] for sort in sorts], dtype=np.float64),
        sort_of=tuple(sorts.index(row) for row in rows),
        n_stages=np.array([rows.count(sort) for sort in sorts], dtype=np.float64),
        earliest=np.array([rows.index(sort) for sort in sorts], dtype=np.float64),
        n_shared=np.array([sort[-1] for sort in sorts], dtype=np.float64),
        n_tied=n_tied,
    )


def _bounds(profile: ModelProfile, depth: int, software: Software, costs: tuple[float, ...]) -> Sequence[int]:
    layers = profile.layers
    arithmetic = [float(layer.matmul_flops + layer.attention_flops) for layer in layers]
    if depth == 1:
        return [0, len(layers)]
    if software.partition == "flops":
        return _by_flops(arithmetic, depth)
    if software.partition == "cost" or depth > profile.n_blocks:
        return stage_bounds(costs or arithmetic, depth)
    return _by_blocks(layers, depth)


def _by_flops(costs: Sequence[float], depth: int) -> list[int]:
    """Layer after layer to the same stage, until the sum reaches the share of the stages so far; the last stages may stay empty."""
    total, sum_so_far, bounds = sum(costs), 0.0, [0]
    for index, cost in enumerate(costs[:-1]):
        sum_so_far += cost
        if sum_so_far >= total * len(bounds) / depth * (1 - 1e-9) and len(bounds) < depth:
            bounds.append(index + 1)
    return [*bounds, *[len(costs)] * (depth + 1 - len(bounds))]


def _by_blocks(layers: Sequence[LayerProfile], depth: int) -> list[int]:
    """As many blocks for every stage, earlier ones one more where they do not divide; what stands around them goes with the ends."""
    blocks = [index for index, layer in enumerate(layers) if layer.is_block]
    each, more = divmod(len(blocks), depth)
    bounds, taken = [0], 0
    for stage in range(depth - 1):
        taken += each + (stage < more)
        bounds.append(blocks[taken])
    return [*bounds, len(layers)]
