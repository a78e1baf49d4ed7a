"""The sampler as a whole: what it begins with, what it learns, and when it says that nothing is left."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from bo_tuner.config import TrainConfig, ZeroStage
from bo_tuner.goal import THROUGHPUT, Goal
from bo_tuner.launches import LaunchNoise
from bo_tuner.models.choices import Choices, Problem
from bo_tuner.models.cost import times_of
from bo_tuner.models.gentlest import AS_EXPECTED
from bo_tuner.models.memory import memory_of
from bo_tuner.open_candidates import OpenCandidates
from bo_tuner.outcome import Measurement, Outcome, TrialResult
from bo_tuner.samplers.bayesian import BayesianSampler
from bo_tuner.space import SearchSpace
from bo_tuner.trial import TrialRecord, best_of
from tests.models.gpt import DEVICE, PLAIN, problem
from tests.samplers.small_space import Runs, go_on

N_RANKS = 8
LIMIT = 12 * 2**30
STAGES: tuple[ZeroStage, ...] = (0, 1)
CONFIGS = [
    TrainConfig(
        zero_stage=stage, micro_batch_size=micro_batch, grad_accum_steps=accum, pipeline_depth=depth, recompute=again
    )
    for stage, micro_batch, accum, depth, again in product(STAGES, (1, 2, 4, 8, 16), (1, 4), (1, 2, 4), (False, True))
]
BELIEVED = problem(n_ranks=N_RANKS, hardware=replace(DEVICE, memory_bytes=LIMIT))
TRUE = problem(
    n_ranks=N_RANKS,
    hardware=replace(DEVICE, memory_bytes=LIMIT, operation_s=4e-5, memory_bytes_per_s=6e11),
    software=replace(PLAIN, host_factor=1.0, exchange_s=2e-3, fragmentation=0.1),
)
"""What it is really like: slower memory, a host that takes time, slower messages, and more memory lost."""


def sampler_of(
    given: Problem | None = BELIEVED,
    *,
    seed: int = 0,
    configs: Sequence[TrainConfig] = CONFIGS,
    goal: Goal = THROUGHPUT,
) -> BayesianSampler:
    candidates = OpenCandidates(
        configs,
        space=SearchSpace.of_configs(configs),
        n_ranks=N_RANKS,
        limit_bytes=LIMIT,
        longest_step_s=math.inf,
        goal=goal,
    )
    return BayesianSampler(candidates, seed=seed, problem=given)


def complete(config: TrainConfig, step_s: float, needed: int = 2**30) -> TrialResult:
    times = ((step_s,), (step_s * 1.001,), (step_s * 0.999,), (step_s,))
    return TrialResult(
        outcome=Outcome.COMPLETE,
        measurement=Measurement(
            global_batch=config.global_batch(N_RANKS),
            seq_len=1024,
            step_times_s=times,
            engine_times_s=times,
            peak_memory_bytes=(needed,),
        ),
        peak_memory_bytes=needed,
        limit_bytes=LIMIT,
        wall_s=30.0,
    )


def by(true: Problem) -> Runs:
    def run(config: TrainConfig) -> TrialResult:
        choices = Choices.of([config], N_RANKS)
        needed = int(memory_of(true, choices).total[0])
        if needed > LIMIT:
            return TrialResult(outcome=Outcome.OOM, peak_memory_bytes=LIMIT, limit_bytes=LIMIT, wall_s=30.0)
        return complete(config, float(times_of(true, choices).total[0]), needed)

    return run


def rate_of(config: TrainConfig, given: Problem) -> float:
    choices = Choices.of([config], N_RANKS)
    fits = memory_of(given, choices).total[0] <= LIMIT
    return float(choices.global_batch[0] / times_of(given, choices).total[0]) if fits else 0.0


BEST_RATE = max(rate_of(config, TRUE) for config in CONFIGS)


def test_the_first_trial_is_about_what_should_be_fastest_of_what_surely_fits() -> None:
    first = sampler_of().next_config([])
    needed = memory_of(BELIEVED, Choices.of(CONFIGS, N_RANKS)).total
    surely = [config for config, of in zip(CONFIGS, needed, strict=True) if of < 0.6 * LIMIT]
    assert rate_of(first, BELIEVED) >= max(rate_of(config, BELIEVED) for config in surely) * math.exp(-AS_EXPECTED)


def test_of_configs_that_no_launch_could_tell_apart_the_one_with_the_smallest_step_is_chosen() -> None:
    flat = [TrainConfig(micro_batch_size=8, grad_accum_steps=accum) for accum in (64, 32, 16, 8, 4, 2, 1)]
    rates = {config: rate_of(config, BELIEVED) for config in flat}
    first = sampler_of(configs=flat).next_config([])
    alike = [config for config in flat if rates[config] >= max(rates.values()) * math.exp(-AS_EXPECTED)]
    assert first == min(alike, key=lambda config: config.grad_accum_steps)
    assert first != max(flat, key=lambda config: rates[config])


def test_a_study_is_the_same_again_and_goes_on_as_if_never_interrupted() -> None:
    whole = go_on(sampler_of(), [], 8, by(TRUE))
    assert go_on(sampler_of(), [], 8, by(TRUE)) == whole
    assert go_on(sampler_of(), whole[:4], 4, by(TRUE)) == whole


def test_the_best_is_found_in_five_trials_though_the_cost_model_is_wrong() -> None:
    best = best_of(go_on(sampler_of(), [], 5, by(TRUE)))
    assert best is not None and rate_of(best.config, TRUE) >= 0.98 * BEST_RATE
    alone = best_of(go_on(sampler_of(None), [], 3, by(TRUE)))
    assert alone is None or rate_of(alone.config, TRUE) < 0.9 * rate_of(best.config, TRUE)


def test_without_a_cost_model_the_best_is_found_too_beginning_with_what_needs_least() -> None:
    records = go_on(sampler_of(None), [], 25, by(TRUE))
    first = records[0].config
    assert (first.micro_batch_size, first.recompute, first.pipeline_depth, first.zero_stage) == (1, True, 4, 1)
    best = best_of(records)
    assert best is not None and rate_of(best.config, TRUE) >= 0.95 * BEST_RATE


def test_expectations_decide_the_first_trial_only_where_there_are_any() -> None:
    assert sampler_of().expects
    assert not sampler_of(None).expects


def steady(config: TrainConfig, step_s: float) -> TrialResult:
    result = complete(config, step_s)
    assert result.measurement is not None
    return replace(result, measurement=replace(result.measurement, step_times_s=((step_s,) * 6,)))


def test_the_luckiest_of_noisy_trials_is_not_taken_for_the_best_and_that_of_exact_ones_is() -> None:
    sampler = sampler_of()
    chosen = [record.config for record in go_on(sampler, [], 5, by(BELIEVED))]
    best_rate = max(rate_of(config, BELIEVED) for config in chosen)
    slow = next(config for config in CONFIGS if rate_of(config, BELIEVED) < 0.8 * best_rate)
    for sd, is_believed in ((0.15, False), (0.0005, True)):
        noise = LaunchNoise(sd=sd, half_width=2 * sd, far=3 * sd, n_free=9)
        rates = {config: rate_of(config, BELIEVED) for config in chosen} | {slow: 1.02 * best_rate}
        records = [
            TrialRecord(
                number=number,
                config=config,
                result=steady(config, config.global_batch(N_RANKS) / rate),
                noise=noise,
            )
            for number, (config, rate) in enumerate(rates.items())
        ]
        lucky = records[-1]
        assert best_of(records) == lucky
        assert (sampler.best(records) == lucky) is is_believed


def test_all_runs_of_a_config_say_together_how_fast_it_is() -> None:
    sampler = sampler_of()
    records = go_on(sampler, [], 2, by(BELIEVED))
    best, other = sorted(records, key=lambda record: -(record.samples_per_s or 0.0))
    assert sampler.best(records) == best
    again = steady(best.config, 1.5 * best.config.global_batch(N_RANKS) / (best.samples_per_s or 0.0))
    assert sampler.best([replace(best, repeats=(again,)), other]) == other
    assert sampler.best([]) is None


def test_trials_in_flight_are_left_alone_and_send_others_elsewhere() -> None:
    sampler, ended = sampler_of(), go_on(sampler_of(), [], 4, by(TRUE))
    alone = sampler.next_config(ended)
    flying = list(ended)
    for _ in range(6):
        flying.append(TrialRecord(number=len(flying), config=sampler.next_config(flying)))
    configs = [record.config for record in flying[4:]]
    assert configs[0] == alone
    assert len(set(configs)) == 6
    ran = [record.config.name for record in go_on(sampler, ended, 6, by(TRUE))[4:]]
    assert [config.name for config in configs] != ran, "what is not measured yet teaches nothing"


def test_a_trial_that_was_ended_early_teaches_what_its_bound_leaves() -> None:
    sampler = sampler_of()
    ended = go_on(sampler, [], 4, by(TRUE))
    following = sampler.next_config(ended)
    best = best_of(ended)
    assert best is not None and best.samples_per_s is not None

    def after(bound: float) -> TrainConfig:
        slow = complete(following, following.global_batch(N_RANKS) / bound)
        pruned = replace(slow, outcome=Outcome.PRUNED, bound_samples_per_s=bound)
        return sampler.next_config([*ended, TrialRecord(number=4, config=following, result=pruned)])

    assert after(0.4 * best.samples_per_s) != after(0.99 * best.samples_per_s)


def test_a_study_is_over_once_hardly_anything_can_be_better_and_not_before() -> None:
    sampler = sampler_of()
    assert sampler.chance_of_gain([], 0.01) is None
    records = go_on(sampler, [], 2, by(TRUE))
    assert sampler.chance_of_gain(records, 0.01) is None
    while (chance := sampler.chance_of_gain(records, 0.01)) is None or chance >= 0.05:
        records = go_on(sampler, records, 1, by(TRUE))
    assert len(records) < len(CONFIGS) / 4
    best = best_of(records)
    assert best is not None and rate_of(best.config, TRUE) >= BEST_RATE / 1.02
    more = sampler.chance_of_gain(records, 0.0)
    less = sampler.chance_of_gain(records, 0.2)
    assert more is not None and less is not None
    assert more >= chance >= less


def test_trials_that_were_ended_early_bring_a_study_to_its_end_too() -> None:
    """As where the first trial is the best: all others are ended as soon as that shows."""

    def run(config: TrainConfig) -> TrialResult:
        result = by(TRUE)(config)
        if result.measurement is None or result.measurement.samples_per_s > 0.99 * BEST_RATE:
            return result
        return replace(result, outcome=Outcome.PRUNED, bound_samples_per_s=1.02 * result.measurement.samples_per_s)

    best = max(CONFIGS, key=lambda config: rate_of(config, TRUE))
    records = [TrialRecord(number=0, config=best, result=run(best))]
    sampler = sampler_of()
    while (chance := sampler.chance_of_gain(records, 0.01)) is None or chance >= 0.05:
        assert len(records) < len(CONFIGS) / 4
        records = go_on(sampler, records, 1, run)
    assert len(records) >= 4
    assert [record.result.outcome for record in records if record.result].count(Outcome.COMPLETE) < 4


def test_dimensions_of_ones_own_are_searched_without_a_word_from_the_cost_model() -> None:
    configs = [
        replace(config, extra=(("bucket", bucket), ("fused", fused)))
        for config in CONFIGS[::4]
        for bucket in (1, 2, 4)
        for fused in (False, True)
    ]

    def run(config: TrainConfig) -> TrialResult:
        result = by(TRUE)(replace(config, extra=()))
        extra = dict(config.extra)
        factor = (0.8 if extra["fused"] else 1.0) * (1.0 + 0.1 * abs(float(extra["bucket"]) - 2))
        measured = result.measurement
        return (
            result
            if measured is None
            else complete(config, measured.step_time_s * factor, measured.peak_memory_bytes[0])
        )

    best = best_of(go_on(sampler_of(configs=configs), [], 12, run))
    assert best is not None
    assert dict(best.config.extra) == {"bucket": 2, "fused": True}


def test_a_goal_with_two_measures_finds_fast_configs_and_light_ones() -> None:
    goal = Goal(name="throughput,memory")
    sampler = sampler_of(goal=goal)
    records = go_on(sampler, [], 10, by(TRUE))
    rates = [record.samples_per_s or 0.0 for record in records]
    peaks = [record.peak_memory_bytes or math.inf for record in records if record.samples_per_s]
    lightest = memory_of(TRUE, Choices.of(CONFIGS, N_RANKS)).total.min()
    assert max(rates) >= 0.95 * BEST_RATE
    assert min(peaks) <= 1.3 * lightest
    assert sampler.chance_of_gain(records, 0.01) is None
    only_fast = go_on(sampler_of(), [], 10, by(TRUE))
    assert min(record.peak_memory_bytes or math.inf for record in only_fast) > min(peaks)


def test_a_crowd_of_candidates_is_thinned_to_the_promising_and_some_others() -> None:
    crowd = [replace(config, extra=(("copy", copy),)) for config in CONFIGS for copy in range(100)]
    sampler = sampler_of(configs=crowd)
    first = sampler.next_config([])
    assert replace(first, extra=()) == sampler_of().next_config([])
    assert np.isfinite(rate_of(first, TRUE))
