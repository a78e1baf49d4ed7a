from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest

from bo_tuner.cluster import Cluster
from bo_tuner.config import TrainConfig
from bo_tuner.errors import BoTunerError, ConfigError
from bo_tuner.space import SearchSpace


class AnyBackEnd:
    """A back end that runs everything."""

    def legal(self, config: TrainConfig) -> bool:
        return True


EVERYTHING = TrainConfig(
    zero_stage=2,
    micro_batch_size=3,
    grad_accum_steps=5,
    pipeline_depth=2,
    pipeline_schedule="2bw",
    recompute=True,
    tensor_parallel=4,
    offload="optimizer",
    extra=(("zeta", 1.5), ("alpha", "fast"), ("mid", False)),
)
"""No field has its default."""


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"zero_stage": 1, "grad_accum_steps": 4, "micro_batch_size": 16}, "z1_gas4_mbs16"),
        (
            {"zero_stage": 1, "pipeline_depth": 2, "grad_accum_steps": 4, "micro_batch_size": 16, "recompute": True},
            "z1_pp2_gas4_mbs16_rc",
        ),
        ({}, "z0_gas1_mbs1"),
        ({"tensor_parallel": 2}, "z0_tp2_gas1_mbs1"),
        ({"pipeline_depth": 4, "pipeline_schedule": "gpipe"}, "z0_pp4_gpipe_gas1_mbs1"),
        ({"offload": "all"}, "z0_gas1_mbs1_off-all"),
        ({"extra": (("b", 2), ("a", "x"))}, "z0_gas1_mbs1_a-x_b-2"),
    ],
)
def test_name_is_short_and_has_every_value_that_is_not_the_default(values: dict[str, Any], name: str) -> None:
    assert TrainConfig(**values).name == name


def test_name_of_a_config_without_any_default_has_every_field() -> None:
    defaults = TrainConfig()
    same = [
        field.name for field in fields(TrainConfig) if getattr(EVERYTHING, field.name) == getattr(defaults, field.name)
    ]
    assert same == []
    assert EVERYTHING.name == "z2_tp4_pp2_2bw_gas5_mbs3_rc_off-optimizer_alpha-fast_mid-False_zeta-1.5"


def test_names_are_unique_over_a_whole_candidate_list() -> None:
    cluster = Cluster(device="cuda", n_ranks=8, device_name="Tesla V100", memory_bytes=16 * 2**30)
    space = SearchSpace(pipeline_depths=(1, 2, 4), tensor_parallel=(1, 2))
    configs = space.candidates(cluster, AnyBackEnd())
    assert len(configs) > 5_000
    assert len({config.name for config in configs}) == len(configs)


def test_extra_dimensions_are_kept_sorted_so_that_their_order_does_not_matter() -> None:
    one = TrainConfig(extra=(("b", 2), ("a", 1)))
    other = TrainConfig(extra=(("a", 1), ("b", 2)))
    assert one.extra == (("a", 1), ("b", 2))
    assert one == other
    assert hash(one) == hash(other)
    assert one.name == other.name


@pytest.mark.parametrize("config", [TrainConfig(), EVERYTHING, TrainConfig(zero_stage=3, micro_batch_size=93)])
def test_params_read_back_as_the_same_config(config: TrainConfig) -> None:
    assert TrainConfig.from_params(config.params()) == config


def test_params_hold_every_field_and_extra_dimensions_beside_them() -> None:
    assert EVERYTHING.params() == {
        "zero_stage": 2,
        "micro_batch_size": 3,
        "grad_accum_steps": 5,
        "pipeline_depth": 2,
        "pipeline_schedule": "2bw",
        "recompute": True,
        "tensor_parallel": 4,
        "offload": "optimizer",
        "alpha": "fast",
        "mid": False,
        "zeta": 1.5,
    }


def test_layout_of_a_whole_model_forgets_micro_batch_and_accumulation_and_nothing_else() -> None:
    whole = replace(EVERYTHING, pipeline_depth=1)
    assert whole.layout.params() == {**whole.params(), "micro_batch_size": 1, "grad_accum_steps": 1}


