from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import create_trial

from bo_tuner.cluster import Cluster
from bo_tuner.config import TrainConfig
from bo_tuner.errors import ConfigError
from bo_tuner.objectives.training import DeepSpeedBackEnd
from bo_tuner.space import BatchRule, SearchSpace, default_config, distributions, lightest, micro_batch_ladder
from bo_tuner.workload import ModelSpec, ModelStructure


class AnyBackEnd:
    """A back end that runs everything."""

    def legal(self, config: TrainConfig) -> bool:
        return True


class ShallowBackEnd:
    """Like DeepSpeed: no ZeRO 2 or 3 in a pipeline; and, to be awkward, no odd micro-batch in ZeRO 1."""

    def legal(self, config: TrainConfig) -> bool:
        if config.pipeline_depth > 1 and config.zero_stage > 1:
            return False
        return not (config.zero_stage == 1 and config.micro_batch_size % 2 and config.micro_batch_size > 1)


def cluster_of(n_ranks: int) -> Cluster:
    return Cluster(device="cuda", n_ranks=n_ranks, device_name="Tesla V100", memory_bytes=16 * 2**30)


def micro_batches(configs: tuple[TrainConfig, ...]) -> set[int]:
    return {config.micro_batch_size for config in configs}


# -- the list ------------------------------------------------------------------------------------------------------


def test_every_combination_of_the_dimensions_is_a_candidate_exactly_once() -> None:
    space = SearchSpace(max_micro_batch=40, max_grad_accum=8, pipeline_depths=(1, 2), tensor_parallel=(1, 2))
    configs = space.candidates(cluster_of(4), AnyBackEnd())
    wanted = {
        TrainConfig.from_params(
            {
                "zero_stage": stage,
                "pipeline_depth": depth,
                "tensor_parallel": tensor,
                "micro_batch_size": size,
                "grad_accum_steps": accum,
            }
        )
        for stage, depth, tensor, size, accum in itertools.product(
            (0, 1, 2, 3), (1, 2), (1, 2), micro_batch_ladder(40), (1, 2, 4, 8)
        )
        if depth == 1 or stage <= 1  # as the schedule of pipelines wants
    }
    assert set(configs) == wanted
    assert len(configs) == len(wanted)


@pytest.mark.parametrize(
    "bounds",
    [{"zero_stages": (0, 0)}, {"pipeline_depths": (1, 1)}, {"tensor_parallel": (2, 2)}, {"recompute": (True, True)}],
)
def test_a_bound_given_twice_gives_no_candidate_twice(bounds: dict[str, Any]) -> None:
    configs = SearchSpace(**bounds, max_micro_batch=4, max_grad_accum=1).candidates(cluster_of(4), AnyBackEnd())
    assert [config.name for config, n in Counter(configs).items() if n > 1] == []


def test_the_list_has_a_fixed_order_by_layout_then_micro_batch_then_accumulation() -> None:
    space = SearchSpace(zero_stages=(3, 0), max_micro_batch=3, max_grad_accum=2)
    found = [config.name for config in space.candidates(cluster_of(2), AnyBackEnd())]
    assert found == [
        f"z{stage}_gas{accum}_mbs{size}" for stage, size, accum in itertools.product((0, 3), (1, 2, 3), (1, 2))
    ]


def test_layouts_that_do_not_divide_the_ranks_are_left_out() -> None:
    configs = SearchSpace(pipeline_depths=(1, 3, 4)).candidates(cluster_of(4), AnyBackEnd())
    assert {config.pipeline_depth for config in configs} == {1, 4}


def test_what_the_back_end_refuses_is_no_candidate_and_all_else_is() -> None:
    space = SearchSpace(max_micro_batch=4, max_grad_accum=1, pipeline_depths=(1, 2))
    everything = space.candidates(cluster_of(4), AnyBackEnd())
    legal = space.candidates(cluster_of(4), ShallowBackEnd())
    assert len(legal) < len(everything)
    assert list(legal) == [config for config in everything if ShallowBackEnd().legal(config)]


