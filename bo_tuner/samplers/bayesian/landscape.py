"""`Landscape`: configs as arrays: where they lie, and what is expected of them before anything ran."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bo_tuner.config import TrainConfig
from bo_tuner.models.choices import Choices, Floats, Problem
from bo_tuner.models.cost import TIME_PARTS, times_of
from bo_tuner.models.memory import memory_of

__all__ = ["MEMORY_GROUPS", "Landscape", "Map", "Places", "alike", "n_same"]

Places = NDArray[np.int64]

MEMORY_GROUPS = (("weights", "gradients", "optimizer"), ("activations",), ("working", "buffers", "overhead"))
"""Parts of memory that are wrong together where they are wrong: states, activations, the rest."""

_DOUBLED = ("micro_batch_size", "grad_accum_steps", "pipeline_depth", "tensor_parallel")
"""Their distance is the number of doublings between them."""
_RANGE = 3.0
"""Of any other number, from its least to its greatest: as far as three doublings."""

_WIDE = 8
"""From the least to the greatest: such a range is one of orders of magnitude."""
_LENGTH = 3.0
"""Doublings over which neighbours have much in common (the length scale of a Matern 5/2 kernel)."""
_DIFFERENT = 0.4
"""Exponent by which each dimension without order makes configs less alike that differ in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Landscape:
    """Some configs, one row each."""

    numbers: Floats
    """Shape (configs, dimensions): doublings, or parts of a range."""
    sorts: Places
    """Shape (configs, dimensions): which of its values each other dimension has."""
    log_rate: Floats
    """Expected, of samples/s; 0 where nothing is."""
    log_rule: Floats
    """What holds for every model: how rates differ by waiting in pipelines and by recomputing."""
    shares: Floats
    """Shape (configs, parts of a step): how much of the expected step each takes."""
    step_s: Floats
    """Expected; 1 where nothing is."""
    memory: Floats
    """Shape (configs, groups): bytes expected of the rank that needs most; only in proportion to each other where nothing is expected."""

    def __len__(self) -> int:
        return len(self.log_rate)

    def at(self, places: Places) -> Landscape:
        """Those rows."""
        return Landscape(**{name: getattr(self, name)[places] for name in self.__dataclass_fields__})

    def aimed(self, first: float) -> Landscape:
        """The same where the goal is a mean of two logarithms, samples/s and the inverse of memory.

        Args:
            first: How much the first counts.
        """
        if first == 1:
            return self
        lightness = (first - 1) * np.log(self.memory.sum(axis=1))
        return replace(
            self,
            log_rate=first * self.log_rate + lightness,
            log_rule=first * self.log_rule + lightness,
            shares=first * self.shares,
        )

    @classmethod
    def together(cls, some: Sequence[Landscape]) -> Landscape:
        """All their rows."""
        return cls(**{name: np.concatenate([getattr(one, name) for one in some]) for name in cls.__dataclass_fields__})


class Map:
    """Finds the landscape of any config of a study; what its candidates have in common is computed once."""

    def __init__(self, candidates: Sequence[TrainConfig], problem: Problem | None, *, n_ranks: int) -> None:
        """Look at `candidates`.

        Args:
            candidates: Of the study.
            problem: What the models expect something of; None where there is nothing to expect.
            n_ranks: World size.
        """
        self._problem = problem
        self._n_ranks = n_ranks
        self._axes = _axes(candidates)
        self._places: dict[TrainConfig, int] = {config: place for place, config in enumerate(candidates)}
        self.everything = self._rows(candidates)
        """Of all candidates, and what was looked at since."""
        self.expects = problem is not None and any(map(problem.knows, candidates))
        """False where nothing is known of speed and memory."""

    def of(self, configs: Sequence[TrainConfig]) -> Landscape:
        """One row a config; those that are no candidates, as integers between two rungs of a ladder, are looked at once, too."""
        new = list(dict.fromkeys(config for config in configs if config not in self._places))
        if new:
            self._places |= {config: place for place, config in enumerate(new, start=len(self.everything))}
            self.everything = Landscape.together([self.everything, self._rows(new)])
        return self.everything.at(np.array([self._places[config] for config in configs], dtype=np.int64))

    def _rows(self, configs: Sequence[TrainConfig]) -> Landscape:
        rows = [config.params() for config in configs]
        numbers = [[axis.of(row[name]) for name, axis in self._axes.items() if axis.is_number] for row in rows]
        sorts = [[axis.of(row[name]) for name, axis in self._axes.items() if not axis.is_number] for row in rows]
        return Landscape(
            numbers=np.array(numbers, dtype=np.float64).reshape(len(rows), -1),
            sorts=np.array(sorts, dtype=np.int64).reshape(len(rows), -1),
            **self._expected(configs),
        )

    def _expected(self, configs: Sequence[TrainConfig]) -> dict[str, Floats]:
        n, everything = len(configs), Choices.of(configs, self._n_ranks)
        found = {
            "log_rate": np.zeros(n),
            "log_rule": _rule(everything),
            "shares": np.zeros((n, len(TIME_PARTS))),
            "step_s": np.ones(n),
            "memory": _proportions(everything),
        }
        problem = self._problem
        if problem is None or not any(map(problem.knows, configs)):
            return found
        known = np.array([problem.knows(config) for config in configs], dtype=bool)
        choices = everything if known.all() else everything.at(known)
        times, memory = times_of(problem, choices), memory_of(problem, choices)
        expected = {
            "log_rate": np.log(choices.global_batch / times.total),
            "shares": np.stack([getattr(times, part) for part in TIME_PARTS], axis=1) / times.total[:, None],
            "step_s": times.total,
            "memory": np.stack([sum(getattr(memory, part) for part in group) for group in MEMORY_GROUPS], axis=1),
        }
        worst = int(np.argmin(expected["log_rate"]))  # what nothing is known of is taken to be as slow as the slowest
        for name, values in expected.items():
            found[name][known] = values
            found[name][~known] = values[worst]
        return found


