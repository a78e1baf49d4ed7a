"""Cost models that are wrong on purpose, to see what that costs a search."""

from __future__ import annotations

import zlib
from dataclasses import replace

import numpy as np

from bo_tuner.models.choices import Problem
from bo_tuner.open_candidates import OpenCandidates
from bo_tuner.samplers.bayesian import BayesianSampler

__all__ = ["Misled", "mistaken"]

_USUAL = 0.35
_LARGE = 0.5
"""Standard deviations of logarithms: a factor of 1.42 or 1.65, up or down."""
_PEAK = 0.2
"""Of arithmetic, which data sheets tell best."""


def mistaken(problem: Problem, name: str, seed: int) -> Problem:
    """The same with every constant of hardware and framework off by a factor of its own.

    Args:
        problem: As it is known.
        name: Of the group; each gets other factors.
        seed: Of the factors.
    """
    chance = np.random.default_rng([zlib.crc32(name.encode()), seed])

    def off(sd: float) -> float:
        return float(np.exp(chance.normal(0.0, sd)))

    hardware, software, constants = problem.hardware, problem.software, problem.constants
    matmul = replace(
        hardware.matmul,
        peak_flops_per_s=hardware.matmul.peak_flops_per_s * off(_PEAK),
        half_tokens=hardware.matmul.half_tokens * off(_LARGE),
        half_width=hardware.matmul.half_width * off(_LARGE),
    )
    inside, between = (
        replace(link, bytes_per_s=link.bytes_per_s * off(_LARGE), latency_s=link.latency_s * off(_LARGE))
        for link in (hardware.inside, hardware.between)
    )
    return replace(
        problem,
        hardware=replace(
            hardware,
            matmul=matmul,
            inside=inside,
            between=between,
            memory_bytes_per_s=hardware.memory_bytes_per_s * off(_USUAL),
            attention_flops_per_s=hardware.attention_flops_per_s * off(_USUAL),
            operation_s=hardware.operation_s * off(_LARGE),
        ),
        software=replace(
            software,
            exchange_s=software.exchange_s * off(_LARGE),
            host_factor=software.host_factor * off(_LARGE),
            step_s=software.step_s * off(_LARGE),
        ),
        constants=replace(
            constants,
            hidden=min(constants.hidden * off(_USUAL), 1.0),
            node_toll=constants.node_toll * off(_LARGE),
            rank_toll_s=constants.rank_toll_s * off(_LARGE),
        ),
    )


class Misled(BayesianSampler):
    """Told of every config what is expected of another one's time: the cost model is of no use at all. Memory stays as it is expected."""

    def __init__(self, candidates: OpenCandidates, *, seed: int, problem: Problem | None) -> None:
        super().__init__(candidates, seed=seed, problem=problem)
        order = np.random.default_rng(seed).permutation(len(candidates.all))
        everything = self._map.everything
        swapped = everything.at(order)
        self._map.everything = replace(
            everything, log_rate=swapped.log_rate, shares=swapped.shares, step_s=swapped.step_s
        )
