"""The two baselines: random without repeats, and the grid in order."""

from __future__ import annotations

import random
from collections.abc import Sequence

from bo_tuner.config import TrainConfig
from bo_tuner.samplers.base import CandidateSampler
from bo_tuner.trial import TrialRecord

__all__ = ["GridSampler", "RandomSampler"]


class RandomSampler(CandidateSampler):
    """Uniform over the open candidates."""

    def choose(self, records: Sequence[TrialRecord], candidates: Sequence[TrainConfig]) -> TrainConfig:
        """A random one."""
        return random.Random(f"{self._seed}/{len(records)}").choice(candidates)


class GridSampler(CandidateSampler):
    """Every candidate in the order of the space."""

    def choose(self, records: Sequence[TrialRecord], candidates: Sequence[TrainConfig]) -> TrainConfig:
        """The first open one."""
        return candidates[0]
