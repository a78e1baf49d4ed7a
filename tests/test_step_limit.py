from __future__ import annotations

import math
from dataclasses import replace

from bo_tuner.config import TrainConfig
from bo_tuner.models.choices import Problem
from bo_tuner.models.cost import times_of
from bo_tuner.outcome import Measurement, Outcome, TrialResult
from bo_tuner.step_limit import StepLimit
from bo_tuner.trial import TrialRecord
from tests.models.gpt import choices, problem

N_RANKS = 8
CONFIGS = [
    TrainConfig(micro_batch_size=size, grad_accum_steps=accum) for size in (1, 2, 4, 8, 16) for accum in (1, 4, 16, 64)
]
EXPECTED_S = {config: float(times_of(problem(), choices(config)).total[0]) for config in CONFIGS}
LONGEST_S = sorted(EXPECTED_S.values())[len(CONFIGS) // 2]


def allowed(*records: TrialRecord, expects: Problem | None = None, longest_s: float = LONGEST_S) -> set[TrainConfig]:
    limit = StepLimit(longest_s=longest_s, n_ranks=N_RANKS, problem=expects)
    return set(filter(limit.allows(records, CONFIGS), CONFIGS))


def quicker_than(seconds: float) -> set[TrainConfig]:
    return {config for config, step_s in EXPECTED_S.items() if step_s <= seconds or config == CONFIGS[0]}


def ran(config: TrainConfig, step_s: float) -> TrialRecord:
    times = ((step_s,),)
    measurement = Measurement(
        global_batch=config.global_batch(N_RANKS),
        seq_len=1,
        step_times_s=times,
        engine_times_s=times,
        peak_memory_bytes=(1,),
    )
    return TrialRecord(number=0, config=config, result=TrialResult(outcome=Outcome.COMPLETE, measurement=measurement))


def cut(config: TrainConfig, at_least_s: float) -> TrialRecord:
    bound = config.global_batch(N_RANKS) / at_least_s
    result = TrialResult(outcome=Outcome.PRUNED, bound_samples_per_s=bound, step_limit_s=LONGEST_S)
    return TrialRecord(number=0, config=config, result=result)


def test_expected_steps_that_are_too_long_are_set_aside_before_anything_ran() -> None:
    assert allowed(expects=problem()) == quicker_than(LONGEST_S)
    assert 1 < len(quicker_than(LONGEST_S)) < len(CONFIGS)


def test_one_sample_a_rank_is_allowed_however_long_it_should_take_and_runs_without_a_limit() -> None:
    assert allowed(expects=problem(), longest_s=1e-9) == {CONFIGS[0]}
    limit = StepLimit(longest_s=10.0, n_ranks=N_RANKS)
    assert limit.of(CONFIGS[0]) is None
    assert limit.of(CONFIGS[1]) == 10.0
    assert StepLimit(longest_s=math.inf, n_ranks=N_RANKS).of(CONFIGS[1]) is None


def test_a_measured_step_sets_the_expectation_right_either_way() -> None:
    small = CONFIGS[0]
    for factor in (0.25, 4.0):
        left = allowed(ran(small, EXPECTED_S[small] * factor), expects=problem())
        assert left <= quicker_than(LONGEST_S / factor)
        assert all(
            config in left for config in quicker_than(LONGEST_S / factor) if _is_within_the_best_rate(config, factor)
        )


def _is_within_the_best_rate(config: TrainConfig, factor: float) -> bool:
    rate = N_RANKS / (EXPECTED_S[CONFIGS[0]] * factor)
    return config.global_batch(N_RANKS) <= rate * LONGEST_S


def test_a_trial_that_was_cut_teaches_how_long_steps_take_and_no_step_as_large_follows() -> None:
    middle = TrainConfig(micro_batch_size=4, grad_accum_steps=4)
    assert middle in quicker_than(LONGEST_S)
    assert allowed(cut(middle, 3 * EXPECTED_S[middle]), expects=problem()) == quicker_than(LONGEST_S / 3) - {middle}
    # What is measured is worth more than a bound; the cut step and those as large stay away all the same.
    small = CONFIGS[0]
    left = allowed(cut(middle, 3 * EXPECTED_S[middle]), ran(small, EXPECTED_S[small] / 100), expects=problem())
    assert TrainConfig(micro_batch_size=8, grad_accum_steps=4) not in left
    assert TrainConfig(micro_batch_size=4, grad_accum_steps=1) in left
    other_layout = replace(middle, zero_stage=1)
    limit = StepLimit(longest_s=LONGEST_S, n_ranks=N_RANKS)
    may_run = limit.allows([cut(middle, 1e3), ran(small, 1e-9)], [*CONFIGS, other_layout])
    assert may_run(other_layout) and not may_run(middle)


def test_where_nothing_is_expected_steps_begin_small_and_then_follow_the_best_rate() -> None:
    assert {config.global_batch(N_RANKS) for config in allowed()} == {8, 16, 32, 64}
    assert max(config.global_batch(N_RANKS) for config in allowed(ran(CONFIGS[0], LONGEST_S / 16))) == 128
