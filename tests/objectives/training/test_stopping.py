"""When a trial has measured enough, or need not go on."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from bo_tuner.objectives.training.stopping import RankStep, StoppingRule
from bo_tuner.outcome import TrialLimits
from bo_tuner.pace import pace

BATCH = 100


def rule(*, n_ranks: int = 1, **limits: Any) -> StoppingRule:
    return StoppingRule(TrialLimits(memory_bytes=1, **limits), n_ranks=n_ranks, global_batch=BATCH)


def feed(stopping: StoppingRule, rank: int, *times_s: float) -> None:
    for total_s in times_s:
        stopping.add(rank, RankStep(total_s=total_s, engine_s=total_s))


def steps_until_done(stopping: StoppingRule, times_s: list[float]) -> int:
    """How many of `times_s` a trial of one rank makes."""
    for n, total_s in enumerate(times_s, 1):
        feed(stopping, 0, total_s)
        if stopping.is_done:
            return n
    raise AssertionError("it is never done")


def steady(n: int, *, step_s: float = 1.0, noise: float = 0.002, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    return [step_s * (1 + noise * draw.gauss(0, 1)) for _ in range(n)]


def test_steps_that_agree_end_a_trial_after_a_warm_up_of_one_and_few_measured() -> None:
    stopping = rule()
    assert steps_until_done(stopping, [2.0, *steady(50)]) == 6
    assert (stopping.n_warmup, stopping.is_settled, len(stopping.measured()[0])) == (1, True, 5)


def test_a_first_step_far_slower_costs_nothing() -> None:
    assert steps_until_done(rule(), [10.0, *steady(50)]) == 6
    stopping = rule()
    steps_until_done(stopping, [10.0, *steady(200, step_s=0.1, noise=0.3)])
    assert stopping.measured_s > 1.9, "its time is not that of the steps that count"


@pytest.mark.parametrize("position", range(1, 7))
def test_a_stall_is_measured_on_until_it_is_clear_that_it_does_not_come_back(position: int) -> None:
    times = [1.3, *steady(60, noise=0.001)]
    times[position] = 20.0
    stopping = rule(max_steps=60)
    n = steps_until_done(stopping, times)
    assert n <= position + 19
    assert pace(tuple(step.total_s for step in stopping.measured()[0])).mean_s == pytest.approx(1.0, abs=0.01)


def test_stalls_that_come_back_are_measured_until_their_share_is_known() -> None:
    times = [1.3, *(time + 3 * (at % 4 == 3) for at, time in enumerate(steady(60, step_s=0.1)))]
    stopping = rule()
    steps_until_done(stopping, times)
    found = pace(tuple(step.total_s for step in stopping.measured()[0]))
    assert found.mean_s == pytest.approx(0.85, rel=0.02)


def feed_loaded(stopping: StoppingRule, *waits_s: float, step_s: float) -> int:
    """Steps until it is done, each of which waits so long for its data."""
    for n, wait_s in enumerate(waits_s, 1):
        stopping.add(0, RankStep(total_s=step_s + wait_s, engine_s=step_s))
        if stopping.is_done:
            return n
    raise AssertionError("it is never done")


@pytest.mark.parametrize("first", range(6))
def test_two_whole_periods_of_a_loaders_workers_are_measured_however_long_steps_are(first: int) -> None:
    stopping = rule()
    stopping.loader_period = 6
    waits_s = [0.9 * (at % 6 == first) for at in range(60)]
    assert 14 <= feed_loaded(stopping, *waits_s, step_s=0.4) <= 16
    times = tuple(step.total_s for step in stopping.measured()[0])
    assert pace(times, 6).mean_s == pytest.approx(0.55, rel=0.001)


def test_a_loader_that_keeps_up_costs_one_period_and_a_step() -> None:
    stopping = rule()
    stopping.loader_period = 6
    assert feed_loaded(stopping, *[0.001] * 50, step_s=0.7) == 2 + 7
    assert feed_loaded(rule(), *[0.001] * 50, step_s=0.7) == 1 + 3


def test_a_drift_is_waited_out() -> None:
    falling = [1 + 0.5 * 0.7**n for n in range(60)]
    stopping = rule(max_steps=60)
    steps_until_done(stopping, falling)
    assert stopping.n_warmup >= 5
    assert all(step.total_s < 1.04 for step in stopping.measured()[0])


def test_a_drift_without_end_is_told_and_only_the_later_half_counts() -> None:
    stopping = rule(max_steps=20)
    assert steps_until_done(stopping, [1.5 * 0.95**n for n in range(60)]) == 20
    assert not stopping.is_settled
    assert stopping.n_warmup == 10


def test_noisy_steps_are_measured_until_the_target_or_the_limit() -> None:
    noisy = steady(500, noise=0.03, seed=4)
    tight = steps_until_done(rule(max_steps=500, precision_target=0.02), noisy)
    loose = steps_until_done(rule(max_steps=500, precision_target=0.06), noisy)
    assert 4 <= loose < tight < 500
    assert steps_until_done(rule(max_steps=15), noisy) == 15


def test_without_a_limit_steps_end_with_the_patience_for_them() -> None:
    wild = [1 + (n * 37 % 11) / 10 for n in range(500)]
    assert steps_until_done(rule(), [10 * time for time in wild]) == 4
    assert steps_until_done(rule(), [0.1 * time for time in wild]) == pytest.approx(1 + 4 / 0.15, abs=4)
    assert steps_until_done(rule(), [0.001 * time for time in wild]) == pytest.approx(0.5 / 0.0015, abs=4)


@pytest.mark.parametrize("step_s", [0.3, 0.7, 1.0, 2.0, 5.0])
@pytest.mark.parametrize("noise", [0.02, 0.1, 0.3])
def test_however_long_and_noisy_steps_are_three_count_at_least_and_they_have_an_interval(
    step_s: float, noise: float
) -> None:
    for seed in range(20):
        stopping = rule()
        n = steps_until_done(stopping, [6.0, *steady(100, step_s=step_s, noise=noise, seed=seed)])
        times = [step.total_s for step in stopping.measured()[0]]
        assert len(times) >= 3
        assert n >= (6 if step_s <= 1 else 4)
        assert math.fsum(times) < 12 * max(step_s, 1)
        assert 0 < pace(tuple(times)).half_width_s < math.inf


def test_steps_of_a_blink_are_not_believed_at_once() -> None:
    assert steps_until_done(rule(), steady(100, step_s=0.02)) >= 0.5 / 0.02


def test_a_confirmation_measures_at_least_what_it_is_told() -> None:
    assert steps_until_done(rule(min_steps=20), [2.0, *steady(50)]) == 21
    assert steps_until_done(rule(min_steps=20), [20 * time for time in [2.0, *steady(50)]]) == 21, (
        "however long it takes"
    )


def test_a_trial_slower_than_the_incumbent_ends_at_once_with_its_bound() -> None:
    stopping = rule(incumbent_samples_per_s=140.0, max_steps=50, launch_half_width=0.03)
    times = [1.0, *steady(50, noise=0.03)]
    assert steps_until_done(stopping, times) <= 6
    assert stopping.bound_samples_per_s is not None
    assert 100 < stopping.bound_samples_per_s < 140
    assert steps_until_done(rule(max_steps=50, launch_half_width=0.03), times) > 20


def test_a_trial_within_its_interval_of_the_incumbent_goes_on() -> None:
    stopping = rule(incumbent_samples_per_s=102.0, max_steps=50, launch_half_width=0.03)
    assert steps_until_done(stopping, [1.0, *steady(50, noise=0.03)]) > 20
    assert stopping.bound_samples_per_s is None


def test_the_slowest_rank_sets_the_step() -> None:
    stopping = rule(n_ranks=2, incumbent_samples_per_s=100.0)
    feed(stopping, 0, *[0.5] * 9)
    assert stopping.n_finished == 0 and not stopping.is_done
    feed(stopping, 1, 2.0)
    assert stopping.n_finished == 1 and not stopping.is_done
    feed(stopping, 1, 2.0)
    assert stopping.is_done
    assert stopping.bound_samples_per_s == pytest.approx(85, rel=0.1)
    assert [[step.total_s for step in row] for row in stopping.measured()] == [[0.5], [2.0]]


@pytest.mark.parametrize(("step_s", "n"), [(1.8, 2), (1.5, 3), (1.1, None)])
def test_long_steps_tell_a_loser_the_sooner_the_slower_they_are(step_s: float, n: int | None) -> None:
    stopping = rule(incumbent_samples_per_s=100.0, max_steps=50)
    made = steps_until_done(stopping, [9.0, *steady(60, step_s=step_s, noise=0.0)])
    if n is not None:
        assert made == n
    assert (stopping.bound_samples_per_s is not None) == (step_s > 1.3)


def test_a_trial_that_has_run_all_its_steps_is_complete_however_slow() -> None:
    stopping = rule(incumbent_samples_per_s=1000.0, max_steps=4)
    steps_until_done(stopping, [0.2] * 4)
    assert stopping.bound_samples_per_s is None
    assert len(stopping.measured()[0]) == 3


def test_a_step_is_said_to_warm_up_only_where_it_does() -> None:
    stopping = rule(max_steps=50)
    told = []
    for time_s in [9.0, *steady(4)]:
        feed(stopping, 0, time_s)
        told.append(stopping.phase)
    assert told == ["warmup", "measure", "measure", "measure", "measure"]
    falling = rule(max_steps=50)
    feed(falling, 0, *[0.8**n for n in range(6)])
    assert falling.phase == "warmup"


@pytest.mark.parametrize(("max_steps", "n_measured"), [(1, 1), (2, 1), (3, 2)])
def test_a_limit_below_the_warm_up_still_measures(max_steps: int, n_measured: int) -> None:
    stopping = rule(max_steps=max_steps)
    assert steps_until_done(stopping, [1.0] * 9) == max_steps
    assert len(stopping.measured()[0]) == n_measured


def test_the_number_of_steps_to_expect_follows_their_length() -> None:
    stopping = rule()
    assert stopping.n_steps == 4
    feed(stopping, 0, 9.0, 0.1)
    assert stopping.n_steps == 41
    long = rule()
    feed(long, 0, 9.0, 5.0)
    assert long.n_steps == 4
    assert rule(max_steps=9).n_steps == 9


@pytest.mark.parametrize(("correlation", "least"), [(0.0, 95), (0.5, 87), (0.9, 83)])
def test_the_interval_of_a_trial_holds_though_steps_are_alike_to_their_neighbours(
    correlation: float, least: int
) -> None:
    """Of 100; an interval for independent steps holds in about 65 at a correlation of 0.9."""
    held = 0
    for seed in range(100):
        draw = random.Random(seed)
        stopping, value = rule(), draw.gauss(0, 1)
        while not stopping.is_done:
            feed(stopping, 0, 0.05 * (1 + 0.03 * value))
            value = correlation * value + math.sqrt(1 - correlation**2) * draw.gauss(0, 1)
        found = pace(tuple(step.total_s for step in stopping.measured()[0]))
        held += abs(found.mean_s - 0.05) <= found.half_width_s
    assert held >= least
