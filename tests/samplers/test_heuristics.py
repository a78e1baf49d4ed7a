from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bo_tuner.config import TrainConfig
from bo_tuner.models.choices import Choices, Problem
from bo_tuner.models.memory import memory_of
from bo_tuner.objectives.prior import problem_of
from bo_tuner.objectives.table import MeasuredTable
from bo_tuner.open_candidates import OpenCandidates
from bo_tuner.outcome import Measurement, Outcome, TrialResult
from bo_tuner.samplers import CandidateSampler
from bo_tuner.samplers.heuristics import ClimbSampler, DeepSpeedSampler, DoublingSampler
from bo_tuner.space import BatchRule, SearchSpace
from bo_tuner.trial import TrialRecord
from tests.made_up_table import KNOWN, write_table
from tests.samplers.small_space import go_on

N_RANKS = 16
HEURISTICS = (DeepSpeedSampler, DoublingSampler, ClimbSampler)

Rate = Callable[[TrainConfig], float | None]
"""Samples/s of a config; None where memory runs out."""


def config(stage: int, size: int, accum: int = 1, *, tensor: int = 1, recompute: bool = False) -> TrainConfig:
    return TrainConfig.from_params(
        {
            "zero_stage": stage,
            "micro_batch_size": size,
            "grad_accum_steps": accum,
            "tensor_parallel": tensor,
            "recompute": recompute,
        }
    )


def opened(
    configs: Sequence[TrainConfig], rule: BatchRule | None = None, *, longest_step_s: float = math.inf
) -> OpenCandidates:
    space = replace(SearchSpace.of_configs(configs), batch_rule=rule or BatchRule())
    return OpenCandidates(configs, space=space, n_ranks=N_RANKS, limit_bytes=1000, longest_step_s=longest_step_s)


def ended(of: TrainConfig, rate: float | None) -> TrialResult:
    if rate is None:
        return TrialResult(outcome=Outcome.OOM, limit_bytes=1000)
    batch = of.global_batch(N_RANKS)
    times = ((batch / rate,),)
    measurement = Measurement(
        global_batch=batch, seq_len=1, step_times_s=times, engine_times_s=times, peak_memory_bytes=(500,)
    )
    return TrialResult(outcome=Outcome.COMPLETE, measurement=measurement)


def searched(sampler: CandidateSampler, rate: Rate, n_trials: int = 1000) -> list[TrainConfig]:
    records = go_on(sampler, [], n_trials, lambda proposed: ended(proposed, rate(proposed)))
    return [record.config for record in records]


def names(configs: Sequence[TrainConfig]) -> list[str]:
    return [config.name for config in configs]


def up_to(largest: dict[int, int], rate: Callable[[TrainConfig], float]) -> Rate:
    """`rate` up to the largest micro-batch of each ZeRO stage."""
    return lambda config: rate(config) if config.micro_batch_size <= largest[config.zero_stage] else None


# -- by hand -------------------------------------------------------------------------------------------------------


def test_by_hand_the_micro_batch_is_doubled_until_memory_runs_out_and_the_next_stage_begins_there() -> None:
    configs = [config(stage, size, accum) for stage in (0, 1) for size in (1, 2, 3, 4, 5, 8) for accum in (1, 2)]
    order = searched(DoublingSampler(opened(configs), seed=0), up_to({0: 5, 1: 5}, lambda own: own.micro_batch_size), 8)
    assert names(order) == [
        *("z0_gas1_mbs1", "z0_gas1_mbs2", "z0_gas1_mbs4", "z0_gas1_mbs8"),
        *("z1_gas1_mbs4", "z1_gas1_mbs8"),
        *("z0_gas2_mbs1", "z0_gas2_mbs2"),  # its rule is at its end: the plainest that are left
    ]


