"""`MemoryScales`: by how much the memory model is wrong, as far as trials show it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr

from bo_tuner.models.choices import Floats
from bo_tuner.samplers.bayesian.landscape import Landscape
from bo_tuner.trial import TrialRecord

__all__ = ["Doubts", "MemoryScales", "MemorySeen", "memory_bounds"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubts:
    """How far the memory model may be off before anything ran, as standard deviations of logarithms."""

    common: float
    """Of what everything needs over what is expected; scale of a Student t, so that it may be off by far."""
    group: tuple[float, ...]
    """Of what each group of memory needs beside that."""
    own: float
    """Of what each config needs beside its groups: the median of what that may be."""
    centre: float = 0.0
    """Median of what is common: the logarithm of what everything needs over what is expected."""


_N_WORLDS = 400
_SEED = 1234
_DEGREES = 2
"""Of freedom of what everything needs: to be off by far is rare, not impossible."""
_OWN_RANGE = 0.4
"""Standard deviation of the logarithm of `Doubts.own`."""
_STRANGE = 0.01
"""Of configs: so many are off by `_STRANGELY` times as much as others."""
_STRANGELY = 8.0
_OTHER_CAUSE = 0.002
"""Of trials that ran out of memory: something else took it."""
_NEAR = 0.5
"""Standard deviation of what is drawn about a world, over that of all."""
_NEAR_DEGREES = 5
_HEALTHY = 0.3
"""Share of worlds that count; with fewer, evidence is taken in smaller doses, ..."""
_DOSE = 1.5
"""... but each so many times as large as the one before, at least."""
_MOST_ROUNDS = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySeen:
    """What trials showed of memory, one element each."""

    where: Landscape
    least_bytes: Floats
    """What the rank that needs most needs at least: its peak, or what it ran out of; 0 where that is not known."""
    most_bytes: Floats
    """And at most: its peak, or where that was not read, the limit that it fitted; infinite where it did not."""

    def __len__(self) -> int:
        return len(self.least_bytes)


def memory_bounds(record: TrialRecord) -> tuple[float, float]:
    """Bytes that a rank needs at least and at most, as all runs of a config show; 0 and infinity where they show nothing."""
    peak = float(record.peak_memory_bytes or 0)
    refused = [run for run in record.runs if run.outcome.is_memory]
    if refused:
        most_used = max((run.peak_memory_bytes or 0) + (run.requested_bytes or 0) for run in refused)
        return max(peak, most_used, *((run.limit_bytes or 0) for run in refused)), math.inf
    if not record.has_run:
        return peak, math.inf
    if record.result is not None and record.result.step_limit_s is not None:  # ended in the midst of its first steps
        return peak, math.inf
    limits = [run.limit_bytes for run in record.runs if run.limit_bytes]
    return (peak, peak) if peak else (0.0, min(limits, default=math.inf))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryScales:
    """Worlds in which each group of memory needs so and so many times what is expected, one row each."""

    log_scales: Floats
    """Shape (worlds, groups)."""
    own_sd: Floats
    """What configs need beside that: the standard deviation of a logarithm."""
    weights: Floats
    """How likely each world is; they sum to 1."""

    @property
    def n_effective(self) -> float:
        """As many worlds of equal weight say as much (Kish's effective sample size)."""
        return _n_effective(self.weights)

    def chance_of_fitting(self, candidates: Landscape, limit_bytes: float) -> Floats:
        """Probability that each candidate stays under the limit."""
        missing = math.log(limit_bytes) - _log_needed(self.log_scales, candidates)
        chance: Floats = self.weights @ ndtr(missing / self.own_sd[:, None])
        return chance

    def needed_bytes(self, candidates: Landscape) -> Floats:
        """About what each candidate needs."""
        found: Floats = candidates.memory @ np.exp(self.weights @ self.log_scales)
        return found

    @classmethod
    def of(cls, seen: MemorySeen, doubts: Doubts) -> MemoryScales:
        """What is to be believed after `seen`.

        Worlds are drawn where they explain what was seen: at first from what is believed beforehand, then about those that did best, while what
        was seen counts more and more, until it counts in full; each weighs as much as it is likelier than it is often drawn (adaptive importance
        sampling: Cappe et al., Journal of Computational and Graphical Statistics 13, 2004; tempered: Neal, arXiv physics/9803008).
        """
        chance = np.random.default_rng(_SEED)
        believed = _Believed(doubts)
        worlds = believed.draw(chance)
        log_drawn = believed.log_density(worlds)
        weights = np.full(_N_WORLDS, 1 / _N_WORLDS)
        dose = 0.0
        for _ in range(_MOST_ROUNDS):
            log_likelihood = _explained(seen, worlds)
            log_ratio = believed.log_density(worlds) - log_drawn
            dose = _largest_dose(log_ratio, log_likelihood, dose)
            weights = _normalized(log_ratio + dose * log_likelihood)
            if dose == 1 and _n_effective(weights) >= _HEALTHY * _N_WORLDS:
                break
            proposed = _Nearby.of(worlds, weights)
            worlds = proposed.draw(chance)
            log_drawn = proposed.log_density(worlds)
        return cls(log_scales=_log_scales(worlds), own_sd=np.exp(worlds[:, -1]), weights=weights)


@dataclass(frozen=True, slots=True)
class _Believed:
    """Of worlds, before anything ran: what everything needs, each group beside that, and the logarithm of `own_sd`."""

    doubts: Doubts

    def draw(self, chance: np.random.Generator) -> Floats:
        doubts = self.doubts
        common = doubts.centre + doubts.common * chance.standard_t(_DEGREES, _N_WORLDS)
        groups = chance.standard_normal((_N_WORLDS, len(doubts.group))) * doubts.group
        log_own = math.log(doubts.own) + _OWN_RANGE * chance.standard_normal(_N_WORLDS)
        return np.column_stack([common, groups, log_own])

    def log_density(self, worlds: Floats) -> Floats:
        """But for a constant."""
        doubts = self.doubts
        common = (worlds[:, 0] - doubts.centre) / doubts.common
        groups = worlds[:, 1:-1] / doubts.group
        own = (worlds[:, -1] - math.log(doubts.own)) / _OWN_RANGE
        found: Floats = (
            -(_DEGREES + 1) / 2 * np.log1p(common**2 / _DEGREES) - np.square(groups).sum(axis=1) / 2 - own**2 / 2
        )
        return found


@dataclass(frozen=True, slots=True)
class _Nearby:
    """Of worlds: a Student t about each of those that explain what was seen, as often as it does."""

    worlds: Floats
    weights: Floats
    root: Floats
    """Lower triangle: times its transpose the spread of each Student t."""

    @classmethod
    def of(cls, worlds: Floats, weights: Floats) -> _Nearby:
        off = worlds - weights @ worlds
        spread: Floats = _NEAR**2 * (weights[:, None] * off).T @ off
        return cls(worlds, weights, np.linalg.cholesky(spread + 1e-12 * np.eye(len(spread))).astype(np.float64))

    def draw(self, chance: np.random.Generator) -> Floats:
        n, n_dimensions = self.worlds.shape
        ticks = (np.arange(n) + chance.random()) / n
        about = np.minimum(np.searchsorted(np.cumsum(self.weights), ticks), n - 1)
        stretched = np.sqrt(_NEAR_DEGREES / chance.chisquare(_NEAR_DEGREES, (n, 1)))
        found: Floats = self.worlds[about] + stretched * (chance.standard_normal((n, n_dimensions)) @ self.root.T)
        return found

    def log_density(self, worlds: Floats) -> Floats:
        """But for a constant."""
        centres, places = (np.linalg.solve(self.root, some.T) for some in (self.worlds, worlds))
        squares = np.square(places).sum(axis=0)[:, None] + np.square(centres).sum(axis=0) - 2 * places.T @ centres
        kernel = (1 + np.maximum(squares, 0.0) / _NEAR_DEGREES) ** (-(_NEAR_DEGREES + len(self.root)) / 2)
        found: Floats = np.log(kernel @ self.weights)
        return found


def _log_scales(worlds: Floats) -> Floats:
    found: Floats = worlds[:, :1] + worlds[:, 1:-1]
    return found


def _log_needed(log_scales: Floats, where: Landscape) -> Floats:
    """Shape (worlds, configs)."""
    found: Floats = np.log(np.exp(log_scales) @ where.memory.T)
    return found


def _explained(seen: MemorySeen, worlds: Floats) -> Floats:
    """Log likelihood of all that was seen, in each world: peaks, and bounds alike."""
    if not len(seen):
        return np.zeros(len(worlds))
    needed, own_sd = _log_needed(_log_scales(worlds), seen.where), np.exp(worlds[:, -1:])
    with np.errstate(divide="ignore"):
        least, most = np.log(seen.least_bytes), np.log(seen.most_bytes)
    is_peak = seen.least_bytes == seen.most_bytes
    found = np.zeros(len(worlds))
    if is_peak.any():
        off = (least[is_peak] - needed[:, is_peak]) / own_sd
        usual = math.log(1 - _STRANGE) - off**2 / 2
        strange = math.log(_STRANGE / _STRANGELY) - (off / _STRANGELY) ** 2 / 2
        found += (np.logaddexp(usual, strange) - np.log(own_sd)).sum(axis=1)
    if not is_peak.all():
        over = _below((needed[:, ~is_peak] - least[~is_peak]) / own_sd)
        under = _below((most[~is_peak] - needed[:, ~is_peak]) / own_sd)
        is_bound = np.isinf(most[~is_peak])
        likelihood = np.where(is_bound, (1 - _OTHER_CAUSE) * over + _OTHER_CAUSE, under)
        found += np.log(np.maximum(likelihood, 1e-300)).sum(axis=1)
    return found


def _below(off: Floats) -> Floats:
    """Chance that a config is off by less than that."""
    found: Floats = (1 - _STRANGE) * ndtr(off) + _STRANGE * ndtr(off / _STRANGELY)
    return found


def _normalized(log_weights: Floats) -> Floats:
    weights = np.exp(log_weights - log_weights.max())
    found: Floats = weights / weights.sum()
    return found


def _n_effective(weights: Floats) -> float:
    return float(1 / np.square(weights).sum())


def _largest_dose(log_ratio: Floats, log_likelihood: Floats, least: float) -> float:
    """How much of what was seen may count for enough worlds to matter, at least as much as before."""

    def is_healthy(dose: float) -> bool:
        return _n_effective(_normalized(log_ratio + dose * log_likelihood)) >= _HEALTHY * _N_WORLDS

    if is_healthy(1.0):
        return 1.0
    low, high = least, 1.0
    for _ in range(12):
        middle = math.sqrt(max(low, 1e-4) * high)
        low, high = (middle, high) if is_healthy(middle) else (low, middle)
    return min(max(low, _DOSE * least), 1.0)