def _proportions(choices: Choices) -> Floats:
    """How the groups of memory grow from config to config, whatever the model: states by ZeRO (arXiv 1910.02054, section 3, for 16-bit training
    with Adam), activations by what is in flight (Narayanan et al., arXiv 2104.04473, section 2.2), of which recomputation keeps about a
    seventh (Korthikanti et al., arXiv 2205.05198, section 4)."""
    model_ranks = choices.depth * choices.tensor
    shard = 1 / choices.data
    states = np.select(
        [choices.zero_stage == stage for stage in range(4)],
        [np.ones_like(shard), (4 + 12 * shard) / 16, (2 + 14 * shard) / 16, shard],
    )
    of_batch = choices.micro_batch / choices.tensor
    kept = np.where(choices.recomputes, 1 / 7, 1.0) * choices.in_flight / choices.depth
    return np.stack([states / model_ranks, of_batch * kept, of_batch / 7], axis=1)


def _rule(choices: Choices) -> Floats:
    """Logarithm of what a pipeline of equal stages leaves of the rate, as its schedule says, and of 3 / 4 for a forward pass more."""
    found: Floats = np.log1p(-choices.bubble_fraction) - np.where(choices.recomputes, np.log(4 / 3), 0.0)
    return found


def alike(ours: Landscape, theirs: Landscape) -> Floats:
    """What neighbours have in common, from 0 to 1; shape (ours, theirs)."""
    squares = np.zeros((len(ours), len(theirs)))
    for one, other in zip(ours.numbers.T, theirs.numbers.T, strict=True):
        squares += (one[:, None] - other[None, :]) ** 2
    distance = np.sqrt(5 * squares) / _LENGTH
    n_differing = ours.sorts.shape[1] - n_same(ours, theirs)
    found: Floats = (1 + distance + distance**2 / 3) * np.exp(-distance - _DIFFERENT * n_differing)
    return found


def n_same(ours: Landscape, theirs: Landscape) -> Floats:
    """In how many dimensions without order they have the same value; shape (ours, theirs)."""
    found = np.zeros((len(ours), len(theirs)))
    for one, other in zip(ours.sorts.T, theirs.sorts.T, strict=True):
        found += one[:, None] == other[None, :]
    return found


@dataclass(frozen=True, slots=True)
class _Axis:
    """One dimension of the space."""

    values: tuple[Any, ...]
    """In order."""
    is_number: bool
    is_doubled: bool

    def of(self, value: Any) -> float | int:
        if not self.is_number:
            return self.values.index(value) if value in self.values else len(self.values)
        if self.is_doubled:
            return math.log2(value)
        first, last = self.values[0], self.values[-1]
        if first > 0 and last / first >= _WIDE:
            return _RANGE * math.log(value / first) / math.log(last / first)
        return float(_RANGE * (value - first) / (last - first))


def _axes(candidates: Iterable[TrainConfig]) -> Mapping[str, _Axis]:
    """The dimensions in which candidates differ."""
    values: dict[str, set[Any]] = {}
    for config in candidates:
        for name, value in config.params().items():
            values.setdefault(name, set()).add(value)
    found: dict[str, _Axis] = {}
    for name, seen in values.items():
        if len(seen) == 1:
            continue
        is_number = name != "zero_stage" and all(type(value) in (int, float) for value in seen)
        found[name] = _Axis(
            values=tuple(sorted(seen) if is_number else sorted(seen, key=str)),
            is_number=is_number,
            is_doubled=name in _DOUBLED,
        )
    return found
