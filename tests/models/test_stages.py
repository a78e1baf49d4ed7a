"""How layers are dealt to pipeline stages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bo_tuner.errors import ConfigError
from bo_tuner.models.software import Software
from bo_tuner.models.stages import stages_of
from tests.models.gpt import EMBEDDING, GPT, HEAD, HIDDEN, N_BLOCKS, PLAIN, VOCAB, problem

BY_FLOPS = replace(PLAIN, partition="flops")
BY_COST = replace(PLAIN, partition="cost")


def blocks(depth: int, software: Software = PLAIN, costs: tuple[float, ...] = ()) -> list[tuple[float, float]]:
    """(blocks, stages) of every sort of stage."""
    stages = stages_of(GPT, depth, software, costs)
    of_blocks = [kind.is_block for kind in stages.kinds].index(True)
    return [(float(row[of_blocks]), float(n)) for row, n in zip(stages.n_layers, stages.n_stages, strict=True)]


@pytest.mark.parametrize("software", [PLAIN, BY_FLOPS, BY_COST])
@pytest.mark.parametrize("depth", [1, 2, 3, 5, 8, 16])
def test_every_layer_is_in_one_stage(software: Software, depth: int) -> None:
    stages = stages_of(GPT, depth, software)
    dealt = stages.n_layers.T @ stages.n_stages
    assert dict(zip((kind.name for kind in stages.kinds), dealt.tolist(), strict=True)) == {
        "embedding": 1,
        "block": N_BLOCKS,
        "head": 1,
    }
    assert stages.n_stages.sum() == depth


def test_a_tie_is_shared_in_one_stage_or_tied_between_two() -> None:
    whole, halves = stages_of(GPT, 1, PLAIN), stages_of(GPT, 2, PLAIN)
    assert (whole.n_shared.tolist(), whole.n_tied) == ([VOCAB * HIDDEN], 0)
    assert (halves.n_shared.tolist(), halves.n_tied) == ([0, 0], VOCAB * HIDDEN)


def test_by_blocks_earlier_stages_take_what_does_not_divide() -> None:
    assert blocks(4) == [(4, 1), (4, 2), (4, 1)]
    assert blocks(3) == [(6, 1), (5, 1), (5, 1)]


def test_by_flops_a_heavy_head_leaves_its_stage_fewer_blocks() -> None:
    # The head has the arithmetic of 2.2 blocks, so each of four stages is due 4.6 of them.
    assert blocks(4, BY_FLOPS) == [(5, 1), (5, 1), (4, 1), (2, 1)]


def test_by_flops_stages_may_stay_empty() -> None:
    stages = stages_of(GPT, 64, BY_FLOPS)
    assert stages.n_stages.sum() == 64
    assert stages.n_layers[-1].sum() == 0


def test_by_cost_measured_times_decide() -> None:
    heavy_first = (0.0, 9.0, *[1.0] * (N_BLOCKS - 1), 0.0)
    assert blocks(2, BY_COST, heavy_first) == [(4, 1), (12, 1)]  # 9 + 1 + 1 + 1 on either side


def test_a_stage_for_every_layer_at_most() -> None:
    with pytest.raises(ConfigError, match="as many stages as layers, 18; got 19"):
        stages_of(GPT, 19, PLAIN)


def test_tied_weights_are_shared_where_both_layers_are_in_one_stage() -> None:
    assert stages_of(GPT, 1, PLAIN).n_shared.tolist() == [VOCAB * 1024]
    assert stages_of(GPT, 2, PLAIN).n_shared.tolist() == [0, 0]


def test_a_sum_is_over_the_layers_of_a_stage() -> None:
    whole = stages_of(GPT, 1, PLAIN)
    assert whole.total("n_operations").tolist() == [EMBEDDING.n_operations + N_BLOCKS * 30 + HEAD.n_operations]


def test_a_problem_has_a_cost_for_every_layer_or_none() -> None:
    costs = (1.0,) * len(GPT.layers)
    assert replace(problem(), layer_costs=costs).layer_costs == costs
    with pytest.raises(ConfigError, match="a cost must be told of each layer; got 2 for 18"):
        replace(problem(), layer_costs=(1.0, 2.0))
