"""Searches by rule, without a model of what they see: what people and other tuners do, to compare with."""

from bo_tuner.samplers.heuristics.climb import ClimbSampler
from bo_tuner.samplers.heuristics.deepspeed import DeepSpeedSampler
from bo_tuner.samplers.heuristics.doubling import DoublingSampler

__all__ = ["ClimbSampler", "DeepSpeedSampler", "DoublingSampler"]
