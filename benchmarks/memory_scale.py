"""Studies of simulated clusters where configs need so and so many times the memory that is expected of them: what stops too early, and what fails.

    python -m benchmarks.memory_scale [--factors 0.2,0.33,0.6,1,1.6,3,5] [--seeds 10] [--problems chosen|reported] [--part all] [--json] [--jobs 2]

Speed is simulated as `tune --simulate` does it; memory is what the model expects times the factor, with 5 % more or less from layout to layout.
A trial that runs out of memory tells its peak, not how much was missing. A study ends as a real one does: once the chance of a gain of over
1 % is under 5 %, or after 30 trials. What it left is the fastest config that would fit and was not tried, over the fastest that ran.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import get_args

import numpy as np

from bo_tuner.cluster import Cluster
from bo_tuner.config import TrainConfig, ZeroStage
from bo_tuner.hardware import hardware_of
from bo_tuner.models.choices import Choices, Floats, Problem
from bo_tuner.models.cost import times_of
from bo_tuner.models.memory import memory_of
from bo_tuner.models.shape import profile_of_size
from bo_tuner.models.software import DEEPSPEED
from bo_tuner.objectives import ignore_events
from bo_tuner.objectives.simulated import SimulatedObjective, Simulation
from bo_tuner.open_candidates import OpenCandidates
from bo_tuner.outcome import TrialLimits, TrialResult
from bo_tuner.samplers import SpaceExhausted
from bo_tuner.samplers.bayesian import BayesianSampler
from bo_tuner.space import SearchSpace, lightest
from bo_tuner.trial import TrialRecord, best_of

__all__ = ["PROBLEMS", "Case", "Ended", "Summary", "study", "summary"]

FACTORS = (0.2, 0.33, 0.6, 1.0, 1.6, 3.0, 5.0)
_MOST_TRIALS = 30
_MIN_GAIN = 0.01
_SMALL_CHANCE = 0.05
"""As the engine's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model on one cluster."""

    cluster: str
    n_parameters: int
    seq_len: int
    global_batch: int
    depths: tuple[int, ...] = (1, 2, 4)

    @property
    def problem(self) -> Problem:
        """What is expected of it."""
        cluster = Cluster.described(self.cluster)
        profile = profile_of_size(name="gpt", n_parameters=self.n_parameters, seq_len=self.seq_len)
        hardware = hardware_of(cluster, "bf16")
        return Problem(profile=profile, hardware=hardware, software=DEEPSPEED, n_ranks=cluster.n_ranks)

    @property
    def configs(self) -> list[TrainConfig]:
        """All that make steps of the global batch, by powers of two."""
        n_ranks = Cluster.described(self.cluster).n_ranks
        micro_batches = [2**power for power in range(8)]
        axes = itertools.product(get_args(ZeroStage), self.depths, (1, 2), (False, True), micro_batches)
        return [
            TrainConfig(
                zero_stage=zero,
                pipeline_depth=depth,
                tensor_parallel=tensor,
                recompute=recompute,
                micro_batch_size=micro_batch,
                grad_accum_steps=accumulation,
            )
            for zero, depth, tensor, recompute, micro_batch in axes
            if (zero < 2 or depth == 1)
            and (accumulation := self.global_batch * depth * tensor // (n_ranks * micro_batch)) >= 1
        ]


PROBLEMS = {
    "chosen": {
        "1.3B on 8 H100": Case(cluster="1x8xH100", n_parameters=1_300_000_000, seq_len=1024, global_batch=512),
        "3B on 32 A100": Case(cluster="4x8xA100-40GB", n_parameters=3_000_000_000, seq_len=2048, global_batch=512),
    },
    "reported": {
        "0.35B on 4 A100": Case(
            cluster="1x4xA100-40GB", n_parameters=350_000_000, seq_len=512, global_batch=256, depths=(1, 2)
        ),
        "0.8B on 16 A100": Case(cluster="2x8xA100-40GB", n_parameters=800_000_000, seq_len=2048, global_batch=256),
        "7B on 64 H100": Case(cluster="8x8xH100", n_parameters=7_000_000_000, seq_len=2048, global_batch=1024),
    },
}
"""Constants of the sampler were chosen on some; what is told of it comes from the others."""
PARTS = {"all": (0, 1, 2), "activations": (1, 2)}
"""Groups of memory that need more or less than expected; the others need what is expected."""


class Heavier(SimulatedObjective):
    """A simulation whose configs need another amount of memory than their model says."""

    def __init__(self, problem: Problem, *, seed: int, factor: float, part: str) -> None:
        super().__init__(problem, seed=seed, settings=Simulation())
        self._factor = factor
        self._part = part

    def __call__(self, config: TrainConfig, *, limits: TrialLimits, on_event: object = ignore_events) -> TrialResult:
        return replace(super().__call__(config, limits=limits, on_event=ignore_events), requested_bytes=None)

    def truth(self, configs: Sequence[TrainConfig]) -> tuple[Floats, Floats]:
        """Samples/s in the mean over launches, and bytes that a rank needs."""
        choices = Choices.of(configs, self._problem.n_ranks)
        slower = np.array([self._bias(config, "time", self._settings.time_bias) for config in configs])
        heavier = np.array([self._bias(config, "memory", self._settings.memory_bias) for config in configs])
        rates: Floats = choices.global_batch / (times_of(self._problem, choices).total * slower)
        needed: Floats = memory_of(self._problem, choices).total * heavier
        return rates, needed

    def _bias(self, config: TrainConfig, of: str, sd: float) -> float:
        bias = super()._bias(config, of, sd)
        if of != "memory":
            return bias
        memory = memory_of(self._problem, Choices.of([config], self._problem.n_ranks))
        states = float((memory.weights + memory.gradients + memory.optimizer)[0])
        whole = float(memory.total[0])
        share = 1.0 if self._part == "all" else (whole - states) / whole
        return bias * (1 - share + share * self._factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How one study went."""

    problem: str
    factor: float
    n_trials: int
    n_failed: int
    has_converged: bool
    promised: float
    """Chance of a gain that it told at last."""
    left: float
    """The fastest that fits and was not tried, over the fastest that ran; 1 where nothing faster is left."""


def study(name: str, case: Case, *, factor: float, seed: int, part: str = "all", n_trials: int = _MOST_TRIALS) -> Ended:
    """Let the usual sampler search one simulated cluster."""
    problem, configs = case.problem, case.configs
    limit = problem.hardware.memory_bytes
    candidates = OpenCandidates(
        configs,
        space=SearchSpace.of_configs(configs),
        n_ranks=problem.n_ranks,
        limit_bytes=limit,
        longest_step_s=float("inf"),
    )
    sampler = BayesianSampler(candidates, seed=seed, problem=problem)
    objective = Heavier(problem, seed=seed, factor=factor, part=part)
    records: list[TrialRecord] = []
    chance: float | None = None
    while len(records) < n_trials and (chance is None or chance >= _SMALL_CHANCE):
        try:
            config = _next_config(sampler, configs, records)
        except SpaceExhausted:
            break
        best = best_of(records)
        limits = TrialLimits(memory_bytes=limit, incumbent_samples_per_s=best.samples_per_s if best else None)
        records.append(TrialRecord(number=len(records), config=config, result=objective(config, limits=limits)))
        chance = sampler.chance_of_gain(records, _MIN_GAIN)
    rates, needed = objective.truth(configs)
    rates = np.where(needed <= limit, rates, 0.0)
    tried = {record.config for record in records if record.has_run}
    ran = np.array([config in tried for config in configs], dtype=bool)
    return Ended(
        problem=name,
        factor=factor,
        n_trials=len(records),
        n_failed=sum(not record.has_run for record in records),
        has_converged=chance is not None and chance < _SMALL_CHANCE,
        promised=chance if chance is not None else 1.0,
        left=max(float(rates.max() / max(rates[ran].max(initial=0.0), 1e-9)), 1.0),
    )


def _next_config(
    sampler: BayesianSampler, configs: Sequence[TrainConfig], records: Sequence[TrialRecord]
) -> TrainConfig:
    """As the engine asks: while nothing has run, the config that needs least follows a lack of memory."""
    least = lightest(configs)
    if records and not any(record.has_run for record in records) and least not in [one.config for one in records]:
        return least
    return sampler.next_config(records)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Studies of one factor."""

    factor: float
    n_studies: int
    n_trials: float
    """In the mean, as all that follows."""
    failed: float
    """Trials of a study that did not fit."""
    failed_of_ten: float
    """Of ten trials."""
    converged: float
    """Share of studies."""
    wrong: float
    """Share of those that converged which left over 1 %."""
    left: float
    """Of those that converged, what they left over what they had."""
    worst: float
    """The same, of the worst."""
    promised: float
    """Of those that converged, the chance that they told."""


def summary(factor: float, found: Sequence[Ended]) -> Summary:
    """Of studies of one factor."""
    ended = [one for one in found if one.has_converged]
    left = [one.left for one in ended] or [1.0]
    n_trials = sum(one.n_trials for one in found)
    return Summary(
        factor=factor,
        n_studies=len(found),
        n_trials=n_trials / len(found),
        failed=sum(one.n_failed for one in found) / len(found),
        failed_of_ten=10 * sum(one.n_failed for one in found) / n_trials,
        converged=len(ended) / len(found),
        wrong=float(np.mean([one > 1 + _MIN_GAIN for one in left])),
        left=float(np.mean(left)) - 1,
        worst=max(left) - 1,
        promised=float(np.mean([one.promised for one in ended] or [0.0])),
    )


def _print(found: Sequence[Summary]) -> None:
    print(
        "| truth / expected | trials | did not fit, of ten | converged | of those left over 1 % | left: mean / worst | told |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for one in found:
        print(
            f"| {one.factor:g} | {one.n_trials:.1f} | {one.failed:.1f}, {one.failed_of_ten:.1f} | {one.converged:.0%} | {one.wrong:.0%} "
            f"| {one.left:.1%} / {one.worst:.1%} | {one.promised:.1%} |"
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line for each factor."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory_scale", description=__doc__)
    parser.add_argument("--factors", default=",".join(map(str, FACTORS)), help="true over expected memory, with commas")
    parser.add_argument("--seeds", type=int, default=10, help="studies of each problem and factor")
    parser.add_argument("--first-seed", type=int, default=0, help="of them")
    parser.add_argument("--problems", default="reported", choices=PROBLEMS, help="which")
    parser.add_argument("--part", default="all", choices=PARTS, help="of memory, that the factor is of")
    parser.add_argument("--each", action="store_true", help="print every problem apart")
    parser.add_argument("--json", action="store_true", help="print every study for programs")
    parser.add_argument("--jobs", type=int, default=1, help="processes at work")
    options = parser.parse_args(argv)
    factors = [float(factor) for factor in options.factors.split(",")]
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    work = list(itertools.product(PROBLEMS[options.problems].items(), factors, seeds))
    with ProcessPoolExecutor(max_workers=options.jobs) as pool:
        found = list(pool.map(functools.partial(_study, options.part), work))
    if options.json:
        json.dump([asdict(one) for one in found], sys.stdout, indent=1)
        print()
        return
    parts = [[one] for one in PROBLEMS[options.problems]] if options.each else [list(PROBLEMS[options.problems])]
    for names in parts:
        print(f"\n{', '.join(names)}: {options.seeds} studies of each\n")
        own = [one for one in found if one.problem in names]
        _print([summary(factor, [one for one in own if one.factor == factor]) for factor in factors])


def _study(part: str, work: tuple[tuple[str, Case], float, int]) -> Ended:
    (name, case), factor, seed = work
    return study(name, case, factor=factor, seed=seed, part=part)


if __name__ == "__main__":
    main()
