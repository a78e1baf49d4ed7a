"""What is doubted of memory before anything ran, and which configs should run at all."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from bo_tuner.models.choices import Flags, Floats
from bo_tuner.samplers.bayesian.landscape import Landscape, alike
from bo_tuner.samplers.bayesian.memory_scales import Doubts, MemoryScales, MemorySeen

__all__ = ["Ended", "chance_of_running", "scales_of"]

_OF_BYTES = Doubts(common=0.1, group=(0.15, 0.25, 0.5), own=0.08)
"""Of groups and configs as chosen on the groups of tables that calibrate the models."""
_OF_PROPORTIONS = Doubts(common=0.5, group=(2.4, 2.4, 2.4), own=0.3)
"""Chosen with the other groups in sight too."""
_LARGEST = 2.5
"""Of proportions: so much is the largest below the limit in the median, as a logarithm."""
_USUAL_FAILURES = 0.05
"""Of trials that memory does not explain, as if one trial everywhere had shown it."""


def scales_of(seen: MemorySeen, *, limit_bytes: float, expects: bool) -> MemoryScales:
    """What candidates should need of memory.

    Args:
        seen: So far; may be empty.
        limit_bytes: Per rank.
        expects: Memory is expected in bytes, not only in proportions.
    """
    if expects:
        return MemoryScales.of(seen, _OF_BYTES)
    # The largest of proportions may be a few percent of the limit, or many times as much.
    return MemoryScales.of(seen, replace(_OF_PROPORTIONS, centre=math.log(limit_bytes) - _LARGEST))


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