def test_by_hand_a_fixed_batch_is_halved_in_accumulation_by_the_nearest_divisors() -> None:
    configs = [config(0, size, 24 // size) for size in (1, 2, 3, 4, 6, 12, 24)]
    order = searched(DoublingSampler(opened(configs), seed=0), lambda own: 1.0, 6)
    assert names(order) == [
        *("z0_gas24_mbs1", "z0_gas12_mbs2", "z0_gas6_mbs4", "z0_gas4_mbs6", "z0_gas2_mbs12", "z0_gas1_mbs24")
    ]


def test_by_hand_other_layouts_follow_from_their_smallest_micro_batch_the_least_divided_first() -> None:
    configs = [config(stage, size, tensor=tensor) for tensor in (4, 1, 2) for stage in (1, 0) for size in (2, 4)]
    fits = up_to({0: 2, 1: 2}, lambda own: 1.0)
    order = searched(
        DoublingSampler(opened(configs), seed=0), lambda own: fits(own) if own.tensor_parallel > 1 else None
    )
    assert names(order[:6]) == [
        *("z0_gas1_mbs2", "z1_gas1_mbs2"),
        *("z0_tp2_gas1_mbs2", "z0_tp2_gas1_mbs4", "z1_tp2_gas1_mbs2", "z1_tp2_gas1_mbs4"),
    ]


def test_by_hand_a_step_that_is_too_long_to_wait_for_ends_the_doubling_like_one_that_does_not_run() -> None:
    configs = [config(stage, 2**power) for stage in (0, 1) for power in range(7)]
    candidates = opened(configs, longest_step_s=4.5)
    order = searched(
        DoublingSampler(candidates, seed=0), lambda own: float(N_RANKS), 4
    )  # a second for one sample a rank
    assert names(order) == ["z0_gas1_mbs1", "z0_gas1_mbs2", "z0_gas1_mbs4", "z1_gas1_mbs4"]


# -- DeepSpeed's autotuner -----------------------------------------------------------------------------------------


def squares(largest: int, accums: Sequence[int], stages: Sequence[int] = (0,)) -> list[TrainConfig]:
    return [
        config(stage, size, accum)
        for stage in stages
        for size in range(1, largest + 1)
        for accum in accums
        if size * accum <= largest
    ]


def test_deepspeed_times_the_largest_half_of_it_and_one_a_little_smaller() -> None:
    # As the reference says of micro-batches from 1 to 93 without a cap: 46 and 93.
    order = searched(DeepSpeedSampler(opened(squares(93, (1, 2))), seed=0), lambda own: own.micro_batch_size, 4)
    assert names(order) == ["z0_gas1_mbs1", "z0_gas1_mbs93", "z0_gas2_mbs46", "z0_gas1_mbs92"]


def test_deepspeed_halves_intervals_to_the_edge_of_memory_and_trades_accumulation_under_a_cap() -> None:
    # 4096 samples on 16 ranks' replicas of four: 1024 each. The list 117, 156, 195, 235 is that of the real tuner.
    configs = [config(0, size, accum) for size in range(1, 1025) for accum in (1, 4, 5, 6, 8) if size * accum <= 1024]
    candidates = opened(configs, BatchRule.of(max_global_batch=1024 * N_RANKS))
    steep = up_to({0: 235}, lambda own: math.exp(own.micro_batch_size / 10))
    order = searched(DeepSpeedSampler(candidates, seed=0), steep, 17)
    assert [own.micro_batch_size for own in order[:12]] == [1, 1024, 972, 512, 256, 128, 192, 224, 240, 232, 236, 234]
    assert names(order[12:]) == [
        *("z0_gas1_mbs235",),
        *("z0_gas8_mbs117", "z0_gas6_mbs156", "z0_gas5_mbs195", "z0_gas4_mbs235"),
    ]


def test_deepspeed_stops_enlarging_the_micro_batch_where_throughput_gains_less_than_a_twentieth() -> None:
    # 56 gains 0.06 over the 25.5 of 50, and is taken as the largest though 60 would fit.
    fits = up_to({0: 60}, lambda own: min(own.micro_batch_size, 25) + 0.01 * own.micro_batch_size)
    order = searched(DeepSpeedSampler(opened(squares(100, (1,))), seed=0), fits, 9)
    assert [own.micro_batch_size for own in order] == [1, 100, 95, 50, 75, 62, 56, 28, 47]
    order = searched(DeepSpeedSampler(opened(squares(100, (1,))), seed=0), up_to({0: 60}, lambda own: 7.0), 6)
    assert [own.micro_batch_size for own in order] == [1, 100, 95, 50, 25, 42]


def test_deepspeed_begins_a_stage_at_the_largest_of_the_best_stage_and_gives_it_up_if_that_fails() -> None:
    configs = squares(8, (1,), stages=(0, 1, 2))
    fits = up_to({0: 8, 1: 7, 2: 8}, lambda own: own.micro_batch_size)
    order = searched(DeepSpeedSampler(opened(configs), seed=0), fits, 7)
    assert names(order) == [
        *("z0_gas1_mbs1", "z0_gas1_mbs8", "z0_gas1_mbs4", "z0_gas1_mbs7"),
        "z1_gas1_mbs8",
        "z2_gas1_mbs8",
        "z0_gas1_mbs2",  # its rule is at its end: the plainest that is left
    ]


def test_deepspeed_goes_on_from_the_stage_whose_best_micro_batch_is_larger_not_from_one_that_only_holds_more() -> None:
    configs = squares(16, (1,), stages=(0, 1, 2))
    fits = up_to({0: 8, 1: 16, 2: 16}, lambda own: own.micro_batch_size if own.micro_batch_size <= 8 else 5.0)
    order = searched(DeepSpeedSampler(opened(configs), seed=0), fits, 20)
    first = {stage: next(own.micro_batch_size for own in order if own.zero_stage == stage) for stage in (0, 1, 2)}
    assert config(1, 16) in order
    assert first == {0: 1, 1: 8, 2: 8}


def test_deepspeed_gives_a_stage_up_that_holds_less_than_the_best_before() -> None:
    configs = [*squares(100, (1,)), *squares(101, (1,), stages=(1,))]
    order = searched(
        DeepSpeedSampler(opened(configs), seed=0), up_to({0: 100, 1: 100}, lambda own: own.micro_batch_size)
    )
    start = order.index(config(1, 100))
    # 101 is expected and does not run; 95, 5 % less, is taken for the largest, and that is less than 100.
    assert names(order[start : start + 4]) == ["z1_gas1_mbs100", "z1_gas1_mbs101", "z1_gas1_mbs95", "z0_gas1_mbs2"]


def test_deepspeed_takes_any_failure_for_one_that_does_not_fit() -> None:
    candidates = opened(squares(8, (1,)))
    crashed = [
        TrialRecord(number=0, config=config(0, 1), result=ended(config(0, 1), 1.0)),
        TrialRecord(number=1, config=config(0, 8), result=TrialResult(outcome=Outcome.FAILED)),
        TrialRecord(number=2, config=config(0, 7), result=TrialResult(outcome=Outcome.TIMEOUT)),
    ]
    assert DeepSpeedSampler(candidates, seed=0).next_config(crashed).name == "z0_gas1_mbs4"


@pytest.fixture
def problem(tmp_path: Path) -> Problem:
    found, _ = problem_of(MeasuredTable.read(write_table(tmp_path, KNOWN), "known"))
    assert found is not None
    return found


def test_deepspeed_looks_for_the_largest_around_what_it_expects_to_fit(problem: Problem) -> None:
    states = problem.profile.n_parameters * 16
    activations = memory_of(problem, Choices.of([config(0, 1)], problem.n_ranks)).activations[0]
    tight = replace(problem, hardware=replace(problem.hardware, memory_bytes=int(states + 40.5 * activations)))
    sampler = DeepSpeedSampler(opened(squares(100, (1,))), seed=0, problem=tight)
    assert [own.micro_batch_size for own in searched(sampler, up_to({0: 41}, lambda own: 1.0), 3)] == [1, 42, 40]


def test_deepspeed_leaves_out_a_stage_that_it_expects_not_to_fit(problem: Problem) -> None:
    # Eight ranks: 16 bytes a parameter in stage 0, 8 + 8/8 in stage 1, which leaves room for one sample and a half.
    activations = memory_of(problem, Choices.of([config(0, 1)], problem.n_ranks)).activations[0]
    left = int(9 * problem.profile.n_parameters + 1.5 * activations)
    small = replace(problem.hardware, memory_bytes=left)
    candidates = opened(squares(100, (1,), stages=(0, 1)))
    sampler = DeepSpeedSampler(candidates, seed=0, problem=replace(problem, hardware=small))
    assert sampler.next_config([]).name == "z1_gas1_mbs1"


# -- the climb -----------------------------------------------------------------------------------------------------


def test_the_climb_begins_at_the_most_sharded_and_follows_the_direction_that_gained_most() -> None:
    configs = [
        config(stage, size, recompute=recompute)
        for stage in (0, 1, 2)
        for size in (1, 2, 4, 8)
        for recompute in (False, True)
    ]

    def rate(own: TrainConfig) -> float:
        return own.micro_batch_size * (1.0 if own.recompute else 1.3) * (1.0 + 0.1 * own.zero_stage)

    order = searched(ClimbSampler(opened(configs), seed=0), rate, 9)
    assert names(order) == [
        *("z2_gas1_mbs1_rc", "z2_gas1_mbs2_rc", "z2_gas1_mbs4_rc", "z2_gas1_mbs8_rc"),
        "z2_gas1_mbs8",  # nothing larger is left: the next knob
        "z1_gas1_mbs8",  # this loses
        "z2_gas1_mbs4",  # and so does less, which was known to: last of the neighbours of the best
        *("z0_gas1_mbs8", "z1_gas1_mbs8_rc"),  # neighbours of the second, the one that lost least first
    ]


def test_the_climb_goes_rung_by_rung_where_neither_doubling_nor_another_knob_promises_to_gain() -> None:
    configs = [config(0, size, recompute=recompute) for size in range(1, 13) for recompute in (True, False)]
    fits = up_to({0: 10}, lambda own: own.micro_batch_size * (1.0 if own.recompute else 1.3))
    order = searched(ClimbSampler(opened(configs), seed=0), fits, 9)
    assert names(order) == [
        *("z0_gas1_mbs1_rc", "z0_gas1_mbs2_rc", "z0_gas1_mbs4_rc", "z0_gas1_mbs8_rc", "z0_gas1_mbs12_rc"),
        "z0_gas1_mbs8",
        *("z0_gas1_mbs9", "z0_gas1_mbs10", "z0_gas1_mbs11"),
    ]


def test_the_climb_begins_in_another_layout_where_the_first_does_not_run() -> None:
    configs = [config(1, size, 8 // size, tensor=tensor) for tensor in (8, 2, 1, 4) for size in (1, 2)]
    order = searched(ClimbSampler(opened(configs), seed=0), lambda own: 1.0 if own.tensor_parallel >= 4 else None, 4)
    assert names(order) == ["z1_gas8_mbs1", "z1_tp2_gas8_mbs1", "z1_tp4_gas8_mbs1", "z1_tp4_gas4_mbs2"]


# -- what holds for all --------------------------------------------------------------------------------------------


def random_table(seed: int) -> tuple[list[TrainConfig], Rate]:
    """Some of all configs of five knobs, one of them a table's own, and what became of them."""
    draw = random.Random(seed)
    configs = [
        replace(config(stage, size, accum, tensor=tensor, recompute=recompute), extra=(("fuse", fuse),))
        for stage in (0, 1, 3)
        for size in (1, 2, 3, 8)
        for accum in (1, 4)
        for tensor in (1, 4)
        for recompute in (False, True)
        for fuse in ("off", "on")
        if draw.random() < 0.15
    ]
    rates = {own: draw.choice([None, draw.uniform(1.0, 100.0)]) for own in configs}
    return configs, lambda own: rates[own]


@pytest.mark.parametrize("kind", HEURISTICS)
def test_every_table_is_searched_to_its_end_without_a_config_that_ran_or_is_proven_not_to_fit(
    kind: type[CandidateSampler],
) -> None:
    for seed in range(6):
        configs, rate = random_table(seed)
        candidates = opened(configs)
        sampler = kind(candidates, seed=0)
        records: list[TrialRecord] = []
        while is_open := candidates.open(records):
            proposed = sampler.next_config(records)
            assert proposed in is_open
            records.append(TrialRecord(number=len(records), config=proposed, result=ended(proposed, rate(proposed))))
        assert len(records) > 10


@pytest.mark.parametrize("kind", HEURISTICS)
def test_the_order_of_a_table_tells_nothing(kind: type[CandidateSampler]) -> None:
    for seed in range(4):
        configs, rate = random_table(seed)
        fastest_first = sorted(configs, key=lambda own: -(rate(own) or 0.0))
        orders = [searched(kind(opened(given), seed=0), rate) for given in (configs, fastest_first)]
        assert names(orders[0]) == names(orders[1])
