"""`Layout`: the candidates that differ in micro-batch and accumulation alone; `families` of layouts that differ in their ZeRO stage."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from bo_tuner.config import TrainConfig
from bo_tuner.space import default_config, with_batch

__all__ = ["Layout", "families", "plainness"]


@dataclass(frozen=True, slots=True)
class Layout:
    """Never empty."""

    configs: dict[int, dict[int, TrainConfig]]
    """By micro-batch, then by accumulation."""

    @property
    def sizes(self) -> list[int]:
        """Micro-batches, the smallest first."""
        return sorted(self.configs)

    @property
    def example(self) -> TrainConfig:
        """One of its configs, with the smallest micro-batch."""
        return next(iter(self.configs[min(self.configs)].values()))

    def size_near(self, wanted: float) -> int:
        """The micro-batch nearest to it; the smaller of two."""
        return min(self.configs, key=lambda size: (abs(size - wanted), size))

    def at(self, size: float, accum: int) -> TrainConfig:
        """The config with the nearest micro-batch, and of those the one with the nearest accumulation, by ratio."""
        found = self.configs[self.size_near(size)]
        return found[min(found, key=lambda own: (abs(math.log(own / accum)), own))]

    def largest_batch(self) -> int:
        """Most samples of a step on one replica."""
        return max(size * accum for size, accums in self.configs.items() for accum in accums)


def plainness(config: TrainConfig) -> tuple[Any, ...]:
    """The lower, the nearer to a training without any of it: whole on every rank, no switch on, nothing offloaded, recomputed or sharded.

    Takes the place of the candidates' own order, which may tell too much: some tables list their fastest run first.
    """
    return (
        config.pipeline_depth * config.tensor_parallel,
        config.pipeline_depth,
        str(config.extra),
        config.offload,
        config.recompute,
        config.pipeline_schedule,
        config.zero_stage,
        config.micro_batch_size,
        config.grad_accum_steps,
    )


def families(candidates: Sequence[TrainConfig]) -> list[list[Layout]]:
    """Layouts by ZeRO stage, the lowest first; one list for all that agree in everything else, that of the default config first, then
    the plainest."""
    ordered = sorted(candidates, key=plainness)
    found: dict[TrainConfig, dict[int, dict[int, dict[int, TrainConfig]]]] = {_family(default_config(ordered)): {}}
    for config in ordered:
        stages = found.setdefault(_family(config), {})
        sizes = stages.setdefault(config.zero_stage, defaultdict(dict))
        sizes[config.micro_batch_size][config.grad_accum_steps] = config
    return [[Layout(dict(stages[stage])) for stage in sorted(stages)] for stages in found.values()]


def _family(config: TrainConfig) -> TrainConfig:
    return with_batch(replace(config, zero_stage=0), 1, 1)
