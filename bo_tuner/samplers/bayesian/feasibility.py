"""Which configs should fit, after what was seen of memory, and which should run at all."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr

from bo_tuner.models.choices import Flags, Floats
from bo_tuner.samplers.bayesian.landscape import MEMORY_GROUPS, Landscape, alike

__all__ = ["Ended", "MemorySeen", "chance_of_fitting", "chance_of_running"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Doubts:
    """Standard deviations of logarithms, chosen on the groups of tables that calibrate the models."""

    group: tuple[float, float, float]
    """Of what each group of memory needs over what is expected."""
    own: float
    """Of what each config needs beside that."""


_OF_BYTES = _Doubts(group=(0.15, 0.25, 0.5), own=0.08)
_OF_PROPORTIONS = _Doubts(group=(2.5, 2.5, 2.5), own=0.3)
"""Chosen with the other groups in sight too."""
_N_WORLDS = 400
_SEED = 1234
_DOUBT = 0.02
"""A peak, or an end, that no world explains: something else was the cause."""
_USUAL_FAILURES = 0.05
"""Of trials that memory does not explain, as if one trial everywhere had shown it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySeen:
    """What trials showed of memory, one element each."""

    where: Landscape
    fitted: Flags
    peak_bytes: Floats
    """Of the rank that needed most; NaN where it was not read, and where the trial did not fit."""
    limit_bytes: Floats
    """That it ran under."""

    def __len__(self) -> int:
        return len(self.fitted)


def chance_of_fitting(seen: MemorySeen, candidates: Landscape, *, limit_bytes: float, expects: bool) -> Floats:
    """Probability that each candidate stays under the limit.

    Worlds are drawn in which each group of memory needs so and so many times what is expected. Each weighs as much as it explains what was
    seen: measured peaks, and trials that did or did not fit, of which only that is known (importance sampling: MacKay, Information
    Theory, Inference, and Learning Algorithms, 2003, section 29.2).

    Args:
        seen: So far; may be empty.
        candidates: With expected memory.
        limit_bytes: Per rank.
        expects: Memory is expected in bytes, not only in proportions.
    """
    draws = np.random.default_rng(_SEED).standard_normal((_N_WORLDS, len(MEMORY_GROUPS)))
    doubts = _OF_BYTES if expects else _OF_PROPORTIONS
    worlds = np.exp(draws * np.array(doubts.group))
    if not expects:  # the largest may be a few percent of the limit, or many times as much
        worlds *= limit_bytes * np.exp(-np.array(doubts.group))
    log_weights = np.zeros(_N_WORLDS)
    if len(seen):
        log_weights = _explained(seen, np.log(worlds @ seen.where.memory.T), doubts.own).sum(axis=1)
    weights = np.exp(log_weights - log_weights.max())
    needed = np.log(worlds @ candidates.memory.T)
    chance: Floats = (weights / weights.sum()) @ ndtr((np.log(limit_bytes) - needed) / doubts.own)
    return chance


def _explained(seen: MemorySeen, needed: Floats, own_sd: float) -> Floats:
    """Log likelihood of each trial in each world; shape (worlds, trials)."""
    has_peak = seen.fitted & np.isfinite(seen.peak_bytes)
    off = (np.log(np.where(has_peak, seen.peak_bytes, 1.0)) - needed) / own_sd
    fits = ndtr((np.log(seen.limit_bytes) - needed) / own_sd)
    likelihood = np.where(has_peak, np.exp(-(off**2) / 2), np.where(seen.fitted, fits, 1 - fits))
    found: Floats = np.log((1 - _DOUBT) * likelihood + _DOUBT)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How trials ended, one element each."""

    where: Landscape
    blamed: Floats
    """Of its failure, what memory does not explain, from 0 to 1; 0 where it ran."""
    ran: Flags


def chance_of_running(ended: Ended, candidates: Landscape) -> Floats:
    """Probability that nothing but memory stops each candidate: an average over trials, neighbours first."""
    near = alike(ended.where, candidates) ** 2
    failures = ended.blamed @ near + _USUAL_FAILURES
    chance: Floats = 1 - failures / ((ended.blamed + ended.ran) @ near + 1)
    return chance
