"""`ShadowSampler`: any stock Optuna sampler, over our candidates.

Stock samplers ignore failed trials, and some of them pruned ones, so they propose what ran out of memory again and again; they
know no legality and repeat themselves. Here the study is replayed into one in memory where a trial that ran out of memory is
complete, with the worst feasible value and a constraint; the stock sampler is asked there; and its answer is moved, all fields
together, to the nearest open candidate.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bo_tuner.config import TrainConfig
from bo_tuner.open_candidates import OpenCandidates
from bo_tuner.outcome import Outcome
from bo_tuner.samplers.base import CandidateSampler
from bo_tuner.trial import TrialRecord

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial

__all__ = ["ShadowSampler"]

_CONSTRAINT = "memory"


class ShadowSampler(CandidateSampler):
    """Wraps a stock sampler."""

    def __init__(self, candidates: OpenCandidates, *, seed: int, make: Callable[[int], BaseSampler]) -> None:
        """Wrap what `make` makes.

        Args:
            candidates: What may run.
            seed: Of the study.
            make: Gives the stock sampler for a seed; called for every proposal.
        """
        super().__init__(candidates, seed=seed)
        self._make = make
        self._params = {config: config.params() for config in candidates.all}
        self._varying = {
            name: space for name, space in self.search_space.items() if _varies(name, self._params.values())
        }

    def choose(self, records: Sequence[TrialRecord], candidates: Sequence[TrainConfig]) -> TrainConfig:
        """The open candidate nearest to what the stock sampler proposes."""
        if not self._varying:
            return candidates[0]
        import optuna

        verbosity = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.WARNING)  # the shadow is nobody's news
        shadow = optuna.create_study(
            directions=["maximize" for _ in self.goal.measures],
            sampler=self._make((self._seed * 1_000_003 + len(records)) % 2**32),
        )
        optuna.logging.set_verbosity(verbosity)
        shadow.add_trials(self.shadow_trials(records))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", category=optuna.exceptions.ExperimentalWarning)
            proposal = shadow.ask(self._varying).params
        return min(candidates, key=lambda config: self._distance(self._params.get(config) or config.params(), proposal))

    def shadow_trials(self, records: Sequence[TrialRecord]) -> list[FrozenTrial]:
        """The finished trials as the stock sampler sees them."""
        import optuna

        known = [scores for record in records if (scores := self.goal.scores(record)) is not None]
        worst = [min(of_measure) for of_measure in zip(*known, strict=True)] or [0.0] * len(self.goal.measures)
        trials: list[FrozenTrial] = []
        for record in records:
            result = record.result
            if result is None or not result.outcome.teaches:
                continue
            is_feasible = result.outcome in (Outcome.COMPLETE, Outcome.PRUNED)
            scores = self.goal.scores(result) or self.goal.bounds(result)
            if scores is None and result.outcome is Outcome.COMPLETE:
                continue  # what is not known is not made up
            params = record.config.params()
            trials.append(
                optuna.trial.create_trial(
                    values=scores if is_feasible and scores is not None else worst,
                    params={name: params[name] for name in self._varying},
                    distributions=dict(self._varying),
                    constraints={_CONSTRAINT: result.constraint if is_feasible else max(result.constraint, 0.01)},
                )
            )
        return trials

    def _distance(self, config: Mapping[str, Any], proposal: Mapping[str, Any]) -> float:
        return sum(_gap(space, config[name], proposal[name]) ** 2 for name, space in self._varying.items())


def _varies(name: str, rows: Iterable[Mapping[str, Any]]) -> bool:
    return len({row[name] for row in rows}) > 1


def _gap(space: BaseDistribution, ours: Any, proposed: Any) -> float:
    """Distance in one dimension, 0 to 1: relative to the range (of logarithms where the dimension is logarithmic)."""
    import optuna

    if isinstance(space, optuna.distributions.CategoricalDistribution):
        return float(ours != proposed)
    assert isinstance(space, optuna.distributions.IntDistribution | optuna.distributions.FloatDistribution)
    if space.log:
        return abs(math.log(ours / proposed)) / math.log(space.high / space.low)
    return float(abs(ours - proposed) / (space.high - space.low))
