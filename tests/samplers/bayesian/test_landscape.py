"""Configs as arrays."""

from __future__ import annotations

import numpy as np
import pytest

from bo_tuner.config import TrainConfig, ZeroStage
from bo_tuner.models.choices import Choices
from bo_tuner.models.cost import times_of
from bo_tuner.models.memory import memory_of
from bo_tuner.samplers.bayesian.landscape import Map
from tests.models.gpt import N_BLOCKS, problem

N_RANKS = 8
STAGES: tuple[ZeroStage, ...] = (0, 1)
CONFIGS = [
    TrainConfig(zero_stage=stage, micro_batch_size=micro_batch, pipeline_depth=depth, grad_accum_steps=4)
    for stage in STAGES
    for depth in (1, 2, 4)
    for micro_batch in (1, 2, 4)
]


def test_expectations_are_those_of_the_models() -> None:
    given = problem(n_ranks=N_RANKS)
    choices = Choices.of(CONFIGS, N_RANKS)
    there = Map(CONFIGS, given, n_ranks=N_RANKS).of(CONFIGS)
    step_s = times_of(given, choices).total
    assert there.step_s == pytest.approx(step_s)
    assert np.exp(there.log_rate) == pytest.approx(choices.global_batch / step_s)
    assert there.shares.sum(axis=1) == pytest.approx(np.ones(len(CONFIGS)))
    assert there.memory.sum(axis=1) == pytest.approx(memory_of(given, choices).total)


def test_only_what_differs_is_a_dimension_and_sizes_count_in_doublings() -> None:
    there = Map(CONFIGS, None, n_ranks=N_RANKS).of(CONFIGS)
    assert there.numbers.shape == (18, 2)  # micro-batch and depth
    assert there.sorts.shape == (18, 1)  # ZeRO stage
    assert sorted(set(there.numbers.flatten().tolist())) == [0, 1, 2]


def test_a_config_between_two_rungs_is_looked_at_when_it_comes() -> None:
    where = Map(CONFIGS, problem(n_ranks=N_RANKS), n_ranks=N_RANKS)
    between = TrainConfig(micro_batch_size=3, grad_accum_steps=4)
    there = where.of([CONFIGS[1], between, CONFIGS[2]])
    assert there.numbers[1].tolist() == pytest.approx([np.log2(3), 0])
    assert there.memory[0].sum() < there.memory[1].sum() < there.memory[2].sum()


def test_more_stages_than_layers_are_expected_to_be_as_slow_as_the_slowest() -> None:
    deep = TrainConfig(pipeline_depth=N_BLOCKS * 2, grad_accum_steps=64)
    configs = [*CONFIGS, deep]
    there = Map(configs, problem(n_ranks=64), n_ranks=64).of(configs)
    assert there.log_rate[-1] == there.log_rate[:-1].min()


def test_without_models_memory_is_known_in_proportion_and_waiting_by_rule() -> None:
    where = Map(CONFIGS, None, n_ranks=N_RANKS)
    assert not where.expects
    whole, split, other = (
        TrainConfig(grad_accum_steps=4),
        TrainConfig(grad_accum_steps=4, pipeline_depth=2),
        TrainConfig(grad_accum_steps=4, zero_stage=1),
    )
    there = where.of([whole, split, other])
    states = there.memory[:, 0]
    assert states.tolist() == pytest.approx([1, 1 / 2, (4 + 12 / 8) / 16])
    assert there.log_rate.tolist() == [0, 0, 0]
    assert np.exp(there.log_rule).tolist() == pytest.approx([1, 4 / 5, 1])


def test_dimensions_of_ones_own_have_distances_by_their_kind() -> None:
    configs = [
        TrainConfig(extra=(("fused", fused), ("bucket", bucket), ("share", share)))
        for fused, bucket, share in ((False, 10**6, 0.1), (True, 10**7, 0.2), (False, 10**9, 0.3))
    ]
    there = Map(configs, None, n_ranks=2).of(configs)
    assert there.sorts[:, 0].tolist() == [0, 1, 0]
    by_name = dict(zip(("bucket", "share"), there.numbers.T.tolist(), strict=True))
    assert by_name["bucket"] == pytest.approx([0, 1, 3])  # orders of magnitude
    assert by_name["share"] == pytest.approx([0, 1.5, 3])


def test_a_mean_of_two_goals_expects_the_mean() -> None:
    there = Map(CONFIGS, problem(n_ranks=N_RANKS), n_ranks=N_RANKS).of(CONFIGS)
    assert there.aimed(1.0) is there
    mixed = there.aimed(0.25)
    assert mixed.log_rate == pytest.approx(0.25 * there.log_rate - 0.75 * np.log(there.memory.sum(axis=1)))
