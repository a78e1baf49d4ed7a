"""Gaussian processes: how far measured rates are from expected ones, at configs that have not run.

Several beliefs about that, each a Gaussian process, are weighed by how well they explain what was measured (Rasmussen and Williams,
Gaussian Processes for Machine Learning, 2006, equations 2.23, 2.24 and 5.8; the weighing is Bayes' rule over a finite set in place
of a maximum, which says too much after few trials). Most take the cost model at its word but for errors that it could well have; some
do without it. So trust in it fades as fast as measurements contradict it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import log_ndtr

from bo_tuner.models.choices import Floats
from bo_tuner.samplers.bayesian.landscape import Landscape, alike, n_same

__all__ = ["Belief", "Bounded", "Measured", "Prediction", "Regression", "beliefs"]

_CONSTANT_SD = 2.0
"""Of the one factor by which all rates may be off. As all below, chosen on the groups of tables that calibrate the models."""
_SHARE_SD = 0.2
"""Of the logarithm of what each part of a step takes: 22 %."""
_SCALE_SD = 0.05
"""Of how much all differences between configs are over- or understated."""
_LINEAR_SD = 0.35
"""Without the cost model: of the slope of log rates along each dimension, per doubling or other value."""
_TRUSTING = tuple(itertools.product((0.05, 0.15, 0.4), (0.02, 0.05, 0.1)))
_DOUBTING = ((0.5, 0.1), (1.0, 0.1), (1.0, 0.2))
"""(what neighbours share, what each config has of its own): standard deviations of log rates."""
_DOUBT = 0.1
"""How likely it is beforehand that the cost model is of no use."""
_SLOWEST = 0.6
"""Residuals this far below the median (a run at 55 % of its rate) say only that something went wrong: farther ones count as these. Without
the cost model three times as far."""
_NEGLIGIBLE = 1e-3
_LEAST_LEFT = 1e-4
_JITTER = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class Belief:
    """One way in which rates may come about."""

    trusts: bool
    """The cost model is right but for errors of its constants."""
    shared_sd: float
    """Of log rates, what neighbours have in common beside that."""
    own_sd: float
    """What every config has for itself: no other tells of it."""
    weight: float
    """Probability before anything is measured."""

    def expected(self, where: Landscape) -> Floats:
        """Log rates, but for a common factor."""
        return where.log_rate if self.trusts else where.log_rule


def beliefs(*, expects: bool) -> list[Belief]:
    """All that are weighed.

    Args:
        expects: There is a cost model.
    """
    doubt = _DOUBT if expects else 1.0
    found = [
        Belief(trusts=False, shared_sd=shared, own_sd=own, weight=doubt / len(_DOUBTING)) for shared, own in _DOUBTING
    ]
    if expects:
        found += [
            Belief(trusts=True, shared_sd=shared, own_sd=own, weight=(1 - doubt) / len(_TRUSTING))
            for shared, own in _TRUSTING
        ]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What ran, one element a config."""

    where: Landscape
    log_rate: Floats
    """Of samples/s, or of another figure that is to be large."""
    sd: Floats
    """Of the logarithm, as another launch might show it."""

    def __len__(self) -> int:
        return len(self.log_rate)

    def with_bounds(self, bounded: Bounded, predictions: Sequence[Prediction]) -> Measured:
        """The same, and others of which only a bound is known: mean and standard deviation of what the likeliest belief leaves below it (of a
        normal distribution cut off above: Greene, Econometric Analysis, 2003, theorem 22.2).

        Args:
            bounded: The others.
            predictions: Of them, by what is measured.
        """
        likeliest = max(predictions, key=lambda prediction: prediction.weight)
        mean, sd = likeliest.mean, likeliest.sd
        is_cut = np.isfinite(bounded.log_bound)
        z = np.where(is_cut, (bounded.log_bound - mean) / sd, 0.0)
        ratio = np.where(is_cut, np.exp(-0.5 * z**2 - 0.5 * np.log(2 * np.pi) - log_ndtr(z)), 0.0)
        left = np.sqrt(np.maximum(1 - ratio * (ratio + z), _LEAST_LEFT))
        return Measured(
            where=Landscape.together([self.where, bounded.where]),
            log_rate=np.concatenate([self.log_rate, mean - sd * ratio]),
            sd=np.concatenate([self.sd, np.where(is_cut, sd * left, 0.0)]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounded:
    """What was ended early, or runs now; one element a config."""

    where: Landscape
    log_bound: Floats
    """Infinite where nothing is known yet: such a config counts as if it gave what is expected."""

    def __len__(self) -> int:
        return len(self.log_bound)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What one belief says of configs that have not run: normal distributions of log rates."""

    weight: float
    """Probability of the belief, after what was measured."""
    mean: Floats
    sd: Floats


class Regression:
    """All beliefs after what was measured."""

    def __init__(self, measured: Measured, among: Sequence[Belief]) -> None:
        """Learn.

        Args:
            measured: At least one config.
            among: What is weighed.
        """
        self._measured = measured
        common = alike(measured.where, measured.where)
        fits = [_Fit.of(belief, measured, common) for belief in among]
        evidence = np.array([fit.log_evidence for fit in fits])
        weights = np.exp(evidence - evidence.max())
        weights /= weights.sum()
        self._fits = [(fit, float(weight)) for fit, weight in zip(fits, weights, strict=True) if weight > _NEGLIGIBLE]

    @property
    def log_rates(self) -> Floats:
        """Of what was measured, as another launch should show them: noisy ones are drawn towards what is expected of them."""
        pulls = [weight * self._measured.sd**2 * (fit.whitened @ fit.whitening) for fit, weight in self._fits]
        found: Floats = self._measured.log_rate - np.sum(pulls, axis=0)
        return found

    def predict(self, candidates: Landscape) -> list[Prediction]:
        """What each belief that still counts says of configs that have not run."""
        common = alike(self._measured.where, candidates)
        return [fit.prediction(self._measured, candidates, common, weight=weight) for fit, weight in self._fits]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fit:
    """One belief after what was measured."""

    belief: Belief
    log_evidence: float
    centre: float
    """Mean of the residuals."""
    whitening: Floats
    """Inverse of the Cholesky factor of the covariance of what was measured."""
    whitened: Floats
    """Residuals less their mean, times that."""

    @classmethod
    def of(cls, belief: Belief, measured: Measured, common: Floats) -> _Fit:
        residuals = measured.log_rate - belief.expected(measured.where)
        lowest = np.median(residuals) - _SLOWEST * (1 if belief.trusts else 3)
        residuals = np.maximum(residuals, lowest)
        centre = float(residuals.mean())
        noise = belief.own_sd**2 + measured.sd**2 + _JITTER
        factor = np.linalg.cholesky(_covariance(belief, measured.where, measured.where, common) + np.diag(noise))
        whitening: Floats = np.linalg.inv(factor).astype(np.float64)
        whitened = whitening @ (residuals - centre)
        log_evidence = -0.5 * float(whitened @ whitened) - float(np.log(np.diag(factor)).sum()) + np.log(belief.weight)
        return cls(belief=belief, log_evidence=log_evidence, centre=centre, whitening=whitening, whitened=whitened)

    def prediction(self, measured: Measured, candidates: Landscape, common: Floats, *, weight: float) -> Prediction:
        belief = self.belief
        shared = self.whitening @ _covariance(belief, measured.where, candidates, common)
        variance = _variance(belief, measured.where, candidates) - (shared**2).sum(axis=0)
        mean = self.centre + self.whitened @ shared
        return Prediction(
            weight=weight,
            mean=mean + belief.expected(candidates),
            sd=np.sqrt(np.maximum(variance, _JITTER)),
        )


def _covariance(belief: Belief, measured: Landscape, theirs: Landscape, common: Floats) -> Floats:
    """Of log rates of what was measured and of others, without what each has for itself; shape (measured, theirs)."""
    ours, others = (_features(where, measured, belief) for where in (measured, theirs))
    found: Floats = belief.shared_sd**2 * common + ours @ others.T
    return found if belief.trusts else found + _LINEAR_SD**2 * n_same(measured, theirs)


def _variance(belief: Belief, measured: Landscape, theirs: Landscape) -> Floats:
    """Of the log rate of each of them, before anything is measured."""
    of_sorts = 0.0 if belief.trusts else _LINEAR_SD**2 * theirs.sorts.shape[1]
    found: Floats = (_features(theirs, measured, belief) ** 2).sum(axis=1)
    return found + of_sorts + belief.shared_sd**2 + belief.own_sd**2


def _features(where: Landscape, measured: Landscape, belief: Belief) -> Floats:
    """What log rates are linear in, each times the standard deviation of its coefficient; shape (configs, features)."""
    constant = np.full((len(where), 1), _CONSTANT_SD)
    if belief.trusts:
        stretched = where.log_rate - measured.log_rate.mean()
        return np.hstack([constant, _SHARE_SD * where.shares, _SCALE_SD * stretched[:, None]])
    return np.hstack([constant, _LINEAR_SD * (where.numbers - measured.numbers.mean(axis=0))])
