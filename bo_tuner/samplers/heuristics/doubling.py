"""`DoublingSampler`: what a person does by hand."""

from __future__ import annotations

from bo_tuner.open_candidates import OpenCandidates
from bo_tuner.samplers.heuristics.layouts import Layout, families
from bo_tuner.samplers.heuristics.rule import Rule, RuleSampler
from bo_tuner.space import default_config

__all__ = ["DoublingSampler"]


class DoublingSampler(RuleSampler):
    """Doubles the micro-batch until something does not run, then goes on with the next ZeRO stage.

    It begins with the smallest micro-batch in the default config's layout. The next ZeRO stage begins with the largest micro-batch
    that ran in an earlier one, to be compared with it, since nobody starts from one again. After the last stage comes the next family of layouts
    (pipeline depth, tensor degree, recomputation, switches), from its smallest micro-batch. Accumulation stays as near to the default
    config's as the candidates allow: nobody doubles it by hand while memory is the question. The published baselines of DeepSpeed's tuner
    were found like that: by raising the micro-batch from 1 until memory ran out.
    """

    def __init__(self, candidates: OpenCandidates, *, seed: int) -> None:
        super().__init__(candidates, seed=seed)
        self._families = families(candidates.all)
        self._accum = default_config(candidates.all).grad_accum_steps

    def rule(self) -> Rule[None]:
        """Layout after layout."""
        for family in self._families:
            largest = 0
            for layout in family:
                largest = yield from self._double(layout, largest)

    def _double(self, layout: Layout, largest: int) -> Rule[int]:
        """One layout, from the largest micro-batch that ran so far; returns what that is afterwards."""
        size = layout.size_near(largest)
        while (yield layout.at(size, self._accum)) is not None:
            largest = max(largest, size)
            above = [other for other in layout.sizes if other > size]
            if not above:
                break
            size = min(above, key=lambda other: abs(other - 2 * size))
        return largest
