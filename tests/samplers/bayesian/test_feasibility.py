"""What is made of memory that was seen."""

from __future__ import annotations

import numpy as np
import pytest

from bo_tuner.samplers.bayesian.feasibility import Ended, MemorySeen, chance_of_fitting, chance_of_running
from bo_tuner.samplers.bayesian.landscape import Landscape
from tests.samplers.bayesian.grounds import GIB, ground

LIMIT = 16.0 * GIB
GROWING = ground([0, 1, 2, 3, 4], memory=[[8 * GIB, of_batch * GIB, GIB] for of_batch in (1, 2, 4, 8, 16)])
"""10, 11, 13, 17 and 25 GiB expected."""
SHARES = ground([0, 1, 2, 3, 4], memory=[[1.0, of_batch, of_batch] for of_batch in (1, 2, 4, 8, 16)])


def seen(where: Landscape, *, fitted: bool, peak_gib: float = np.nan, limit_bytes: float = LIMIT) -> MemorySeen:
    n = len(where)
    return MemorySeen(
        where=where,
        fitted=np.full(n, fitted),
        peak_bytes=np.full(n, peak_gib * GIB),
        limit_bytes=np.full(n, limit_bytes),
    )


NOTHING = seen(GROWING.at(np.array([], dtype=np.int64)), fitted=True)


def chances(so_far: MemorySeen, *, expects: bool = True) -> list[float]:
    return list(chance_of_fitting(so_far, GROWING, limit_bytes=LIMIT, expects=expects))


def at(place: int) -> Landscape:
    return GROWING.at(np.array([place]))


def test_before_anything_ran_it_is_unsure_near_the_limit_alone() -> None:
    first, *_, third, fourth, last = chances(NOTHING)
    assert first > 0.95
    assert third > 0.5 > fourth
    assert last < 0.05
    assert chances(NOTHING) == sorted(chances(NOTHING), reverse=True)


def test_a_peak_below_what_was_expected_makes_larger_ones_likelier() -> None:
    before, after = chances(NOTHING), chances(seen(at(2), fitted=True, peak_gib=10.5))
    assert after[3] > before[3] + 0.3
    assert chances(seen(at(2), fitted=True, peak_gib=15.5))[3] < 0.1


def test_of_what_ran_out_of_memory_it_is_known_only_that_it_needs_more_than_the_limit() -> None:
    before, after = chances(NOTHING), chances(seen(at(2), fitted=False))
    assert all(one < other for one, other in zip(after, before, strict=True))
    assert after[2] < 0.6
    assert after[0] > 0.8
    under_this, under_more = (chances(seen(at(3), fitted=False, limit_bytes=limit)) for limit in (LIMIT, 1.15 * LIMIT))
    assert under_more[2] < under_this[2], "what does not fit in more memory needs more"


def test_a_run_whose_peak_was_not_read_tells_that_it_fits() -> None:
    assert chances(seen(at(3), fitted=True))[3] > chances(NOTHING)[3] + 0.2


def test_a_trial_that_no_memory_explains_leaves_the_model_as_it_was() -> None:
    tiny = ground([0], memory=[[GIB, GIB, GIB]])
    assert chances(seen(tiny, fitted=False))[:2] == pytest.approx(chances(NOTHING)[:2], abs=0.15)


def test_where_only_proportions_are_known_the_lightest_is_likeliest_and_trials_tell_the_rest() -> None:
    def told(so_far: MemorySeen) -> list[float]:
        return list(chance_of_fitting(so_far, SHARES, limit_bytes=LIMIT, expects=False))

    before = told(seen(SHARES.at(np.array([], dtype=np.int64)), fitted=True))
    assert before == sorted(before, reverse=True)
    assert 0.05 < before[-1] < 0.5 < before[0] < 0.99
    assert told(seen(SHARES.at(np.array([2])), fitted=True))[2] > before[2] + 0.1
    assert told(seen(SHARES.at(np.array([1])), fitted=False))[2] < 0.2


def test_failures_that_memory_does_not_explain_are_blamed_on_neighbours() -> None:
    where = ground([0, 6])
    ended = Ended(where=where, blamed=np.array([1.0, 0.0]), ran=np.array([False, True]))
    near, far, nowhere = chance_of_running(ended, ground([0.5, 6.5, 40]))
    assert near < 0.6
    assert far > 0.9
    assert nowhere == pytest.approx(0.95, abs=0.01)
