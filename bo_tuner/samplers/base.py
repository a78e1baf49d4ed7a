"""`CandidateSampler`: an Optuna sampler that only ever proposes open candidates, whole."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from optuna.samplers import BaseSampler

from bo_tuner.config import TrainConfig
from bo_tuner.open_candidates import OpenCandidates
from bo_tuner.space import distributions
from bo_tuner.trial import TrialRecord, ranked, records_of

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

__all__ = ["CandidateSampler", "SpaceExhausted"]


class SpaceExhausted(Exception):
    """No candidate is left to run."""


class CandidateSampler(BaseSampler):
    """Base of our samplers: subclasses choose among the candidates that are still open.

    A choice depends on the seed and the finished trials alone, so a resumed study goes on as if never interrupted.
    """

    def __init__(self, candidates: OpenCandidates, *, seed: int) -> None:
        self._candidates = candidates
        self._seed = seed
        self.goal = candidates.goal
        """What the study is after: its scores are larger where a trial is better."""
        self.search_space: dict[str, BaseDistribution] = distributions(candidates.all)
        """The fixed distribution of every field."""

    @property
    def expects(self) -> bool:
        """It knows what to expect of candidates before any has run, so that the first trial is its choice too."""
        return False

    @abstractmethod
    def choose(self, records: Sequence[TrialRecord], candidates: Sequence[TrainConfig]) -> TrainConfig:
        """The next config: one of `candidates`, which is not empty."""

    def chance_of_gain(self, records: Sequence[TrialRecord], min_gain: float) -> float | None:
        """Probability that any open candidate is faster than the best trial by more than `min_gain`.

        Args:
            records: All trials so far.
            min_gain: As a fraction: 0.01 is 1 %.

        Returns:
            None where the sampler cannot tell.
        """
        return None

    def promising(self, records: Sequence[TrialRecord]) -> list[TrialRecord]:
        """The complete trials, the one whose config should be the best when it runs again first: of noisy ones not always the best as measured.

        Args:
            records: All trials so far.
        """
        return ranked(records)

    def best(self, records: Sequence[TrialRecord]) -> TrialRecord | None:
        """The first of the promising; None where no trial is complete."""
        return next(iter(self.promising(records)), None)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """All fields are chosen together."""
        return self.search_space

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The next config as Optuna parameters.

        Raises:
            SpaceExhausted: No candidate is left.
        """
        others = [other for other in study.get_trials(deepcopy=False) if other.number != trial.number]
        return self.next_config(records_of(others, self.goal)).params()

    def next_config(self, records: Sequence[TrialRecord]) -> TrainConfig:
        """The next config, given all trials so far.

        Raises:
            SpaceExhausted: No candidate is left.
        """
        candidates = self._candidates.open(records)
        if not candidates:
            raise SpaceExhausted
        return self.choose(self._candidates.standing(records), candidates)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Never right here: a field chosen alone makes an illegal config.

        Raises:
            ValueError: Always.
        """
        raise ValueError(f"{param_name!r} is not a field of this study's search space")
