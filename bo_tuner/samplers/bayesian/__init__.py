"""Bayesian optimization over the candidates: what is expected of each before it runs, corrected by what was measured."""

from bo_tuner.samplers.bayesian.sampler import BayesianSampler

__all__ = ["BayesianSampler"]
