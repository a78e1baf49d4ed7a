"""What launches differ by, how well that is known, and whether another launch lies where it is told to."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from benchmarks.coverage import held, measured_passes
from bo_tuner.launches import EXACT, Launch, LaunchNoise, prior_of

GPU = prior_of("cuda")
NO_STEPS = 1e-9


def launches(noise: float, n: int, draw: random.Random, *, steps: float = NO_STEPS) -> list[Launch]:
    """Of one config, told by steps that leave a standard deviation of `steps`."""
    return [Launch(draw.gauss(0, noise) + draw.gauss(0, steps), steps) for _ in range(n)]


def test_before_any_repeat_little_is_known_and_cpus_are_noisier() -> None:
    assert GPU.given([]) == GPU.given([launches(0.1, 1, random.Random(0))])
    assert GPU.sd < prior_of("cpu").sd
    assert GPU.given([]).half_width > 3 * GPU.sd, "wider than if the noise were known"


def test_many_repeats_outweigh_the_prior() -> None:
    for sd in (0.005, 0.05, 0.15):
        found = GPU.given([launches(sd, 61, random.Random(1))])
        assert found.sd == pytest.approx(sd, rel=0.25)
        assert found.half_width == pytest.approx(1.96 * found.sd, rel=0.05)
        assert found.n_free == 60


def test_repeats_of_several_configs_are_pooled_each_about_its_own_level() -> None:
    pair = [Launch(0.0, NO_STEPS), Launch(0.04, NO_STEPS)]
    far = [Launch(5.0 + one.log_step, one.sd) for one in pair]
    one, both = GPU.given([pair]), GPU.given([pair, far])
    assert (one.n_free, both.n_free) == (1, 2)
    assert both.half_width < one.half_width


def test_what_earlier_studies_showed_is_expected_and_the_next_may_still_differ() -> None:
    draw = random.Random(4)
    assert GPU.after([]) == GPU.after([launches(0.1, 1, draw)]) == GPU
    for sd in (0.005, 0.1):
        known = GPU.after([launches(sd, 5, draw) for _ in range(20)])
        assert known.sd == pytest.approx(sd, rel=0.25)
        assert 0.4 <= known.spread < 0.5
        assert known.given([launches(4 * sd, 9, draw)]).sd > 2 * sd


def test_what_the_steps_explain_is_not_counted_twice() -> None:
    draw = random.Random(2)
    wild = [launches(0.0, 2, draw, steps=0.1) for _ in range(50)]
    assert GPU.given(wild).sd < 0.03
    assert GPU.given([[Launch(one.log_step, NO_STEPS) for one in pair] for pair in wild]).sd > 0.08


def test_an_interval_that_says_nothing_teaches_nothing() -> None:
    assert GPU.given([[Launch.of(1.0, (0.0, math.inf)), Launch.of(2.0, (1.9, 2.1))]]) == GPU.given([])


def test_the_steps_and_the_launches_of_both_count() -> None:
    noise = LaunchNoise(sd=0.05, half_width=0.1, far=0.13, n_free=9)
    low, high = noise.another(2.0, (2.0, 2.0))
    assert math.log(high / 2.0) == pytest.approx(math.sqrt(2) * 0.1)
    assert low * high == pytest.approx(4.0)
    wider = noise.another(2.0, (1.8, 2.2))
    assert math.log(wider[1] / 2.0) == pytest.approx(math.sqrt(2) * math.hypot(0.1, math.log(1.1)))
    many = noise.another(2.0, (2.0, 2.0), n_launches=4)
    assert math.log(many[1] / 2.0) == pytest.approx(math.sqrt(1.25) * 0.1)
    assert noise.another(1.0, (0.0, math.inf)) == (0.0, math.inf)
    assert EXACT.another(2.0, (2.0, 2.0)) == (2.0, 2.0)


@pytest.mark.parametrize("noise", [0.02, 0.05, 0.1])
def test_another_launch_lies_in_the_interval_in_93_to_97_of_100_whatever_the_noise(noise: float) -> None:
    """As in a study of 20 trials at its end: one config has run five times, two finalists four times."""
    draw, shares = random.Random(round(1000 * noise)), list[float]()
    for _ in range(200):
        known = GPU.given([launches(noise, n, draw, steps=0.005) for n in (5, 4, 4)])
        for _ in range(20):
            step_s, other_s = (math.exp(one.log_step) for one in launches(noise, 2, draw, steps=0.005))
            low, high = known.another(step_s, (step_s * math.exp(-1.96 * 0.005), step_s * math.exp(1.96 * 0.005)))
            shares.append(low <= other_s <= high)
    assert 0.93 <= statistics.fmean(shares) <= 0.97


@pytest.mark.parametrize("noise", [0.02, 0.05, 0.1])
def test_the_first_intervals_of_a_study_hold_nearly_as_often(noise: float) -> None:
    """When its first config has run three times, and nothing else has run again."""
    draw, shares = random.Random(3), list[float]()
    both = math.sqrt(2) * math.hypot(noise, 0.005)
    for _ in range(400):
        _, high = GPU.given([launches(noise, 3, draw, steps=0.005)]).another(1.0, (math.exp(-0.0098), math.exp(0.0098)))
        shares.append(math.erf(math.log(high) / both / math.sqrt(2)))
    assert 0.9 <= statistics.fmean(shares) <= 0.97


def test_another_pass_over_the_measured_configs_lies_in_the_interval_in_93_to_97_of_100() -> None:
    configs = measured_passes()
    half = len(configs) // 2
    for own, others in ((configs[:half], configs[half:]), (configs[half:], configs[:half])):
        learnt = [held(own, prior_of("cpu").given([[one.launch for one in passes[:3]]])) for passes in others]
        assert 0.93 <= statistics.fmean(learnt) <= 0.97