@pytest.mark.parametrize(
    ("depth", "accum", "in_flight"), [(1, 64, 1), (2, 1, 1), (2, 2, 2), (2, 5, 2), (4, 3, 3), (4, 4, 4), (4, 64, 4)]
)
def test_layout_of_a_pipeline_keeps_how_many_micro_batches_are_in_flight(
    depth: int, accum: int, in_flight: int
) -> None:
    config = replace(EVERYTHING, pipeline_depth=depth, grad_accum_steps=accum)
    assert config.layout.params() == {**config.params(), "micro_batch_size": 1, "grad_accum_steps": in_flight}
    assert config.layout.layout == config.layout


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (TrainConfig(zero_stage=3, micro_batch_size=8, grad_accum_steps=4), "z3"),
        (TrainConfig(zero_stage=1, pipeline_depth=2, grad_accum_steps=4, recompute=True), "z1_pp2_rc"),
        (TrainConfig(pipeline_depth=4, micro_batch_size=2), "z0_pp4"),
        (EVERYTHING, "z2_tp4_pp2_2bw_rc_off-optimizer_alpha-fast_mid-False_zeta-1.5"),
    ],
)
def test_the_name_of_a_layout_has_no_batch_in_it(config: TrainConfig, name: str) -> None:
    assert config.layout_name == config.layout.layout_name == name


def test_global_batch_is_micro_batch_times_accumulation_times_data_parallel() -> None:
    assert TrainConfig(micro_batch_size=93).global_batch(16) == 93 * 16
    pipelined = TrainConfig(micro_batch_size=3, grad_accum_steps=5, pipeline_depth=2, tensor_parallel=4)
    assert pipelined.data_parallel(16) == 2
    assert pipelined.global_batch(16) == 3 * 5 * 2


def test_ranks_that_do_not_divide_are_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig(pipeline_depth=4).data_parallel(6)
    assert str(caught.value) == "4 ranks a replica must divide the 6 ranks of z0_pp4_gas1_mbs1"


@pytest.mark.parametrize("field", ["micro_batch_size", "grad_accum_steps", "pipeline_depth", "tensor_parallel"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True, None])
def test_what_is_counted_must_be_a_whole_number_of_at_least_one(field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig(**{field: value})
    assert str(caught.value) == f"{field} must be a whole number of at least 1, got {value!r}"


@pytest.mark.parametrize("value", [1, 0, "yes", None])
def test_recompute_is_true_or_false(value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig(recompute=value)
    assert str(caught.value) == f"recompute must be True or False, got {value!r}"


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("zero_stage", 4, "zero_stage must be one of 0, 1, 2, 3; got 4"),
        ("zero_stage", "1", "zero_stage must be one of 0, 1, 2, 3; got '1'"),
        (
            "pipeline_schedule",
            "1F1B",
            "pipeline_schedule must be one of 1f1b, gpipe, 2bw; got '1F1B' (did you mean 1f1b?)",
        ),
        ("offload", "cpu", "offload must be one of none, optimizer, all; got 'cpu'"),
    ],
)
def test_a_choice_must_be_one_of_those_that_the_error_lists(field: str, value: Any, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig(**{field: value})
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("extra", "names"), [((("a", 1), ("a", 2)), "a, a"), ((("zero_stage", 1), ("a", 2)), "zero_stage, a")]
)
def test_extra_dimensions_need_names_of_their_own(extra: tuple[tuple[str, int], ...], names: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig(extra=extra)
    assert str(caught.value) == f"extra dimensions need names of their own, each once; got {names}"


def test_a_config_error_is_one_of_ours_and_a_value_error() -> None:
    with pytest.raises(ValueError, match="micro_batch_size") as caught:
        TrainConfig(micro_batch_size=0)
    assert isinstance(caught.value, BoTunerError)


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        TrainConfig().zero_stage = 1  # type: ignore[misc]  # the point of the test
