"""`DeepSpeedSampler`: the order in which DeepSpeed's own autotuner would run things, in its mode `fast`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from bo_tuner.open_candidates import OpenCandidates
from bo_tuner.samplers.heuristics.layouts import Layout, families
from bo_tuner.samplers.heuristics.rule import Rule, RuleSampler
from bo_tuner.space import default_config, with_batch

if TYPE_CHECKING:
    from bo_tuner.models.choices import Problem

__all__ = ["DeepSpeedSampler"]

_MARGINS = (1.05, 1.0, 0.95)
"""Of the estimated largest micro-batch: what is tried for it, in this order."""
_PLATEAU = 0.05
"""A larger micro-batch that gains less than this fraction ends the search for the largest."""
_N_SIZES = 3
"""Its `num_tuning_micro_batch_sizes`."""
_STATE_BYTES = {0: (16, 0), 1: (8, 8), 2: (4, 12), 3: (0, 16)}
"""Bytes a parameter by ZeRO stage that it counts on every rank, and those that it divides by the ranks: its figures for fp32 and bf16."""


class DeepSpeedSampler(RuleSampler):
    """Does as `deepspeed --autotuning` does with `fast`, its default, in DeepSpeed 0.19: for a comparison with it.

    ZeRO stages come in order. In each the largest micro-batch that runs is looked for first: by an estimate of memory, else by halving
    intervals, which ends early where throughput gains less than 5 %. Then come up to three micro-batches from half of it on, with more
    accumulation in turn, and one a little smaller than it. A later stage begins at the largest micro-batch of the best stage before, and is
    given up if that one trial fails, or left out if the estimate says so; "best" is the one whose best micro-batch is larger. A trial
    that failed is one that did not fit, whatever the reason.

    Three things differ. Sizes are moved to the nearest candidate, and nothing runs twice. The smaller micro-batch at the end of a stage is
    one trial whose rate is not looked at: DeepSpeed reads that of an earlier trial in its place, and so never goes on from there.
    And DeepSpeed is given one layout, and knows ZeRO, micro-batch and accumulation alone: here that of the default config comes first, and when
    its rule is at its end, the others are tuned likewise.
    """

    def __init__(self, candidates: OpenCandidates, *, seed: int, problem: Problem | None = None) -> None:
        """Start from these candidates.

        Args:
            candidates: What may run.
            seed: Changes nothing.
            problem: What memory is estimated from, in place of DeepSpeed's profiling run. None where nothing is known: then the largest micro-batch
                of the candidates is the estimate.
        """
        super().__init__(candidates, seed=seed)
        self._families = families(candidates.all)
        self._accum = default_config(candidates.all).grad_accum_steps
        self._has_batch_cap = candidates.batch_rule.kind != "free"
        self._problem = problem

    def rule(self) -> Rule[None]:
        """Family after family, stage after stage."""
        for family in self._families:
            best_size = largest = 0
            for layout in family:
                found = yield from self._tune(layout, largest)
                if found and found[0] > best_size:
                    best_size, largest = found

    def _tune(self, layout: Layout, lowest: int) -> Rule[tuple[int, int] | None]:
        """One ZeRO stage: its best micro-batch and its largest; None where it is given up."""
        estimate = self._estimate(layout)
        if estimate < max(lowest, 1):
            return None
        rates: dict[int, float] = {}
        bounds = yield from self._bounds(layout, lowest, estimate, rates)
        if bounds is None or bounds[1] < lowest:
            return None
        smallest, largest = bounds
        usual = largest * layout.at(largest, self._accum).grad_accum_steps
        batch = layout.largest_batch() if self._has_batch_cap else usual
        sizes = _sizes(smallest, largest, batch)
        for size in sizes:
            config = layout.at(size, batch // size)
            rate = yield config
            if rate is not None:
                rates[config.micro_batch_size] = max(rate, rates.get(config.micro_batch_size, 0.0))
        smallest_alike = sizes[-2] + 1 if len(sizes) > 1 else smallest
        alike = range(smallest_alike, largest, max((largest - smallest_alike) // 3, 1))
        if alike:
            yield layout.at(alike[-1], batch // alike[-1])
        return max(rates, key=lambda size: rates[size]), largest

    def _bounds(
        self, layout: Layout, lowest: int, estimate: int, rates: dict[int, float]
    ) -> Rule[tuple[int, int] | None]:
        """The smallest and the largest micro-batch that run, with the usual accumulation; None where the smallest does not. Adds to `rates`
        what was seen on the way."""
        smallest = layout.size_near(lowest)
        rate = yield layout.at(smallest, self._accum)
        if rate is None:
            return None
        rates[smallest] = before = rate
        for margin in _MARGINS:
            wanted = math.ceil(margin * estimate) if margin > 1 else int(margin * estimate)
            size = layout.size_near(wanted)
            if wanted > layout.sizes[-1]:
                continue
            rate = yield layout.at(size, self._accum)
            if rate is not None:
                rates[size] = rate
                return smallest, size
        low, high = smallest, estimate
        while low <= high:
            middle = (low + high) // 2
            size = layout.size_near(middle)
            rate = yield layout.at(size, self._accum)
            if rate is None:
                high = middle - 1
                continue
            low = middle + 1
            if size not in rates:
                rates[size] = rate
                if before and rate / before - 1 < _PLATEAU:
                    break
                before = rate
        return smallest, layout.size_near(low - 1)

    def _estimate(self, layout: Layout) -> int:
        """Largest micro-batch that DeepSpeed would expect to fit: (memory - model states) // activations of one sample, of all memory there is."""
        largest = layout.sizes[-1]
        if self._problem is None:
            return largest
        from bo_tuner.models.choices import Choices
        from bo_tuner.models.memory import memory_of

        example = with_batch(layout.example, 1, 1)
        whole, divided = _STATE_BYTES[example.zero_stage]
        of_parameter = whole + divided / self._problem.n_ranks
        n_parameters = self._problem.profile.n_parameters / (example.pipeline_depth * example.tensor_parallel)
        activations = memory_of(self._problem, Choices.of([example], self._problem.n_ranks)).activations[0]
        left = self._problem.hardware.memory_bytes - n_parameters * of_parameter
        return min(int(left // activations), largest)


def _sizes(smallest: int, largest: int, batch: int) -> list[int]:
    """Micro-batches that are timed: from half of the largest on, those that leave room for another accumulation, and the largest.

    Args:
        smallest: Micro-batch that ran.
        largest: Micro-batch that ran.
        batch: Samples of a step on one replica, at most.
    """
    first = max(smallest, largest // 2)
    between = range(first, largest, max((largest - first) // _N_SIZES, 1))
    return [size for size in between if batch // size != batch // largest] + [largest]
