"""`BayesianSampler`: the config whose trial promises most, by what is expected of it and what was measured of others."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from bo_tuner.config import TrainConfig
from bo_tuner.goal import Goal
from bo_tuner.launches import EXACT, LaunchNoise
from bo_tuner.models.choices import Flags, Floats, Problem
from bo_tuner.models.gentlest import AS_EXPECTED, AS_MEASURED, gentlest
from bo_tuner.open_candidates import OpenCandidates
from bo_tuner.outcome import TrialResult
from bo_tuner.samplers.base import CandidateSampler
from bo_tuner.samplers.bayesian.acquisition import chance_of_gain, log_expected_improvement
from bo_tuner.samplers.bayesian.feasibility import Ended, chance_of_running, scales_of
from bo_tuner.samplers.bayesian.landscape import Landscape, Map
from bo_tuner.samplers.bayesian.memory_scales import MemoryScales, MemorySeen, memory_bounds
from bo_tuner.samplers.bayesian.regression import Bounded, Measured, Regression, beliefs
from bo_tuner.trial import TrialRecord

__all__ = ["BayesianSampler"]

_IN_EXPECTED_ORDER = 2
"""Trials that go by the cost model alone, if there is one: with fewer, what is measured moves all expectations alike."""
_USUAL_SD = 0.005
"""Of a measured log rate, where its interval is not known; and at least so much."""
_MOST_SD = 0.3
_COST_POWER = 0.3
"""What the seconds of a trial count against what it promises, at first; ..."""
_COOLING = 0.8
"""... after each trial so many times as much (Lee et al., arXiv 2003.10870, section 4)."""
_CAUTION = 4.0
"""For the share of trials that memory ended: by so much more the chance to run counts."""
_START_UP_S = 20.0
"""Of a trial, until one has told."""
_USUAL_STEPS = 8
_MOST_WEIGHED = 5000
_MOST_MEMORY = 2.0
"""Times the limit: what should need more, after what was seen, is not worth weighing as long as other candidates are many."""
_FEWEST_TO_STOP = 4
"""Trials that ran, before it may be said that nothing better is left."""


class BayesianSampler(CandidateSampler):
    """The first trials in expected order, later ones by expected improvement, each weighed by its chance to run, and by its cost.

    Where nothing is expected, those that most likely fit come first, until one runs.

    What is in flight counts as if it gave what is expected of it (the kriging believer of Ginsbourger et al., 2010), so that others look
    elsewhere; what was ended early, as far below its bound as that says. Under a goal of two measures each trial looks for the best mean of
    their logarithms, in other proportions from trial to trial (Knowles, IEEE Transactions on Evolutionary Computation 10, 2006).
    """

    def __init__(self, candidates: OpenCandidates, *, seed: int, problem: Problem | None = None) -> None:
        """Choose among `candidates`.

        Args:
            candidates: What may run.
            seed: Of what is drawn where candidates are very many.
            problem: What the cost and memory models expect something of; None where they do not know the space.
        """
        super().__init__(candidates, seed=seed)
        self._limit_bytes = float(candidates.limit_bytes)
        self._map = Map(candidates.all, problem, n_ranks=candidates.n_ranks)
        self._beliefs = beliefs(expects=self._map.expects)

    @property
    def expects(self) -> bool:
        """There is a cost model."""
        return self._map.expects

    def choose(self, records: Sequence[TrialRecord], candidates: Sequence[TrainConfig]) -> TrainConfig:
        """The one that promises most; of those that promise about as much, the one with the smallest step."""
        first = _share_of_first(len(records)) if self.goal.has_front else 1.0
        known = _Known.of(records, self._map, self.goal, first)
        scales = self._scales(known)
        weighed, there = self._worth_weighing(candidates, scales)
        there = there.aimed(first)
        score = known.caution * np.log(self._runs(known, scales, there)) + self._promise(known, there)
        batches = np.array([config.global_batch(self._candidates.n_ranks) for config in weighed], dtype=float)
        alike = AS_EXPECTED if self._goes_by_expectation(known) else AS_MEASURED
        return weighed[gentlest(score, batches, alike=alike)]

    def chance_of_gain(self, records: Sequence[TrialRecord], min_gain: float) -> float | None:
        """Probability that any open candidate is better than the best by more than `min_gain`; None under a goal with a front."""
        candidates = self._candidates.open(records)
        known = _Known.of(self._candidates.standing(records), self._map, self.goal)
        if self.goal.has_front or not candidates or not len(known.measured) or known.ran.sum() < _FEWEST_TO_STOP:
            return None
        scales = self._scales(known)
        _, there = self._worth_weighing(candidates, scales)
        learnt, best = self._learnt(known)
        return chance_of_gain(learnt.predict(there), self._runs(known, scales, there), best + math.log1p(min_gain))

    def promising(self, records: Sequence[TrialRecord]) -> list[TrialRecord]:
        """The complete trials by their rate, noise left out; of two measures the first counts."""
        known = _Known.of(self._candidates.standing(records), self._map, self.goal)
        if not known.complete:
            return []
        order = np.argsort(-Regression(known.measured, self._beliefs).log_rates, kind="stable")
        return [known.complete[int(place)] for place in order]

    def _worth_weighing(
        self, candidates: Sequence[TrainConfig], scales: MemoryScales
    ) -> tuple[Sequence[TrainConfig], Landscape]:
        """All, or where they are very many, those that should be fastest and as many others at random."""
        there = self._map.of(candidates)
        if len(candidates) <= 2 * _MOST_WEIGHED:
            return candidates, there
        by_rate = there.log_rate if self._map.expects else there.log_rule
        may_fit = scales.needed_bytes(there) <= _MOST_MEMORY * self._limit_bytes
        order = np.argsort(-np.where(may_fit, by_rate, by_rate.min() - 1), kind="stable")
        drawn = np.random.default_rng(self._seed).choice(order[_MOST_WEIGHED:], _MOST_WEIGHED, replace=False)
        chosen = np.sort(np.concatenate([order[:_MOST_WEIGHED], drawn]))
        return [candidates[place] for place in chosen], there.at(chosen)

    def _promise(self, known: _Known, there: Landscape) -> Floats:
        """Logarithm of what a trial may gain over what it costs."""
        if self._goes_by_expectation(known):
            return there.log_rate
        learnt, best = self._learnt(known)
        gain = log_expected_improvement(learnt.predict(there), best)
        if not self._map.expects:
            return gain
        return gain - _COST_POWER * _COOLING**known.n_trials * np.log(known.start_up_s + _USUAL_STEPS * there.step_s)

    def _goes_by_expectation(self, known: _Known) -> bool:
        """What was measured does not say yet which candidates are faster than others."""
        return not len(known.measured) or (self._map.expects and known.n_trials < _IN_EXPECTED_ORDER)

    def _learnt(self, known: _Known) -> tuple[Regression, float]:
        """What the trials teach, once something is measured; and the best log rate among them, noise left out."""
        learnt = Regression(known.measured, self._beliefs)
        best = float(learnt.log_rates.max())
        if len(known.bounded):
            bounded = known.measured.with_bounds(known.bounded, learnt.predict(known.bounded.where))
            learnt = Regression(bounded, self._beliefs)
        return learnt, best

    def _scales(self, known: _Known) -> MemoryScales:
        return scales_of(known.memory, limit_bytes=self._limit_bytes, expects=self._map.expects)

    def _runs(self, known: _Known, scales: MemoryScales, there: Landscape) -> Floats:
        """Probability of each candidate to run to its end."""
        fits, here = (scales.chance_of_fitting(where, self._limit_bytes) for where in (there, known.where))
        blamed = np.where(known.ran, 0.0, np.where(known.is_memory, here, 1.0))
        runs = fits * chance_of_running(Ended(where=known.where, blamed=blamed, ran=known.ran), there)
        return np.maximum(runs, 1e-12)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """What the trials of a study say, as arrays."""

    n_trials: int
    complete: Sequence[TrialRecord]
    measured: Measured
    """One element for each of them."""
    bounded: Bounded
    where: Landscape
    """Of trials that ended."""
    ran: Flags
    is_memory: Flags
    """Memory ended it."""
    memory: MemorySeen
    start_up_s: float
    """Of a trial, in the median."""

    @property
    def caution(self) -> float:
        """What the logarithm of a chance to run counts: more where much did not run."""
        return 1 + _CAUTION * float(self.is_memory.sum()) / max(self.n_trials, 1)

    @classmethod
    def of(cls, records: Sequence[TrialRecord], where: Map, goal: Goal, first: float = 1.0) -> _Known:
        """What `records` say.

        Args:
            records: That still stand.
            where: Finds their configs.
            goal: What they are judged by.
            first: How much its first measure counts, if there are two.
        """
        complete = [(record, worth) for record in records if (worth := _worth(record, goal, first)) is not None]
        bounds = [(record, bound) for record in records if (bound := _bound(record, goal)) is not None]
        ended = [(record, record.result) for record in records if record.result is not None]
        needs = [(record, memory_bounds(record)) for record, _ in ended]
        told = [(record, least, most) for record, (least, most) in needs if least > 0 or most < math.inf]
        return cls(
            n_trials=len(records),
            complete=[record for record, _ in complete],
            measured=Measured(
                where=where.of([record.config for record, _ in complete]).aimed(first),
                log_rate=np.array([log_rate for _, (log_rate, _) in complete]),
                sd=np.array([sd for _, (_, sd) in complete]),
            ),
            bounded=Bounded(
                where=where.of([record.config for record, _ in bounds]).aimed(first),
                log_bound=np.array([bound for _, bound in bounds]),
            ),
            where=where.of([record.config for record, _ in ended]),
            ran=np.array([record.has_run for record, _ in ended], dtype=bool),
            is_memory=np.array([result.outcome.is_memory for _, result in ended], dtype=bool),
            memory=MemorySeen(
                where=where.of([record.config for record, _, _ in told]),
                least_bytes=np.array([least for _, least, _ in told]),
                most_bytes=np.array([most for _, _, most in told]),
            ),
            start_up_s=statistics.median(
                [_start_up_s(result) for _, result in ended if result.measurement] or [_START_UP_S]
            ),
        )


def _share_of_first(n_trials: int) -> float:
    """How much the first of two measures counts for the next trial: all, a half, a quarter, three quarters, an eighth ... (van der Corput)."""
    share, step = 0.0, 0.5
    while n_trials:
        share += step * (n_trials % 2)
        n_trials, step = n_trials // 2, step / 2
    return share or 1.0


def _worth(record: TrialRecord, goal: Goal, first: float) -> tuple[float, float] | None:
    """Logarithm of what a complete trial is worth today, and its standard deviation: all runs of its config, each weighed by its precision."""
    if record.standing_samples_per_s is None:
        return None
    logs, weights = list[float](), list[float]()
    for run in record.runs:
        scores = goal.scores(replace(run, peak_memory_bytes=record.peak_memory_bytes))
        if scores is not None:
            shares = zip((first, 1 - first), scores, strict=False)
            logs.append(sum(share * math.log(score) for share, score in shares))
            weights.append(_sd(run, record.noise) ** -2)
    return (float(np.average(logs, weights=weights)), sum(weights) ** -0.5) if logs else None


def _bound(record: TrialRecord, goal: Goal) -> float | None:
    """Logarithm of what a trial is known to be worth less than; infinite while it runs, None where it is measured or did not run."""
    if record.result is None:
        return math.inf
    ended = replace(record.result, bound_samples_per_s=record.bound_samples_per_s)
    bounds = goal.bounds(ended) if record.has_run and goal.follows_rate else None
    return None if bounds is None else math.log(bounds[0])


def _sd(run: TrialResult, noise: LaunchNoise | None) -> float:
    """Of a measured log rate, about what all launches of its config come to."""
    assert run.measurement is not None
    sd = (noise or EXACT).sd_of(run.measurement.step_time_s, run.measurement.step_time_interval_s)
    return min(max(sd, _USUAL_SD), _MOST_SD)


def _start_up_s(result: TrialResult) -> float:
    """Seconds of a trial beside its steps."""
    assert result.measurement is not None
    n_steps = len(result.measurement.slowest_s) + result.measurement.n_warmup
    return max(result.wall_s - n_steps * result.measurement.step_time_s, 0.1)
