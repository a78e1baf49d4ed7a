"""One line on what the models expect most of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bo_tuner.config import TrainConfig
from bo_tuner.models.cost import times_of
from bo_tuner.models.memory import memory_of
from bo_tuner.models.outlook import outlook
from bo_tuner.text import gib, rate
from tests.models.gpt import choices, problem

ROOMY = 80 * 2**30
LADDER = tuple(TrainConfig(micro_batch_size=size) for size in (1, 2, 4, 8))


def needed(config: TrainConfig) -> float:
    return float(memory_of(problem(), choices(config)).total[0])


def step_s(config: TrainConfig) -> float:
    return float(times_of(problem(), choices(config)).total[0])


def told(configs: Sequence[TrainConfig] = LADDER, limit_bytes: float = ROOMY, **options: float) -> str:
    return outlook(problem(), configs, limit_bytes=int(limit_bytes), **options)


def test_the_fastest_that_fits_is_named_with_its_rate_and_memory() -> None:
    slow_again = tuple(replace(config, recompute=True) for config in LADDER)
    config = TrainConfig(micro_batch_size=8)
    expected = rate(8 * 8 / step_s(config)).removesuffix("/s")
    assert told((LADDER[0], config, *slow_again)) == (
        f"the cost model expects most of z0_gas1_mbs8: {expected} samples/s, {gib(int(needed(config)))} of memory a rank"
    )
    assert told(limit_bytes=needed(LADDER[1])).startswith("the cost model expects most of z0_gas1_mbs2: ")


def test_of_those_that_are_about_as_fast_the_one_with_the_smallest_step_is_named() -> None:
    larger, smaller = LADDER[3], LADDER[2]
    assert 8 / step_s(larger) / 1.1 < 4 / step_s(smaller) < 8 / step_s(larger)
    assert told((larger, smaller)).startswith("the cost model expects most of z0_gas1_mbs4: ")


def test_configs_with_long_steps_are_left_out_as_long_as_there_are_others() -> None:
    assert told(longest_step_s=step_s(LADDER[2])).startswith("the cost model expects most of z0_gas1_mbs4: ")
    assert told(longest_step_s=step_s(LADDER[0]) / 2).startswith("the cost model expects most of z0_gas1_mbs1: ")


def test_where_nothing_fits_the_least_is_told() -> None:
    least = needed(LADDER[0])
    assert (
        told(limit_bytes=least / 2)
        == f"the cost model expects that nothing fits: {gib(int(least))} a rank is the least"
    )


def test_nothing_is_expected_of_more_stages_than_the_model_has_layers() -> None:
    deep = TrainConfig(pipeline_depth=32)
    shallow = TrainConfig(pipeline_depth=2)
    real = problem(n_ranks=32)
    assert outlook(real, [deep, shallow], limit_bytes=ROOMY).startswith("the cost model expects most of z0_pp2_")
    assert (
        outlook(real, [deep], limit_bytes=ROOMY)
        == "no expectation: every config has more stages than the 18 layers of the model"
    )
