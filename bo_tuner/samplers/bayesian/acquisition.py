"""What a trial of each candidate promises."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.special import logsumexp, ndtr

from bo_tuner.models.choices import Floats
from bo_tuner.samplers.bayesian.regression import Prediction

__all__ = ["chance_of_gain", "log_expected_improvement"]

_FAR = -5.0


def log_expected_improvement(predictions: Sequence[Prediction], best: float) -> Floats:
    """Logarithm of the expected improvement on `best`, over all beliefs (Jones et al., Journal of Global Optimization 13, 1998, equation 15;
    its logarithm stays apart where the improvement itself is zero to a computer: Ament et al., arXiv 2310.20708).

    Args:
        predictions: Of log rates.
        best: Highest log rate so far.
    """
    logs = []
    for prediction in predictions:
        z = (prediction.mean - best) / prediction.sd
        density = -0.5 * z**2 - 0.5 * np.log(2 * np.pi)
        near = np.log(np.maximum(np.exp(density) + z * ndtr(z), 1e-300))
        far = density - 2 * np.log(np.maximum(-z, 1.0))
        logs.append(np.log(prediction.weight) + np.log(prediction.sd) + np.where(z > _FAR, near, far))
    found: Floats = logsumexp(np.array(logs), axis=0)
    return found


def chance_of_gain(predictions: Sequence[Prediction], runs: Floats, level: float) -> float:
    """Probability that any candidate is over `level`.

    Under each belief candidates are taken as independent beside what the belief has them share with those that ran, which says too much
    rather than too little.

    Args:
        predictions: Of log rates.
        runs: Probability of each candidate to run at all.
        level: A log rate.
    """
    found = 0.0
    for prediction in predictions:
        chance = runs * ndtr((prediction.mean - level) / prediction.sd)
        found += prediction.weight * -float(np.expm1(np.log1p(-np.minimum(chance, 1 - 1e-12)).sum()))
    return found