def test_schedules_are_tried_in_pipelines_with_the_batches_and_zero_stages_that_they_take() -> None:
    space = SearchSpace(
        max_micro_batch=2, max_grad_accum=4, pipeline_depths=(1, 4), schedules=("1f1b", "2bw"), zero_stages=(0, 2)
    )
    names = [config.name for config in space.candidates(cluster_of(4), AnyBackEnd())]
    assert [name for name in names if "2bw" in name] == ["z0_pp4_2bw_gas4_mbs1", "z0_pp4_2bw_gas4_mbs2"]
    assert [name for name in names if name.startswith("z2")] == [
        f"z2_gas{accum}_mbs{size}" for size in (1, 2) for accum in (1, 2, 4)
    ]
    assert not [name for name in map(str, space.candidates(cluster_of(4), DeepSpeedBackEnd())) if "2bw" in name]
    assert SearchSpace.from_dict(space.to_dict()) == space
    with pytest.raises(ConfigError, match=r"--schedules must be one of 1f1b, gpipe, 2bw; got 'interleaved'"):
        SearchSpace(schedules=("interleaved",))


def test_deepspeed_gets_whole_models_in_every_zero_stage_and_pipelines_in_0_and_1() -> None:
    space = SearchSpace(pipeline_depths=(1, 2, 4), recompute=(False, True), tensor_parallel=(1, 2))
    configs = space.candidates(cluster_of(4), DeepSpeedBackEnd())
    wanted = {"z0", "z1", "z2", "z3", "z0_pp2", "z1_pp2", "z0_pp4", "z1_pp4"}
    assert {config.layout_name for config in configs} == wanted | {f"{name}_rc" for name in wanted}


def test_a_pipeline_takes_the_batches_that_its_replicas_allow() -> None:
    space = SearchSpace(batch_rule=BatchRule.of(max_global_batch=8), zero_stages=(0,), pipeline_depths=(1, 2, 4))
    configs = space.candidates(cluster_of(4), DeepSpeedBackEnd())
    largest = {
        depth: max(each.micro_batch_size for each in configs if each.pipeline_depth == depth) for depth in (1, 2, 4)
    }
    assert largest == {1: 2, 2: 4, 4: 8}
    assert {config.global_batch(4) for config in configs} <= set(range(1, 9))
    only_one = SearchSpace(batch_rule=BatchRule.of(max_global_batch=1), pipeline_depths=(1, 2, 4))
    assert [config.name for config in only_one.candidates(cluster_of(4), DeepSpeedBackEnd())] == [
        "z0_pp4_gas1_mbs1",
        "z1_pp4_gas1_mbs1",
    ]


# -- the ladder ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("largest", [1, 2, 7, 20, 93, 100, 1000, 1024, 4097])
def test_steps_of_the_ladder_are_one_or_at_most_12_percent(largest: int) -> None:
    ladder = micro_batch_ladder(largest)
    wide = [(low, high) for low, high in itertools.pairwise(ladder) if high - low != 1 and high > 1.12 * low]
    assert wide == []
    assert ladder == sorted(set(ladder))
    assert (ladder[0], ladder[-1]) == (1, largest)


@pytest.mark.parametrize("largest", [1, 64, 100, 1024])
def test_every_power_of_two_is_a_rung(largest: int) -> None:
    powers = {2**exponent for exponent in range(11) if 2**exponent <= largest}
    assert powers <= set(micro_batch_ladder(largest))


def test_the_ladder_is_short_enough_to_search() -> None:
    assert len(micro_batch_ladder(1024)) < 100


def test_the_known_optimum_of_bert_large_is_a_candidate() -> None:
    longest = ModelSpec.resolve("bert-large-uncased").longest_seq_len
    assert longest is not None and longest >= 128  # what it was measured at
    configs = SearchSpace().candidates(cluster_of(16), DeepSpeedBackEnd())
    for stage in (0, 1, 2, 3):
        known = TrainConfig.from_params({"zero_stage": stage, "micro_batch_size": 93})
        assert known in configs


# -- the batch rule ------------------------------------------------------------------------------------------------


def test_a_free_batch_gives_powers_of_two_of_accumulation_up_to_the_bound() -> None:
    configs = SearchSpace(max_grad_accum=48, max_micro_batch=2).candidates(cluster_of(2), AnyBackEnd())
    assert {config.grad_accum_steps for config in configs} == {1, 2, 4, 8, 16, 32}


