"""The Gaussian processes: against the textbook's formula written out, and what they make of a cost model that is right or wrong."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from bo_tuner.samplers.bayesian.landscape import Landscape, alike
from bo_tuner.samplers.bayesian.regression import Belief, Bounded, Measured, Prediction, Regression, beliefs
from tests.samplers.bayesian.grounds import ground

TRUSTING = Belief(trusts=True, shared_sd=0.3, own_sd=0.05, weight=1.0)
DOUBTING = Belief(trusts=False, shared_sd=0.8, own_sd=0.1, weight=1.0)


def measured(where: Landscape, rates: Sequence[float], sd: float = 0.01) -> Measured:
    return Measured(where=where, log_rate=np.log(rates), sd=np.full(len(rates), sd))


def predict(of: Measured, candidates: Landscape, among: Sequence[Belief]) -> list[Prediction]:
    return Regression(of, among).predict(candidates)


def mean_of(predictions: Sequence[Prediction]) -> float:
    """Of the first config, over all beliefs."""
    return sum(prediction.weight * float(prediction.mean[0]) for prediction in predictions)


def test_a_trusting_belief_predicts_by_the_textbooks_formula() -> None:
    where = ground([0, 1, 3], rate=[10, 20, 30], shares=[[0.8, 0.2], [0.6, 0.4], [0.3, 0.7]])
    there = ground([2, 5], rate=[25, 40], shares=[[0.5, 0.5], [0.2, 0.8]])
    y = np.log([11.0, 18.0, 31.0])
    (found,) = predict(Measured(where=where, log_rate=y, sd=np.full(3, 0.02)), there, [TRUSTING])

    def covariance(one: Landscape, other: Landscape) -> np.ndarray:
        centre = where.log_rate.mean()
        return (
            2.0**2
            + 0.2**2 * one.shares @ other.shares.T
            + 0.05**2 * np.outer(one.log_rate - centre, other.log_rate - centre)
            + 0.3**2 * alike(one, other)
        )

    residuals = y - where.log_rate
    inverse = np.linalg.inv(covariance(where, where) + (0.05**2 + 0.02**2) * np.eye(3))
    across = covariance(there, where)
    mean = there.log_rate + residuals.mean() + across @ inverse @ (residuals - residuals.mean())
    variance = np.diag(covariance(there, there)) + 0.05**2 - np.einsum("ij,jk,ik->i", across, inverse, across)
    assert found.mean == pytest.approx(mean, abs=1e-6)
    assert found.sd == pytest.approx(np.sqrt(variance), rel=1e-4)
    assert found.weight == 1


def test_neighbours_have_much_in_common_and_other_sorts_less() -> None:
    near = alike(ground([0, 0, 0], sorts=[0, 0, 0]), ground([0, 1, 6], sorts=[0, 0, 0]))[0]
    assert near[0] == 1
    assert 1 > near[1] > 0.8
    assert 0.2 > near[2] > 0
    assert alike(ground([0]), ground([0], sorts=[1]))[0, 0] == pytest.approx(np.exp(-0.4))


def test_a_common_factor_is_learnt_from_one_trial() -> None:
    (found,) = predict(measured(ground([0], rate=[10]), [5.0]), ground([6], rate=[80]), [TRUSTING])
    assert np.exp(found.mean[0]) == pytest.approx(40, rel=0.02)


def test_a_part_of_the_step_that_takes_longer_than_expected_does_so_elsewhere() -> None:
    where = ground([0, 8], rate=[10, 10], shares=[[1.0, 0.0], [0.0, 1.0]])
    there = ground([4, 4], rate=[10, 10], shares=[[0.9, 0.1], [0.1, 0.9]])
    (found,) = predict(measured(where, [10.0, 7.0]), there, [TRUSTING])
    assert found.mean[1] < found.mean[0] - 0.05


def test_what_is_certain_is_certain_where_it_was_measured_and_less_far_away() -> None:
    where = ground([0, 1, 2])
    (found,) = predict(measured(where, [10.0, 11.0, 12.0]), ground([1, 3, 9]), [DOUBTING])
    assert found.sd[0] < found.sd[1] < found.sd[2]
    assert found.sd[0] >= DOUBTING.own_sd, "what a config has of its own is not learnt from others"


def test_a_noisy_trial_counts_less() -> None:
    where, there = ground([0, 4]), ground([4])
    sure = Measured(where=where, log_rate=np.log([10.0, 20.0]), sd=np.array([0.01, 0.01]))
    noisy = Measured(where=where, log_rate=np.log([10.0, 20.0]), sd=np.array([0.01, 1.0]))
    (by_sure,), (by_noisy,) = predict(sure, there, [DOUBTING]), predict(noisy, there, [DOUBTING])
    assert by_noisy.mean[0] < by_sure.mean[0]
    assert by_noisy.sd[0] > by_sure.sd[0]


def test_trust_fades_where_the_cost_model_is_contradicted() -> None:
    where = ground([0, 1, 2, 3, 4], rate=[1, 2, 4, 8, 16])
    among = beliefs(expects=True)
    assert sum(belief.weight for belief in among) == pytest.approx(1)

    def trust(rates: Sequence[float]) -> float:
        trusting = predict(measured(where, rates), where, [belief for belief in among if belief.trusts])
        every = predict(measured(where, rates), where, among)
        doubting = predict(measured(where, rates), where, [belief for belief in among if not belief.trusts])
        assert len(every) <= len(trusting) + len(doubting)
        same = {round(float(one.mean[0]), 12) for one in trusting}
        return sum(one.weight for one in every if round(float(one.mean[0]), 12) in same)

    assert trust([3.0, 6.1, 11.9, 24.2, 48.0]) > 0.99
    assert trust([48.0, 24.2, 11.9, 6.1, 3.0]) < 0.01


def test_without_a_cost_model_nothing_trusts_it() -> None:
    assert not any(belief.trusts for belief in beliefs(expects=False))
    assert sum(belief.weight for belief in beliefs(expects=False)) == pytest.approx(1)


def test_one_run_that_went_wrong_does_not_drag_its_neighbours_down() -> None:
    where, there = ground([0, 1, 2, 3], rate=[10, 10, 10, 10]), ground([4], rate=[10])
    (slow,), (much_slower,) = (predict(measured(where, [10, 10, 10, rate]), there, [TRUSTING]) for rate in (5, 0.05))
    assert much_slower.mean == pytest.approx(slow.mean)
    assert np.exp(mean_of(predict(measured(where, [10, 10, 10, 0.05]), there, beliefs(expects=True)))) > 4


def test_what_was_ended_early_counts_as_what_its_bound_leaves_of_the_prediction() -> None:
    where, bound = measured(ground([0]), [10.0]), np.log([11.0, 8.0])
    prediction = Prediction(weight=1.0, mean=np.log([10.0, 10.0]), sd=np.array([0.2, 0.2]))
    found = where.with_bounds(Bounded(where=ground([1, 2]), log_bound=bound), [prediction])
    draws = np.random.default_rng(0).normal(prediction.mean, prediction.sd, size=(400_000, 2))
    left = [column[column < limit] for column, limit in zip(draws.T, bound, strict=True)]
    assert found.log_rate[1:] == pytest.approx([float(column.mean()) for column in left], abs=0.003)
    assert found.sd[1:] == pytest.approx([float(column.std()) for column in left], abs=0.003)
    assert found.log_rate[0] == where.log_rate[0]


def test_what_runs_now_counts_as_if_it_gave_what_is_expected() -> None:
    flying = Bounded(where=ground([1]), log_bound=np.array([np.inf]))
    prediction = Prediction(weight=1.0, mean=np.array([2.0]), sd=np.array([0.5]))
    found = measured(ground([0]), [10.0]).with_bounds(flying, [prediction])
    assert (found.log_rate[1], found.sd[1]) == (2.0, 0.0)
    before, after = (predict(of, ground([1]), [DOUBTING])[0] for of in (measured(ground([0]), [10.0]), found))
    assert after.sd[0] < before.sd[0]


def test_noise_is_left_out_of_what_was_measured_as_far_as_it_is_noise() -> None:
    where = ground([0, 1, 2, 3], rate=[10, 10, 10, 10])
    y = np.log([10.0, 10.0, 14.0, 10.0])
    sure = Regression(Measured(where=where, log_rate=y, sd=np.full(4, 1e-6)), [TRUSTING]).log_rates
    assert sure == pytest.approx(y, abs=1e-6)
    noisy = Regression(Measured(where=where, log_rate=y, sd=np.full(4, 0.2)), [TRUSTING]).log_rates
    assert np.log(10) < noisy[2] < np.log(12.5)
    covariance = 2.0**2 + 0.2**2 * where.shares @ where.shares.T + 0.3**2 * alike(where, where) + 0.05**2 * np.eye(4)
    centre = y.mean()
    truth = centre + covariance @ np.linalg.inv(covariance + 0.2**2 * np.eye(4)) @ (y - centre)
    assert noisy == pytest.approx(truth, abs=1e-5)
