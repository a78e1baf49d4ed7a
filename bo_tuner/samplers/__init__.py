"""Who chooses the next config."""

from bo_tuner.samplers.base import CandidateSampler, SpaceExhausted
from bo_tuner.samplers.table import SAMPLERS, asks_for_expectations, make_sampler

__all__ = ["SAMPLERS", "CandidateSampler", "SpaceExhausted", "asks_for_expectations", "make_sampler"]