@pytest.mark.parametrize(("global_batch", "n_ranks"), [(48, 4), (1024, 16), (7, 1), (36, 2)])
def test_a_fixed_batch_leaves_the_divisors_and_the_accumulation_follows(global_batch: int, n_ranks: int) -> None:
    space = SearchSpace(batch_rule=BatchRule.of(global_batch=global_batch))
    configs = space.candidates(cluster_of(n_ranks), AnyBackEnd())
    per_rank = global_batch // n_ranks
    assert micro_batches(configs) == {size for size in range(1, per_rank + 1) if per_rank % size == 0}
    assert {config.global_batch(n_ranks) for config in configs} == {global_batch}
    assert len(configs) == len(set(configs)) == 4 * len(micro_batches(configs))


def test_a_fixed_batch_heeds_the_largest_micro_batch() -> None:
    space = SearchSpace(batch_rule=BatchRule.of(global_batch=64), max_micro_batch=5)
    assert micro_batches(space.candidates(cluster_of(2), AnyBackEnd())) == {1, 2, 4}


def test_a_fixed_batch_in_a_pipeline_counts_data_parallel_ranks_only() -> None:
    space = SearchSpace(batch_rule=BatchRule.of(global_batch=6), pipeline_depths=(1, 2))
    configs = space.candidates(cluster_of(4), AnyBackEnd())
    assert {(config.pipeline_depth, config.micro_batch_size) for config in configs} == {(2, 1), (2, 3)}


def test_a_bounded_batch_leaves_exactly_what_is_not_above_it() -> None:
    bounded = SearchSpace(batch_rule=BatchRule.of(max_global_batch=100)).candidates(cluster_of(4), AnyBackEnd())
    free = SearchSpace().candidates(cluster_of(4), AnyBackEnd())
    assert list(bounded) == [config for config in free if config.global_batch(4) <= 100]
    assert max(config.global_batch(4) for config in bounded) == 100


