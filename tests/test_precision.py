"""When step times have settled, and what launches differ by: on traces like those of real trainings."""

from __future__ import annotations

import random

import pytest

from bo_tuner.precision import drift, settled_from

TARGET = 0.02


def steady(n: int, *, noise: float = 0.002, seed: int = 0) -> list[float]:
    """Step times as large GPU trainings show them: some 0.2 % around one value."""
    draw = random.Random(seed)
    return [1 + noise * draw.gauss(0, 1) for _ in range(n)]


# -- the warm-up ---------------------------------------------------------------------------------------------------


def test_the_first_step_is_left_out_and_three_that_agree_have_settled() -> None:
    assert settled_from(steady(3), tolerance=TARGET) is None
    assert settled_from([10.0, *steady(3)], tolerance=TARGET) == 1
    assert settled_from([1.0, *steady(3)], tolerance=TARGET) == 1


def test_every_slow_step_at_the_start_is_left_out() -> None:
    times = [10.0, 9.0, 4.0, *steady(20)]
    kept = [settled_from(times[:n], tolerance=TARGET) for n in range(4, 9)]
    assert kept[:2] == [None, None]
    assert kept[2] == 3, "as soon as three steps agree"


def test_a_steady_drift_never_settles_and_one_that_flattens_does() -> None:
    falling = [1.5 * 0.97**n for n in range(30)]
    assert all(settled_from(falling[:n], tolerance=TARGET) is None for n in range(len(falling)))
    flattened = [1 + 0.5 * 0.6**n for n in range(30)]
    settled = settled_from(flattened, tolerance=TARGET)
    assert settled is not None and settled > 3
    assert flattened[settled] < 1.03


def test_noise_without_a_trend_is_no_drift_however_large() -> None:
    n_settled = 0
    for seed in range(40):
        noisy = [10.0, *steady(15, noise=0.1, seed=seed)]
        n_settled += settled_from(noisy, tolerance=TARGET) is not None
    assert n_settled >= 38


@pytest.mark.parametrize("position", range(2, 9))
def test_a_stall_of_twenty_steps_is_no_end_of_the_warm_up(position: int) -> None:
    times = [1.5, *steady(9)]
    times[position] = 20.0
    assert settled_from(times, tolerance=TARGET) == 1


@pytest.mark.parametrize("n", [33, 100, 1000])
def test_long_traces_are_judged_by_the_same_rule(n: int) -> None:
    assert settled_from([10.0, *steady(n)], tolerance=TARGET) == 1
    assert settled_from([0.97**i for i in range(n)], tolerance=TARGET) is None
    stalls = [1.5, *(20.0 if i % 15 == 7 else time for i, time in enumerate(steady(n)))]
    assert settled_from(stalls, tolerance=TARGET) == 1


def test_what_is_known_to_be_warm_up_stays_so() -> None:
    assert settled_from([1.0] * 8, tolerance=TARGET, at_least=4) == 4


def test_drift_is_told_relative_to_the_median_over_the_whole_length() -> None:
    assert drift([1.0, 1.1, 1.2, 1.3, 1.4]) == pytest.approx(0.4 / 1.2)
    assert drift([2.0, 2.0, 40.0, 2.0, 2.0]) == 0
