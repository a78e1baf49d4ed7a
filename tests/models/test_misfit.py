"""When nothing is worth a try."""

from __future__ import annotations

from bo_tuner.config import TrainConfig
from bo_tuner.models.memory import memory_of
from bo_tuner.models.misfit import misfit
from bo_tuner.text import gib
from tests.models.gpt import choices, problem

CONFIGS = [TrainConfig(micro_batch_size=8), TrainConfig(zero_stage=1, micro_batch_size=1), TrainConfig()]


def test_what_needs_far_more_than_there_is_is_named_with_both_and_a_little_more_is_tried() -> None:
    needed = [int(memory_of(problem(), choices(config)).total[0]) for config in CONFIGS]
    least = CONFIGS[needed.index(min(needed))]
    device_bytes = int(min(needed) / 2.1)
    assert misfit(problem(), CONFIGS, device_bytes=device_bytes) == (
        f"a config must fit in the {gib(device_bytes)} that a rank has, and {least.name}, which needs least, should need {gib(min(needed))}"
    )
    assert misfit(problem(), CONFIGS, device_bytes=int(min(needed) / 1.9)) is None


def test_where_nothing_is_known_of_a_config_it_may_fit() -> None:
    deep = TrainConfig(pipeline_depth=32)
    assert misfit(problem(n_ranks=32), [*CONFIGS, deep], device_bytes=1) is None
