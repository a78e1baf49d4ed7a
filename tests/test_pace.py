"""What a step takes in the long run, on steps with stalls, periods and neighbours that are alike."""

from __future__ import annotations

import math
import random

import pytest

from bo_tuner.pace import pace
from bo_tuner.quantiles import half_width


def steady(n: int, *, noise: float = 0.002, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    return [1 + noise * draw.gauss(0, 1) for _ in range(n)]


@pytest.mark.parametrize("period", [2, 4, 8])
def test_a_stall_of_every_kth_step_counts_by_whole_periods_and_leaves_a_narrow_interval(period: int) -> None:
    times = [time + 3 * (at % period == period - 1) for at, time in enumerate(steady(4 * period + period // 2 + 3))]
    found = pace(tuple(times))
    assert found.period == period
    assert found.mean_s == pytest.approx(1 + 3 / period, rel=0.01)
    assert found.half_width_s < 0.02


def test_before_three_periods_are_seen_a_stall_counts_and_the_interval_is_wide() -> None:
    found = pace((*steady(7), 20.0))
    assert found.mean_s == pytest.approx(27 / 8, rel=0.01)
    assert found.half_width_s > 1
    assert found.left_out is None


def test_two_periods_are_enough_where_their_length_is_known() -> None:
    times = tuple(time + 3 * (at % 8 == 3) for at, time in enumerate(steady(18)))
    found = pace(times, 8)
    assert found.period == 8
    assert found.mean_s == pytest.approx(1 + 3 / 8, rel=0.01)
    assert found.half_width_s < 0.1
    assert pace(tuple(steady(18)), 8).period == 1, "nothing is held up"
    assert pace(times[:15], 8).period == 1, "one period does not tell how well it is known"


def test_a_stall_may_come_back_with_the_last_of_many_workers() -> None:
    times = steady(30)
    times[3] = 20.0
    assert pace(tuple(times), 32).left_out is None
    assert pace(tuple(times), 24).left_out == 3


@pytest.mark.parametrize("at", [0, 4, 20])
def test_a_stall_without_another_one_in_sixteen_steps_is_left_out(at: int) -> None:
    times = steady(21)
    times[at] = 20.0
    found = pace(tuple(times))
    assert found.left_out == at
    assert found.mean_s == pytest.approx(1, rel=0.01)


def test_stalls_that_come_back_count() -> None:
    times = steady(40)
    times[3] = times[30] = 10.0
    found = pace(tuple(times))
    assert found.left_out is None
    assert found.mean_s == pytest.approx(1 + 18 / 40, rel=0.01)


def test_the_largest_of_noisy_steps_is_no_stall() -> None:
    assert all(pace(tuple(steady(40, noise=0.1, seed=seed))).left_out is None for seed in range(50))


@pytest.mark.parametrize("correlation", [0.0, 0.9])
def test_steps_alike_to_their_neighbours_have_no_period(correlation: float) -> None:
    n_found = 0
    for seed in range(100):
        draw = random.Random(seed)
        value, times = draw.gauss(0, 1), list[float]()
        for _ in range(30):
            times.append(1 + 0.03 * value)
            value = correlation * value + math.sqrt(1 - correlation**2) * draw.gauss(0, 1)
        n_found += pace(tuple(times)).period > 1
    assert n_found <= 2


def test_one_step_says_nothing_of_how_well_it_is_known() -> None:
    found = pace((1.0,))
    assert (found.mean_s, found.half_width_s, found.sd_s) == (1.0, math.inf, 0.0)
    assert found.interval_s == (0.0, math.inf)


def test_no_interval_reaches_down_to_no_time() -> None:
    low, high = pace((1.0, 9.0)).interval_s
    assert 0 < low < 2.5 and 10 < high < math.inf


def test_equal_steps_are_known_exactly() -> None:
    assert pace((2.0,) * 6).half_width_s == pytest.approx(0, abs=1e-9)


def test_half_of_an_interval_of_a_mixture_leaves_one_in_twenty_outside() -> None:
    assert half_width([(3.0, 0.0, 2.0)]) == pytest.approx(1.96 * 2, rel=1e-3)
    assert half_width([(1.0, 50.0, 1.0)]) == pytest.approx(50 + 1.645, rel=1e-3)
    parts = [(0.7, 0.1, 1.0), (0.3, -0.4, 5.0)]
    reach = half_width(parts)
    draw = random.Random(0)
    drawn = [draw.gauss(*parts[draw.random() > 0.7][1:]) for _ in range(40_000)]
    assert sum(abs(value) > reach for value in drawn) / len(drawn) == pytest.approx(0.05, abs=0.005)


@pytest.mark.parametrize("noise", [0.002, 0.03, 0.1])
@pytest.mark.parametrize(("n", "widest"), [(2, 0.8), (3, 0.6), (5, 0.5)])
def test_few_steps_have_an_interval_that_is_wide_and_holds(n: int, widest: float, noise: float) -> None:
    found = [pace(tuple(steady(n, noise=noise, seed=seed))) for seed in range(100)]
    assert sum(abs(one.mean_s - 1) <= one.half_width_s for one in found) >= 95
    assert all(one.half_width_s < widest for one in found)