@pytest.mark.parametrize(
    ("rule", "n_ranks", "text"),
    [
        (
            BatchRule.of(global_batch=30),
            16,
            "--global-batch must be a multiple of the 16 data-parallel ranks; got 30: use 16, or another --ranks",
        ),
        (
            BatchRule.of(global_batch=3),
            4,
            "--global-batch must be a multiple of the 4 data-parallel ranks; got 3: use 4, or another --ranks",
        ),
        (
            BatchRule.of(max_global_batch=3),
            4,
            (
                "--max-global-batch must be at least one sample on each of the 4 data-parallel ranks; got 3: "
                "use 4 or more, or fewer --ranks"
            ),
        ),
    ],
)
def test_a_batch_that_no_config_meets_is_refused_with_the_way_out(rule: BatchRule, n_ranks: int, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SearchSpace(batch_rule=rule).candidates(cluster_of(n_ranks), DeepSpeedBackEnd())
    assert str(caught.value) == text


def test_with_pipelines_the_way_out_counts_the_fewest_replicas() -> None:
    space = SearchSpace(batch_rule=BatchRule.of(global_batch=3), pipeline_depths=(1, 2))
    with pytest.raises(ConfigError, match=r"a multiple of the 2 data-parallel ranks; got 3: use 2, or another --ranks"):
        space.candidates(cluster_of(4), DeepSpeedBackEnd())


def test_a_space_where_nothing_is_legal_is_refused_in_one_line() -> None:
    class Nothing:
        def legal(self, config: TrainConfig) -> bool:
            return False

    with pytest.raises(ConfigError) as caught:
        SearchSpace(zero_stages=(1, 2)).candidates(cluster_of(2), Nothing())
    assert str(caught.value).startswith("no config is legal: ZeRO stages (1, 2), batch free")
    assert "\n" not in str(caught.value)


def test_a_batch_is_either_fixed_or_bounded() -> None:
    with pytest.raises(ConfigError) as caught:
        BatchRule.of(global_batch=8, max_global_batch=16)
    assert str(caught.value) == "--global-batch fixes the batch and --max-global-batch bounds it; give one of them"


@pytest.mark.parametrize(
    ("argument", "option"), [("global_batch", "--global-batch"), ("max_global_batch", "--max-global-batch")]
)
@pytest.mark.parametrize("value", [0, -4])
def test_a_batch_below_one_is_refused_by_the_name_of_its_option(argument: str, option: str, value: int) -> None:
    with pytest.raises(ConfigError) as caught:
        BatchRule.of(**{argument: value})
    assert str(caught.value) == f"{option} must be at least 1; got {value}"


def test_the_batch_rule_reads_as_a_sentence() -> None:
    assert str(BatchRule.of()).startswith("free: ")
    assert "--global-batch N" in str(BatchRule.of())
    assert str(BatchRule.of(global_batch=64)) == "exactly 64 samples a step"
    assert str(BatchRule.of(max_global_batch=64)) == "at most 64 samples a step"


def test_no_step_holds_more_samples_than_the_data_has_unless_the_batch_was_fixed() -> None:
    space = SearchSpace(zero_stages=(0,)).for_data(100, n_ranks=4)
    batches = {config.global_batch(4) for config in space.candidates(cluster_of(4), AnyBackEnd())}
    assert max(batches) == 100
    assert str(space.batch_rule).startswith("free, up to the 100 samples of the data: ")
    assert SearchSpace.from_dict(space.to_dict()) == space
    for rule, samples, most in (
        (BatchRule.of(max_global_batch=64), 100, 64),
        (BatchRule.of(max_global_batch=64), 10, 10),
        (BatchRule.of(global_batch=64), 10, 64),
        (BatchRule.of(), 3, 4),
        (BatchRule.of(), None, None),
    ):
        assert SearchSpace(batch_rule=rule).for_data(samples, n_ranks=4).batch_rule == replace(rule, global_batch=most)


# -- bounds --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [(), (4,), (0, 1, 9), (-1,)])
def test_stages_that_do_not_exist_are_refused(stages: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        SearchSpace(zero_stages=stages)
    assert (
        str(caught.value) == f"--zero-stages must be some of 0, 1, 2, 3, as in 0,1,2; got {','.join(map(str, stages))}"
    )


@pytest.mark.parametrize("bound", ["max_micro_batch", "max_grad_accum"])
def test_bounds_below_one_are_refused(bound: str) -> None:
    bounds: dict[str, Any] = {bound: 0}
    with pytest.raises(ConfigError) as caught:
        SearchSpace(**bounds)
    assert str(caught.value) == f"{bound} must be at least 1; got 0"


@pytest.mark.parametrize("choices", [(), (1,), (False, None)])
def test_choices_of_recomputation_other_than_true_and_false_are_refused(choices: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        SearchSpace(recompute=choices)
    assert str(caught.value) == f"recompute must be some of False and True; got {choices}"


@pytest.mark.parametrize("bound", ["pipeline_depths", "tensor_parallel"])
def test_degrees_of_parallelism_below_one_are_refused(bound: str) -> None:
    bounds: dict[str, Any] = {bound: (0, 1)}
    with pytest.raises(ConfigError, match=f"{bound} must be .*at least 1"):
        SearchSpace(**bounds)


def test_stages_are_kept_sorted_and_once() -> None:
    assert SearchSpace(zero_stages=(3, 1, 3)).zero_stages == (1, 3)


@pytest.mark.parametrize(
    "space",
    [
        SearchSpace(),
        SearchSpace(
            zero_stages=(1,), max_micro_batch=9, max_grad_accum=3, pipeline_depths=(1, 2), tensor_parallel=(2,)
        ),
        SearchSpace(pipeline_depths=(1, 4), recompute=(False, True)),
        SearchSpace(batch_rule=BatchRule.of(global_batch=64)),
        SearchSpace(batch_rule=BatchRule.of(max_global_batch=32)),
    ],
)
def test_a_space_reads_back_from_json_as_the_same(space: SearchSpace) -> None:
    assert SearchSpace.from_dict(json.loads(json.dumps(space.to_dict()))) == space


# -- for a model -----------------------------------------------------------------------------------------------------


EVERY_WAY = SearchSpace(zero_stages=(0, 1), pipeline_depths=(1, 2, 4, 8), recompute=(False, True))


def test_a_model_takes_the_depths_that_it_has_layers_for_and_all_else_stays() -> None:
    found = EVERY_WAY.for_model(ModelStructure(layer_costs=(1.0, 2.0, 3.0, 1.0, 1.0), cost_unit="seconds"))
    assert found == replace(EVERY_WAY, pipeline_depths=(1, 2, 4))
    assert EVERY_WAY.for_model(ModelStructure(layer_costs=(1.0,) * 8)).pipeline_depths == (1, 2, 4, 8)


def test_a_model_that_cannot_be_split_has_depth_one() -> None:
    found = EVERY_WAY.for_model(ModelStructure(whole_because="it gives a list"))
    assert found == replace(EVERY_WAY, pipeline_depths=(1,))


@pytest.mark.parametrize("asked", [(False, True), (True,), (False,)])
def test_a_model_without_blocks_is_not_recomputed(asked: tuple[bool, ...]) -> None:
    space = replace(EVERY_WAY, recompute=asked)
    structure = ModelStructure(layer_costs=(1.0,) * 8)
    assert space.for_model(structure).recompute == asked
    assert space.for_model(replace(structure, plain_because="it has no list")).recompute == (False,)


# -- the edge of memory --------------------------------------------------------------------------------------------


def family_of(space: SearchSpace, n_ranks: int) -> list[TrainConfig]:
    return [config for config in space.candidates(cluster_of(n_ranks), AnyBackEnd()) if config.zero_stage == 1]


def test_between_two_neighbouring_rungs_every_integer_is_a_candidate() -> None:
    space = SearchSpace(max_grad_accum=4)
    found = space.refined(family_of(space, 2), fits=64, fails=68, n_ranks=2)
    assert {(config.micro_batch_size, config.grad_accum_steps) for config in found} == set(
        itertools.product((65, 66, 67), (1, 2, 4))
    )
    assert len(found) == 9
    assert {config.layout.name for config in found} == {"z1_gas1_mbs1"}


def test_above_an_integer_between_rungs_that_ran_the_next_ones_are_candidates() -> None:
    space = SearchSpace(max_grad_accum=2)
    found = space.refined(family_of(space, 2), fits=65, fails=68, n_ranks=2)
    assert {(config.micro_batch_size, config.grad_accum_steps) for config in found} >= set(
        itertools.product((66, 67), (1, 2))
    )


def test_nothing_is_refined_while_a_rung_lies_between() -> None:
    space = SearchSpace()
    assert space.refined(family_of(space, 2), fits=64, fails=73, n_ranks=2) == []


def test_nothing_is_refined_under_a_fixed_batch() -> None:
    space = SearchSpace(batch_rule=BatchRule.of(global_batch=256))
    assert space.refined(family_of(space, 2), fits=64, fails=128, n_ranks=2) == []


def test_what_is_refined_stays_within_a_bounded_batch() -> None:
    space = SearchSpace(batch_rule=BatchRule.of(max_global_batch=132))
    found = space.refined(family_of(space, 2), fits=60, fails=64, n_ranks=2)
    assert [config.micro_batch_size for config in found] == [61, 62, 63]
    tight = SearchSpace(batch_rule=BatchRule.of(max_global_batch=124))
    found = tight.refined(family_of(tight, 2), fits=60, fails=64, n_ranks=2)
    assert [config.micro_batch_size for config in found] == [61, 62]


# -- for samplers --------------------------------------------------------------------------------------------------


def test_numbers_are_int_distributions_over_the_range_and_all_else_is_categorical() -> None:
    found = distributions(SearchSpace(zero_stages=(1, 3)).candidates(cluster_of(4), AnyBackEnd()))
    assert found == {
        "zero_stage": IntDistribution(1, 3),
        "micro_batch_size": IntDistribution(1, 1024, log=True),
        "grad_accum_steps": IntDistribution(1, 64, log=True),
        "pipeline_depth": IntDistribution(1, 1),
        "tensor_parallel": IntDistribution(1, 1),
        "pipeline_schedule": CategoricalDistribution(("1f1b", "gpipe", "2bw")),
        "recompute": CategoricalDistribution((False, True)),
        "offload": CategoricalDistribution(("none", "optimizer", "all")),
    }


def test_extra_dimensions_have_distributions_of_their_kind() -> None:
    found = distributions(
        [
            TrainConfig(extra=(("bucket_mb", 25), ("fused", True), ("ratio", 0.5), ("kernel", "a"))),
            TrainConfig(extra=(("bucket_mb", 100), ("fused", False), ("ratio", 0.25), ("kernel", "b"))),
        ]
    )
    assert found["bucket_mb"] == IntDistribution(25, 100)
    assert found["ratio"] == FloatDistribution(0.25, 0.5)
    assert found["kernel"] == CategoricalDistribution(("a", "b"))
    assert found["fused"] == CategoricalDistribution((False, True))


def test_every_candidate_and_every_refined_one_lies_in_the_distributions() -> None:
    space = SearchSpace(max_micro_batch=100)
    configs = space.candidates(cluster_of(2), AnyBackEnd())
    spaces = distributions(configs)
    edge = space.refined(family_of(space, 2), fits=93, fails=99, n_ranks=2)
    assert len(edge) > 0
    for config in (*configs, *edge):
        # Optuna refuses a value outside its distribution.
        trial = create_trial(value=1.0, params=config.params(), distributions=spaces)
        assert TrainConfig.from_params(trial.params) == config


def test_the_lightest_has_the_smallest_micro_batch_then_the_most_sharding_then_the_fewest_accumulations() -> None:
    configs = SearchSpace(zero_stages=(0, 1, 2)).candidates(cluster_of(2), AnyBackEnd())
    assert lightest(configs).name == "z2_gas1_mbs1"
    assert lightest(reversed(configs)).name == "z2_gas1_mbs1"


def test_the_default_is_whole_then_least_sharded_then_the_smallest_batch() -> None:
    configs = [
        TrainConfig(zero_stage=1, pipeline_depth=depth, recompute=again, micro_batch_size=size, grad_accum_steps=accum)
        for depth, again, size, accum in itertools.product((2, 1), (True, False), (2, 1), (2, 1))
    ] + [TrainConfig(zero_stage=2)]
    assert default_config(configs).name == "z1_gas1_mbs1"
    assert default_config(reversed(configs)).name == "z1_gas1_mbs1"


# -- configs that are listed ---------------------------------------------------------------------------------------

LISTED = (
    TrainConfig(micro_batch_size=4, tensor_parallel=2, extra=(("fuse", "1"),)),
    TrainConfig(micro_batch_size=2, pipeline_depth=2, recompute=True, extra=(("fuse", "0"),)),
    TrainConfig(zero_stage=3, grad_accum_steps=6, extra=(("fuse", ""),)),
)


def test_listed_configs_are_the_candidates_whatever_a_back_end_can_run() -> None:
    space = SearchSpace.of_configs(LISTED)
    assert space.candidates(cluster_of(4), DeepSpeedBackEnd()) == LISTED
    assert (space.zero_stages, space.pipeline_depths, space.tensor_parallel) == ((0, 3), (1, 2), (1, 2))
    assert (space.max_micro_batch, space.max_grad_accum, space.recompute) == (4, 6, (False, True))


def test_between_listed_configs_there_is_nothing() -> None:
    few = [replace(LISTED[0], micro_batch_size=size) for size in (2, 8)]
    assert SearchSpace.of_configs(few).refined(few, fits=2, fails=8, n_ranks=4) == []
    assert replace(SearchSpace.of_configs(few), listed=()).refined(few, fits=2, fails=8, n_ranks=4) != []


def test_listed_configs_survive_json_in_few_bytes() -> None:
    space = SearchSpace.of_configs(LISTED * 50)
    text = json.dumps(space.to_dict())
    assert SearchSpace.from_dict(json.loads(text)) == space
    assert len(text) < 65_000, "MySQL keeps no longer attributes"


def test_a_space_from_before_configs_were_listed_is_read() -> None:
    old = SearchSpace(max_micro_batch=3).to_dict()
    del old["listed"]
    assert SearchSpace.from_dict(old) == SearchSpace(max_micro_batch=3)


def test_a_batch_beyond_what_numbers_tell_apart_is_refused() -> None:
    for option in ("global_batch", "max_global_batch"):
        with pytest.raises(ConfigError, match="-batch must be at most 1099511627776 samples"):
            BatchRule.of(**{option: 2**53 + 1})
