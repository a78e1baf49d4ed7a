"""How long a sampler takes to choose, learning included, over many candidates and after many trials.

    python -m benchmarks.ask [--candidates 100,10000,100000] [--trials 10,100,1000] [--samplers bo,tpe,gp] [--json]

Trials are made up from the cost model. All samplers choose among the same candidates after the same trials, in turn, in one process.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from bo_tuner.cluster import Cluster
from bo_tuner.config import TrainConfig
from bo_tuner.hardware import hardware_of
from bo_tuner.models.choices import Choices, Problem
from bo_tuner.models.cost import times_of
from bo_tuner.models.memory import memory_of
from bo_tuner.models.shape import profile_of_shape
from bo_tuner.models.software import MEGATRON
from bo_tuner.open_candidates import OpenCandidates
from bo_tuner.outcome import Measurement, Outcome, TrialResult
from bo_tuner.samplers import make_sampler
from bo_tuner.space import SearchSpace
from bo_tuner.trial import TrialRecord

N_RANKS = 512
_NOISE = 0.05
"""Standard deviation of a logarithm."""
_N_REPEATS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One sampler, once."""

    sampler: str
    n_candidates: int
    n_trials: int
    first_s: float
    """Seconds to make it and to choose."""
    median_s: float
    """Seconds to choose again."""


def problem() -> Problem:
    """A GPT of 24 layers on 512 H100."""
    cluster = Cluster.described(f"{N_RANKS // 8}x8xH100")
    profile = profile_of_shape(
        name="gpt",
        seq_len=2048,
        layers=24,
        hidden=2048,
        heads=16,
        ffn=8192,
        vocab=50304,
        gated_mlp=False,
        tied_embeddings=True,
        causal=True,
        flash_attention=True,
    )
    return Problem(profile=profile, hardware=hardware_of(cluster, "bf16"), software=MEGATRON, n_ranks=N_RANKS)


def candidates_of(n: int) -> list[TrainConfig]:
    """So many, all different."""
    every = [
        TrainConfig(
            zero_stage=stage,
            micro_batch_size=micro_batch,
            grad_accum_steps=accumulation,
            pipeline_depth=depth,
            tensor_parallel=tensor,
            recompute=recompute,
        )
        for stage in (0, 1, 2, 3)
        for recompute in (False, True)
        for depth in (1, 2, 4, 8)
        for tensor in (1, 2, 4, 8)
        for accumulation in (1, 2, 4, 8, 16, 32, 64)
        for micro_batch in range(1, 129)
    ]
    return random.Random(0).sample(every, n)


def records_of(given: Problem, configs: Sequence[TrainConfig]) -> list[TrialRecord]:
    """A trial of each config: the cost model with noise."""
    chance = random.Random(1)
    choices = Choices.of(configs, N_RANKS)
    limit = given.hardware.memory_bytes
    rows = zip(configs, times_of(given, choices).total, memory_of(given, choices).total, strict=True)
    return [
        TrialRecord(
            number=number,
            config=config,
            result=_result(config, float(seconds) * math.exp(chance.gauss(0, _NOISE)), int(needed), limit),
        )
        for number, (config, seconds, needed) in enumerate(rows)
    ]


def _result(config: TrainConfig, step_s: float, needed: int, limit: int) -> TrialResult:
    if needed > limit:
        return TrialResult(outcome=Outcome.OOM, peak_memory_bytes=limit, limit_bytes=limit, wall_s=30.0)
    times = ((step_s,), (step_s * 1.01,), (step_s * 0.99,), (step_s,))
    measurement = Measurement(
        global_batch=config.global_batch(N_RANKS),
        seq_len=2048,
        step_times_s=times,
        engine_times_s=times,
        peak_memory_bytes=(needed,),
    )
    return TrialResult(
        outcome=Outcome.COMPLETE, measurement=measurement, peak_memory_bytes=needed, limit_bytes=limit, wall_s=30.0
    )


def asked(name: str, candidates: Sequence[TrainConfig], records: Sequence[TrialRecord], given: Problem) -> Asked:
    """Time one sampler."""
    open_candidates = OpenCandidates(
        candidates,
        space=SearchSpace.of_configs(candidates),
        n_ranks=N_RANKS,
        limit_bytes=given.hardware.memory_bytes,
        longest_step_s=math.inf,
    )
    started = time.perf_counter()
    sampler = make_sampler(name, open_candidates, seed=0, problem=given)
    sampler.next_config(records)
    first_s = time.perf_counter() - started
    again: list[float] = []
    for _ in range(_N_REPEATS if first_s < 20 else 1):
        started = time.perf_counter()
        sampler.next_config(records)
        again.append(time.perf_counter() - started)
    return Asked(
        sampler=name,
        n_candidates=len(candidates),
        n_trials=len(records),
        first_s=first_s,
        median_s=statistics.median(again),
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line for each number of candidates and trials."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ask", description=__doc__)
    parser.add_argument("--candidates", default="100,10000,100000", help="how many, with commas")
    parser.add_argument("--trials", default="10,100,1000", help="how many, with commas")
    parser.add_argument("--samplers", default="bo,tpe,gp", help="which, with commas")
    parser.add_argument("--json", action="store_true", help="print the same for programs")
    options = parser.parse_args(argv)
    names = options.samplers.split(",")
    given, found = problem(), list[Asked]()
    if not options.json:
        print("| candidates | trials | " + " | ".join(f"{name}: first, again" for name in names) + " |")
        print("| --- | --- |" + " --- |" * len(names))
    for n_candidates in map(int, options.candidates.split(",")):
        candidates = candidates_of(n_candidates)
        for n_trials in map(int, options.trials.split(",")):
            if n_trials >= n_candidates:
                continue
            records = records_of(given, candidates[:n_trials])
            row = [asked(name, candidates, records, given) for name in names]
            found += row
            if not options.json:
                cells = [f"{one.first_s:.3f} s, {one.median_s:.3f} s" for one in row]
                print(f"| {n_candidates} | {n_trials} | {' | '.join(cells)} |", flush=True)
    if options.json:
        json.dump([asdict(one) for one in found], sys.stdout, indent=1)
        print()


if __name__ == "__main__":
    main()
