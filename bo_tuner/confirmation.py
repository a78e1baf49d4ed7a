"""Confirming the finalists in turn, A B A B, until one is ahead or the other cannot be ahead by what matters.

A machine's slow moods last minutes, so launches that follow each other are compared in pairs: what both share cancels.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bo_tuner.launches import EXACT, Launch, NoisePrior
from bo_tuner.outcome import Measurement, TrialResult
from bo_tuner.trial import TrialRecord, best_of

__all__ = ["LENGTH", "confirmation_s", "confirmation_steps", "next_to_confirm"]

LENGTH = 2
"""A confirmation measures at least this many times the steps of its trial, ..."""
_STEPS = 10
"""... and at least so many, ..."""
_ENOUGH_S = 10.0
"""... unless steps are so long that fewer take this many seconds; ..."""
_FEWEST_STEPS = 5
"""... then so many at least: launches that are still too close are followed by more of them."""
_MOST_FINALISTS = 2
"""And the one that is held for the best, where it is neither."""
_MOST_ROUNDS = 3
_USUAL_GAIN = 0.01
"""That matters, where no other is asked for."""
_PAIRS_MAY_DIFFER = 0.7
"""How far the logarithm of what pairs differ by may lie from what single launches tell."""
_NORMAL = 1.96


def next_to_confirm(
    records: Sequence[TrialRecord], promising: Sequence[TrialRecord], *, min_gain: float
) -> TrialRecord | None:
    """Whose turn it is; None once the best is confirmed and no finalist is likely to be better by what matters.

    Args:
        records: All trials.
        promising: Those that are complete, the one that should be best when it runs again first.
        min_gain: That matters, as a fraction; 0 takes the usual one.
    """
    told = best_of(records)
    if told is None:
        return None
    finalists = list(promising[:_MOST_FINALISTS])
    finalists += [told] if all(one.number != told.number for one in finalists) else []
    ahead = finalists[0]
    if not ahead.confirmations:
        return ahead
    for rival in finalists[1:]:
        pair = _Pair.of(ahead, rival)
        if pair.n_rounds < _MOST_ROUNDS and pair.may_lose >= (min_gain or _USUAL_GAIN):
            return rival if len(rival.confirmations) < len(ahead.confirmations) else ahead
        if pair.lead < 0 and not rival.confirmations:
            return rival  # the one before it turned out to be slower
        ahead = rival if pair.lead < 0 else ahead
    return told if not told.confirmations else None


def confirmation_s(records: Sequence[TrialRecord]) -> float:
    """Seconds that the first confirmation of the winner takes, as far as its trial tells; none before there is a winner, or once it is
    confirmed. A finalist's turns beyond that are taken only while there is time."""
    best = best_of(records)
    if best is None or best.result is None or best.confirmations:
        return 0.0
    return LENGTH * best.result.wall_s


def confirmation_steps(trial: Measurement) -> int:
    """Steps that a confirmation of this trial measures at least."""
    enough = max(math.ceil(_ENOUGH_S / trial.step_time_s), _FEWEST_STEPS)
    return min(max(LENGTH * len(trial.slowest_s), _STEPS), enough)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """Two finalists against each other."""

    n_rounds: int
    """That both have run."""
    lead: float
    """Of the first over the second, in logarithms of what they are worth."""
    sd: float
    """Standard deviation of the lead."""

    @classmethod
    def of(cls, one: TrialRecord, other: TrialRecord) -> _Pair:
        """Round by round; by all that each has shown where there is no round yet."""
        rounds = list(zip(one.confirmations, other.confirmations, strict=False))
        leads = [_score(one, mine) - _score(other, yours) for mine, yours in rounds]
        own = [math.hypot(_sd(mine), _sd(yours)) for mine, yours in rounds]
        noise = one.noise or EXACT
        if not rounds:
            sides = [(record, record.told) for record in (one, other)]
            launches = sum(1 / max(len(record.confirmations), 1) for record, _ in sides)
            variance = sum(_sd(run) ** 2 for _, run in sides if run is not None)
            return cls(
                n_rounds=0,
                lead=_score(one, one.told) - _score(other, other.told),
                sd=math.sqrt(variance + launches * (noise.half_width / _NORMAL) ** 2),
            )
        if noise.sd > 0:
            prior = NoisePrior(sd=math.sqrt(2) * noise.sd, spread=_PAIRS_MAY_DIFFER)
            noise = prior.given([[Launch(lead, sd) for lead, sd in zip(leads, own, strict=True)]])
        variance = (noise.half_width / _NORMAL) ** 2 + statistics.fmean(sd**2 for sd in own)
        return cls(n_rounds=len(rounds), lead=statistics.fmean(leads), sd=math.sqrt(variance / len(rounds)))

    @property
    def may_lose(self) -> float:
        """What is lost in the mean by taking the one that leads (expected loss of a normal distribution)."""
        if not self.sd:
            return 0.0
        z = abs(self.lead) / self.sd
        return self.sd * (math.exp(-z * z / 2) / math.sqrt(2 * math.pi) - z * math.erfc(z / math.sqrt(2)) / 2)


def _score(record: TrialRecord, run: TrialResult | None) -> float:
    """Logarithm of what a complete run is worth."""
    score = None if run is None else record.goal.score(run)
    return math.log(score) if score else -math.inf


def _sd(run: TrialResult) -> float:
    measured = run.measurement
    sd = Launch.of(measured.step_time_s, measured.step_time_interval_s).sd if measured else math.inf
    return sd if math.isfinite(sd) else 1.0
