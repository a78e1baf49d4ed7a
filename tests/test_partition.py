"""Cutting a chain into stages: exact, and in favour of short early stages."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from bo_tuner.errors import ConfigError
from bo_tuner.partition import stage_bounds


def stages(costs: Sequence[float], bounds: Sequence[int]) -> list[list[float]]:
    return [list(costs[begin:end]) for begin, end in itertools.pairwise(bounds)]


def every_cut(n_layers: int, n_stages: int) -> list[list[int]]:
    return [[0, *cuts, n_layers] for cuts in itertools.combinations(range(1, n_layers), n_stages - 1)]


def worst(costs: Sequence[float], bounds: Sequence[int]) -> float:
    return max(sum(stage) for stage in stages(costs, bounds))


@pytest.mark.parametrize("kind", ["whole", "fractions", "with zeros", "alike", "one heavy"])
@pytest.mark.parametrize("n_layers", range(1, 10))
def test_the_most_expensive_stage_is_as_cheap_as_that_of_any_other_cut(n_layers: int, kind: str) -> None:
    numbers = random.Random(f"{kind} {n_layers}")
    for _ in range(12):
        costs: list[float] = {
            "whole": [float(numbers.randint(1, 9)) for _ in range(n_layers)],
            "fractions": [numbers.random() for _ in range(n_layers)],
            "with zeros": [float(numbers.choice([0, 0, 1, 3])) for _ in range(n_layers)],
            "alike": [2.0] * n_layers,
            "one heavy": [100.0 if number == n_layers // 2 else numbers.random() for number in range(n_layers)],
        }[kind]
        for n_stages in range(1, n_layers + 1):
            found = stage_bounds(costs, n_stages)
            assert found in every_cut(n_layers, n_stages)
            best = min(worst(costs, cut) for cut in every_cut(n_layers, n_stages))
            assert worst(costs, found) == pytest.approx(best, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("n_layers", range(2, 8))
def test_of_equally_good_cuts_the_last_stage_takes_most_and_those_before_it_are_cut_in_the_same_way(
    n_layers: int,
) -> None:
    """Earlier stages keep more micro-batches in flight, so the layers that are left over go to the later ones."""
    numbers = random.Random(n_layers)
    for _ in range(20):
        costs = [float(numbers.randint(0, 3)) for _ in range(n_layers)]
        for n_stages in range(1, n_layers + 1):
            best = min(worst(costs, cut) for cut in every_cut(n_layers, n_stages))
            equals = [cut for cut in every_cut(n_layers, n_stages) if worst(costs, cut) == best]
            found = stage_bounds(costs, n_stages)
            assert found[-2] == min(cut[-2] for cut in equals)
            if n_stages > 1:
                assert found[:-1] == stage_bounds(costs[: found[-2]], n_stages - 1)


@pytest.mark.parametrize(
    ("costs", "n_stages", "bounds"),
    [
        ([1, 1, 1, 1], 2, [0, 2, 4]),
        ([1, 1, 1, 1, 1], 2, [0, 2, 5]),
        ([1, 1, 1, 1, 1, 1, 1], 3, [0, 2, 4, 7]),
        ([5, 1, 1, 1, 5], 3, [0, 1, 4, 5]),
        ([1, 1, 1, 9], 2, [0, 3, 4]),
        ([0, 0, 0], 3, [0, 1, 2, 3]),
        ([3], 1, [0, 1]),
    ],
)
def test_known_cuts(costs: list[float], n_stages: int, bounds: list[int]) -> None:
    assert stage_bounds(costs, n_stages) == bounds


def test_a_deep_model_is_cut_at_once() -> None:
    costs = [1.0, *[4.0] * 200, 9.0]
    assert worst(costs, stage_bounds(costs, 16)) == 52.0


@pytest.mark.parametrize("n_stages", [0, -1, 4])
def test_a_number_of_stages_that_cannot_be_is_refused(n_stages: int) -> None:
    with pytest.raises(ConfigError) as caught:
        stage_bounds([1.0, 2.0, 3.0], n_stages)
    assert str(caught.value) == f"a pipeline needs from 1 to as many stages as layers, 3; got {n_stages}"
