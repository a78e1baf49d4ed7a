"""Samplers by name."""

from __future__ import annotations

from collections.abc import Callable

from bo_tuner.errors import ConfigError
from bo_tuner.models.choices import Problem
from bo_tuner.open_candidates import OpenCandidates
from bo_tuner.samplers.base import CandidateSampler
from bo_tuner.samplers.heuristics import ClimbSampler, DeepSpeedSampler, DoublingSampler
from bo_tuner.samplers.plain import GridSampler, RandomSampler
from bo_tuner.samplers.shadow import ShadowSampler
from bo_tuner.text import did_you_mean

__all__ = ["SAMPLERS", "asks_for_expectations", "make_sampler"]


def _bo(candidates: OpenCandidates, seed: int, problem: Problem | None) -> CandidateSampler:
    from bo_tuner.samplers.bayesian import BayesianSampler

    return BayesianSampler(candidates, seed=seed, problem=problem)


def _tpe(candidates: OpenCandidates, seed: int, problem: Problem | None) -> CandidateSampler:
    import optuna

    return ShadowSampler(candidates, seed=seed, make=lambda ask_seed: optuna.samplers.TPESampler(seed=ask_seed))


def _gp(candidates: OpenCandidates, seed: int, problem: Problem | None) -> CandidateSampler:
    from bo_tuner.samplers.gp import SingleThreadGPSampler

    return ShadowSampler(candidates, seed=seed, make=lambda ask_seed: SingleThreadGPSampler(seed=ask_seed))


SAMPLERS: dict[str, Callable[[OpenCandidates, int, Problem | None], CandidateSampler]] = {
    "bo": _bo,
    "tpe": _tpe,
    "gp": _gp,
    "random": lambda candidates, seed, _: RandomSampler(candidates, seed=seed),
    "grid": lambda candidates, seed, _: GridSampler(candidates, seed=seed),
    "climb": lambda candidates, seed, _: ClimbSampler(candidates, seed=seed),
    "doubling": lambda candidates, seed, _: DoublingSampler(candidates, seed=seed),
    "deepspeed": lambda candidates, seed, problem: DeepSpeedSampler(candidates, seed=seed, problem=problem),
}
"""Name -> factory(candidates, seed, problem)."""


_EXPECTING = ("bo", "deepspeed")


def asks_for_expectations(name: str) -> bool:
    """The sampler of that name makes use of a `Problem`, which costs some seconds to find out where trials are real."""
    return name in _EXPECTING


def check_sampler_name(name: str) -> None:
    """Refuse an unknown name.

    Raises:
        ConfigError: It lists the right ones.
    """
    if name not in SAMPLERS:
        raise ConfigError(f"--sampler must be one of {', '.join(SAMPLERS)}; got {name!r}{did_you_mean(name, SAMPLERS)}")


def make_sampler(
    name: str, candidates: OpenCandidates, *, seed: int, problem: Problem | None = None
) -> CandidateSampler:
    """The sampler called `name`.

    Args:
        name: One of `SAMPLERS`.
        candidates: What it chooses among.
        seed: Of its random choices.
        problem: What the models need to expect something of candidates; None where nothing can be expected.

    Raises:
        ConfigError: There is none.
    """
    check_sampler_name(name)
    return SAMPLERS[name](candidates, seed, problem)
