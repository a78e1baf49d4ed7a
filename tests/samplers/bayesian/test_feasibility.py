"""What is made of memory that was seen."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from bo_tuner.config import TrainConfig
from bo_tuner.outcome import Outcome, TrialResult
from bo_tuner.samplers.bayesian.feasibility import Ended, chance_of_running, scales_of
from bo_tuner.samplers.bayesian.landscape import Landscape
from bo_tuner.samplers.bayesian.memory_scales import Doubts, MemoryScales, MemorySeen, memory_bounds
from bo_tuner.trial import TrialRecord
from tests.samplers.bayesian.grounds import GIB, ground

LIMIT = 16.0 * GIB
GROWING = ground([0, 1, 2, 3, 4], memory=[[8 * GIB, of_batch * GIB, GIB] for of_batch in (1, 2, 4, 8, 16)])
"""10, 11, 13, 17 and 25 GiB expected."""
SHARES = ground([0, 1, 2, 3, 4], memory=[[1.0, of_batch, of_batch] for of_batch in (1, 2, 4, 8, 16)])


def seen(where: Landscape, *, fitted: bool, peak_gib: float | None = None, limit_bytes: float = LIMIT) -> MemorySeen:
    if peak_gib is not None:
        return peaks(where, [peak_gib * GIB] * len(where))
    bounds = (0.0, limit_bytes) if fitted else (limit_bytes, math.inf)
    least, most = (np.full(len(where), bound) for bound in bounds)
    return MemorySeen(where=where, least_bytes=least, most_bytes=most)


def peaks(where: Landscape, needed: Sequence[float] | np.ndarray) -> MemorySeen:
    return MemorySeen(where=where, least_bytes=np.array(needed), most_bytes=np.array(needed))


def chance_of_fitting(so_far: MemorySeen, there: Landscape, *, limit_bytes: float, expects: bool) -> list[float]:
    return list(scales_of(so_far, limit_bytes=limit_bytes, expects=expects).chance_of_fitting(there, limit_bytes))


NOTHING = seen(GROWING.at(np.array([], dtype=np.int64)), fitted=True)


def chances(so_far: MemorySeen, *, expects: bool = True) -> list[float]:
    return chance_of_fitting(so_far, GROWING, limit_bytes=LIMIT, expects=expects)


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
    tiny = ground([0], memory=[[GIB / 1000, GIB / 1000, GIB / 1000]])
    assert chances(seen(tiny, fitted=False))[:2] == pytest.approx(chances(NOTHING)[:2], abs=0.15)


MANY = ground(range(12), memory=[[2 * GIB, (1 + place) * GIB, GIB] for place in range(12)])
"""4 to 15 GiB expected."""


@pytest.mark.parametrize("factor", [0.2, 0.33, 0.6, 1.0, 1.6, 3.0, 5.0])
def test_twelve_peaks_are_believed_however_far_they_are_from_what_was_expected(factor: float) -> None:
    others = np.random.default_rng(0).normal(0.0, 0.05, size=len(MANY))
    needed = factor * MANY.memory.sum(axis=1) * np.exp(others)
    there = ground(
        [0, 0], memory=[[share * GIB / factor for share in (4, 8, 1)], [share * GIB / factor for share in (8, 12, 2)]]
    )
    fits, does_not = chance_of_fitting(peaks(MANY, needed), there, limit_bytes=LIMIT, expects=True)  # 13 and 22 GiB
    assert fits > 0.9
    assert does_not < 0.05
    scales = scales_of(peaks(MANY, needed), limit_bytes=LIMIT, expects=True)
    assert scales.needed_bytes(MANY) == pytest.approx(needed, rel=0.2), "which decides what is weighed of a crowd"


@pytest.mark.parametrize("factor", [1.6, 3.0, 5.0])
def test_what_ran_out_of_memory_moves_expectations_without_a_single_peak(factor: float) -> None:
    over = MANY.at(np.flatnonzero(factor * MANY.memory.sum(axis=1) > LIMIT))
    before = chance_of_fitting(NOTHING, over, limit_bytes=LIMIT, expects=True)
    after = chance_of_fitting(seen(over, fitted=False), over, limit_bytes=LIMIT, expects=True)
    assert before[0] > 0.7
    assert after[0] < 0.3


def test_of_what_only_fitted_it_is_known_that_all_that_should_need_less_fits_too() -> None:
    larger = ground([0, 1, 2], memory=[[16 * GIB, of_batch * GIB, GIB] for of_batch in (8, 16, 32)])
    before = chance_of_fitting(NOTHING, larger, limit_bytes=LIMIT, expects=True)
    after = chance_of_fitting(seen(larger.at(np.array([1, 2])), fitted=True), larger, limit_bytes=LIMIT, expects=True)
    assert before[0] < 0.1
    assert after[0] > 0.9


def test_a_model_of_another_shape_is_trusted_less() -> None:
    strayed = 2.0 ** np.array([1, -1] * 6) * MANY.memory.sum(axis=1)
    near = ground([0], memory=[[5 * GIB, 5 * GIB, GIB]])  # 11 GiB, where 16 are there
    exact = chance_of_fitting(peaks(MANY, MANY.memory.sum(axis=1)), near, limit_bytes=LIMIT, expects=True)[0]
    assert exact > 0.95
    assert 0.4 < chance_of_fitting(peaks(MANY, strayed), near, limit_bytes=LIMIT, expects=True)[0] < 0.9


@pytest.mark.parametrize("factor", [0.2, 0.33, 1.0, 3.0, 5.0])
@pytest.mark.parametrize("n_seen", [1, 4, 12])
def test_enough_worlds_count_however_far_memory_is_from_what_was_expected(factor: float, n_seen: int) -> None:
    needed = factor * MANY.memory.sum(axis=1)[:n_seen]
    fitted = needed <= LIMIT
    told = MemorySeen(
        where=MANY.at(np.arange(n_seen)),
        least_bytes=np.where(fitted, needed, LIMIT),
        most_bytes=np.where(fitted, needed, np.inf),
    )
    scales = MemoryScales.of(told, Doubts(common=0.1, group=(0.15, 0.25, 0.5), own=0.08))
    assert scales.n_effective > 40
    if fitted.sum() > 1:
        middle = float(scales.weights @ np.log(np.exp(scales.log_scales) @ MANY.memory[0]))
        assert middle == pytest.approx(math.log(needed[0]), abs=0.1)


def test_peaks_tell_the_rest_where_only_proportions_are_known() -> None:
    needed = 3 * GIB * SHARES.memory.sum(axis=1)  # 9, 15, 27 ...
    told = peaks(SHARES.at(np.array([0, 1, 2])), needed[:3])
    chance = chance_of_fitting(told, SHARES, limit_bytes=40 * GIB, expects=False)
    assert chance[1] > 0.9
    assert chance[3] < 0.5 and chance[4] < 0.1


def record(*runs: TrialResult) -> TrialRecord:
    return TrialRecord(number=0, config=TrainConfig(), result=runs[0], repeats=runs[1:])


def test_a_trial_bounds_what_its_config_needs() -> None:
    complete = TrialResult(outcome=Outcome.COMPLETE, peak_memory_bytes=700, limit_bytes=1000)
    refused = TrialResult(outcome=Outcome.OOM, peak_memory_bytes=900, requested_bytes=300, limit_bytes=1000)
    stopped = TrialResult(outcome=Outcome.GUARDED, peak_memory_bytes=1010, limit_bytes=1000)
    killed = TrialResult(outcome=Outcome.HOST_OOM, limit_bytes=1000)
    unread = TrialResult(outcome=Outcome.PRUNED, limit_bytes=1000)
    hung = TrialResult(outcome=Outcome.TIMEOUT, peak_memory_bytes=400, limit_bytes=1000)
    assert memory_bounds(record(complete)) == (700, 700)
    assert memory_bounds(record(refused)) == (1200, math.inf)
    assert memory_bounds(record(stopped)) == (1010, math.inf)
    assert memory_bounds(record(killed)) == (1000, math.inf)
    assert memory_bounds(record(unread)) == (0, 1000)
    assert memory_bounds(record(hung)) == (400, math.inf)
    assert memory_bounds(record(complete, refused)) == (1200, math.inf), "it does not fit every time"
    assert memory_bounds(record(TrialResult(outcome=Outcome.FAILED))) == (0, math.inf)


def test_where_only_proportions_are_known_the_lightest_is_likeliest_and_trials_tell_the_rest() -> None:
    def told(so_far: MemorySeen) -> list[float]:
        return chance_of_fitting(so_far, SHARES, limit_bytes=LIMIT, expects=False)

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
