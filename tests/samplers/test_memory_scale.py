"""A few studies of the benchmark in which configs need another amount of memory than is expected of them."""

from __future__ import annotations

import pytest

from benchmarks.memory_scale import PROBLEMS, Ended, study, summary

SOME = {**PROBLEMS["chosen"], **PROBLEMS["reported"]}


def ended(name: str, factor: float, seed: int) -> Ended:
    return study(name, SOME[name], factor=factor, seed=seed)


@pytest.mark.parametrize("seed", [0, 4])
def test_a_study_goes_on_until_it_has_learnt_that_more_fits_than_was_expected(seed: int) -> None:
    found = ended("7B on 64 H100", 0.33, seed)
    assert found.has_converged
    assert found.left <= 1.01


def test_a_study_learns_within_a_few_trials_that_less_fits_than_was_expected() -> None:
    found = ended("3B on 32 A100", 3.0, 1)
    assert found.has_converged
    assert found.left <= 1.01
    assert found.n_failed <= 3


def test_of_several_studies_it_is_told_what_stopped_too_early_and_what_failed() -> None:
    def one(left: float, n_failed: int, *, has_converged: bool = True) -> Ended:
        return Ended(
            problem="some",
            factor=3.0,
            n_trials=10,
            n_failed=n_failed,
            has_converged=has_converged,
            promised=0.04,
            left=left,
        )

    told = summary(3.0, [one(1.0, 1), one(1.03, 2), one(1.005, 0), one(1.5, 5, has_converged=False)])
    assert (told.n_studies, told.failed, told.failed_of_ten, told.converged) == (4, 2.0, 2.0, 0.75)
    assert told.wrong == pytest.approx(1 / 3)
    assert told.worst == pytest.approx(0.03)
    assert told.promised == pytest.approx(0.04)
