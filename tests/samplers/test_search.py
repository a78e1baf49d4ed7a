"""A small run of the search benchmark: on measured tables that set no constant nothing finds the best sooner than the usual sampler."""

from __future__ import annotations

import pytest

from benchmarks.replays import Replay
from benchmarks.search import METHODS, Study, replays, rows, stops, studies
from bo_tuner.samplers import SAMPLERS

GROUPS = ("1B-32xH100", "3B-64xH100", "8B-128xH100", "80B-64xH100", "single-h1024l20s1024-8xA100-gbs16")
N_SEEDS = 5
BUDGETS = (5, 10)
NOISE = 0.01


@pytest.fixture(scope="module")
def groups() -> list[tuple[str, Replay]]:
    found = replays(only=GROUPS)
    assert len(found) == len(GROUPS)
    return found


def means(found: list[Study]) -> dict[int, float]:
    """Best over optimum by number of trials."""
    return {budget: sum(study.replayed.best[budget - 1] for study in found) / len(found) for budget in BUDGETS}


@pytest.fixture(scope="module")
def ours(groups: list[tuple[str, Replay]]) -> list[Study]:
    return studies(["bo"], groups, n_seeds=N_SEEDS, n_trials=20)


@pytest.mark.parametrize("method", [name for name in SAMPLERS if name not in ("bo", "grid")])
def test_no_other_sampler_finds_the_best_sooner(
    method: str, groups: list[tuple[str, Replay]], ours: list[Study]
) -> None:
    n_seeds = 1 if method == "gp" else N_SEEDS  # half a second a proposal
    theirs = means(studies([method], groups, n_seeds=n_seeds, n_trials=10))
    for budget, mean in means(ours).items():
        assert mean >= theirs[budget] - NOISE, (
            f"{method} reaches {theirs[budget]:.3f} in {budget} trials, bo {mean:.3f}"
        )


def test_the_best_is_found_in_ten_trials_with_few_that_fail(ours: list[Study]) -> None:
    assert means(ours)[10] >= 0.99
    assert sum(study.replayed.ran[:10].count(False) for study in ours) / len(ours) <= 2.5


def test_studies_that_end_by_themselves_leave_nothing_better_behind(ours: list[Study]) -> None:
    (stop,) = stops(ours, "some")
    assert stop.stopped >= 0.8
    assert stop.wrong <= 0.05
    assert stop.trials < 12


def test_with_a_useless_cost_model_it_is_still_better_than_chance(groups: list[tuple[str, Replay]]) -> None:
    misled, random = (means(studies([method], groups, n_seeds=N_SEEDS)) for method in ("bo-misled", "random"))
    assert misled[10] >= 0.85
    assert misled[10] >= random[10] + 0.1


def test_wrong_constants_cost_little(groups: list[tuple[str, Replay]]) -> None:
    assert means(studies(["bo-mistaken"], groups, n_seeds=N_SEEDS))[10] >= 0.97


def test_a_row_tells_of_one_method_at_one_budget(ours: list[Study]) -> None:
    found = rows(ours, "some")
    assert [row.budget for row in found] == [3, 5, 10, 20]
    for row in found:
        assert row.low <= row.mean <= row.high
        assert row.worst <= row.median <= 1
        assert row.within_2 <= row.within_5 <= 1
    assert {"bo-alone", "bo-mistaken", "bo-misled"} < set(METHODS)
