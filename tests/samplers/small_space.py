"""A small space, how its configs end, and searches of it, for tests of every sampler."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bo_tuner.cluster import Cluster
from bo_tuner.config import TrainConfig
from bo_tuner.goal import THROUGHPUT, Goal
from bo_tuner.open_candidates import OpenCandidates
from bo_tuner.outcome import Measurement, Outcome, TrialResult
from bo_tuner.samplers import CandidateSampler, SpaceExhausted
from bo_tuner.space import SearchSpace
from bo_tuner.trial import TrialRecord

N_RANKS = 2
LIMIT_BYTES = 1000
SMALL = SearchSpace(zero_stages=(0, 1), max_micro_batch=8, max_grad_accum=2)
"""32 candidates; every micro-batch is a rung."""

Runs = Callable[[TrainConfig], TrialResult]


class AnyBackEnd:
    """A back end that runs everything."""

    def legal(self, config: TrainConfig) -> bool:
        return True


def candidates_of(space: SearchSpace, goal: Goal = THROUGHPUT) -> OpenCandidates:
    cluster = Cluster(device="cuda", n_ranks=N_RANKS, device_name="Tesla V100", memory_bytes=LIMIT_BYTES)
    configs = space.candidates(cluster, AnyBackEnd())
    return OpenCandidates(configs, space=space, n_ranks=N_RANKS, limit_bytes=LIMIT_BYTES, longest_step_s=1e9, goal=goal)


def complete(config: TrainConfig, samples_per_s: float) -> TrialResult:
    batch = config.global_batch(N_RANKS)
    times = ((batch / samples_per_s,),)
    measurement = Measurement(
        global_batch=batch, seq_len=1, step_times_s=times, engine_times_s=times, peak_memory_bytes=(500,)
    )
    return TrialResult(
        outcome=Outcome.COMPLETE, measurement=measurement, peak_memory_bytes=500, limit_bytes=LIMIT_BYTES
    )


def always_fits(config: TrainConfig) -> TrialResult:
    return complete(config, 10.0 + config.micro_batch_size + config.zero_stage)


def fits(config: TrainConfig) -> bool:
    """Five samples in ZeRO 0, seven in ZeRO 1, whatever is accumulated."""
    return config.micro_batch_size <= 5 + 2 * config.zero_stage


def with_memory(config: TrainConfig) -> TrialResult:
    if fits(config):
        return always_fits(config)
    return TrialResult(outcome=Outcome.OOM, peak_memory_bytes=900, requested_bytes=300, limit_bytes=LIMIT_BYTES)


def never_fits(config: TrainConfig) -> TrialResult:
    return TrialResult(outcome=Outcome.OOM, peak_memory_bytes=1100, limit_bytes=LIMIT_BYTES)


def go_on(sampler: CandidateSampler, records: Sequence[TrialRecord], n_trials: int, runs: Runs) -> list[TrialRecord]:
    """The records after at most `n_trials` more trials."""
    found = list(records)
    for _ in range(n_trials):
        try:
            config = sampler.next_config(found)
        except SpaceExhausted:
            break
        found.append(TrialRecord(number=len(found), config=config, result=runs(config)))
    return found


def names(records: Sequence[TrialRecord]) -> list[str]:
    return [record.config.name for record in records]
