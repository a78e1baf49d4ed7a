"""Expected improvement and the chance of a gain: against drawn samples, and far in the tails."""

from __future__ import annotations

import numpy as np
import pytest

from bo_tuner.samplers.bayesian.acquisition import chance_of_gain, log_expected_improvement
from bo_tuner.samplers.bayesian.regression import Prediction


def predicted(weight: float, mean: list[float], sd: list[float]) -> Prediction:
    return Prediction(weight=weight, mean=np.array(mean), sd=np.array(sd))


TWO = [predicted(0.7, [0.0, 0.3, -0.4], [0.2, 0.05, 0.5]), predicted(0.3, [0.1, 0.1, 0.2], [0.3, 0.1, 0.1])]


def drawn(of: Prediction, n: int) -> np.ndarray:
    return np.random.default_rng(0).normal(of.mean, of.sd, size=(n, len(of.mean)))


def test_expected_improvement_is_the_mean_of_what_samples_improve() -> None:
    best = 0.15
    mean = sum(one.weight * np.maximum(drawn(one, 400_000) - best, 0).mean(axis=0) for one in TWO)
    assert np.exp(log_expected_improvement(TWO, best)) == pytest.approx(mean, rel=0.02)


def test_improvements_that_are_next_to_nothing_keep_their_order() -> None:
    far = [predicted(1.0, [-3.0, -5.0, -10.0, -50.0], [0.1] * 4)]
    logs = log_expected_improvement(far, 0.0)
    assert np.isfinite(logs).all()
    assert (np.diff(logs) < 0).all()


def test_the_far_formula_meets_the_near_one() -> None:
    before, after = log_expected_improvement([predicted(1.0, [-4.99, -5.01], [1.0, 1.0])], 0.0)
    assert after < before
    assert after == pytest.approx(before, abs=0.2)


def test_the_chance_of_a_gain_is_that_of_any_candidate_that_runs() -> None:
    runs, level = np.array([0.9, 0.5, 1.0]), 0.2
    chance = np.random.default_rng(1)
    share = 0.0
    for one in TWO:
        gains = (drawn(one, 200_000) > level) & (chance.random((200_000, 3)) < runs)
        share += one.weight * float(gains.any(axis=1).mean())
    assert chance_of_gain(TWO, runs, level) == pytest.approx(share, abs=0.005)


def test_what_cannot_run_gains_nothing_and_what_is_sure_gains_surely() -> None:
    sure = [predicted(1.0, [1.0], [1e-3])]
    assert chance_of_gain(sure, np.array([0.0]), 0.0) == 0
    assert chance_of_gain(sure, np.array([1.0]), 0.0) == pytest.approx(1)
