"""Studies of measured tables: what a sampler chooses, and what the table says of it; no storage, no engine."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from bo_tuner.models.choices import Problem
from bo_tuner.objectives import ignore_events
from bo_tuner.objectives.prior import cluster_of
from bo_tuner.objectives.replay import ReplayObjective
from bo_tuner.objectives.table import MeasuredTable
from bo_tuner.open_candidates import OpenCandidates
from bo_tuner.outcome import TrialLimits
from bo_tuner.samplers import CandidateSampler, SpaceExhausted
from bo_tuner.space import SearchSpace
from bo_tuner.trial import TrialRecord, best_of

__all__ = ["Replay", "Replayed", "candidates_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """One study."""

    best: tuple[float, ...]
    """Best rate after each trial, over the best of the table; 0 while nothing has run."""
    ran: tuple[bool, ...]
    """Whether each trial completed."""
    cost: tuple[float, ...]
    """Seconds up to the end of each trial, over the median of a completed trial's."""
    stopped_after: int | None
    """Trials after which the study would have stopped by itself; None where it would not have."""
    promised: float | None
    """Chance of a gain that it told then."""
    left_better: float
    """The best of all that was not tried until then, over the best until then."""


def candidates_of(table: MeasuredTable) -> OpenCandidates:
    """All configs of a table, at the memory limit of its devices. Shuffled: some tables list the fastest first."""
    cluster, _ = cluster_of(table)
    configs = sorted(table.configs, key=lambda config: zlib.crc32(config.name.encode()))
    return OpenCandidates(
        configs,
        space=SearchSpace.of_configs(configs),
        n_ranks=table.n_ranks,
        limit_bytes=cluster.memory_bytes or 0,
        longest_step_s=math.inf,
    )


class Replay:
    """A table that many studies are made of; each config is looked up once."""

    def __init__(self, table: MeasuredTable, problem: Problem | None) -> None:
        """Replay `table`.

        Args:
            table: One group.
            problem: What the models are told of it.
        """
        self.table = table
        self.problem = problem
        self.candidates = candidates_of(table)
        limits = TrialLimits(memory_bytes=self.candidates.limit_bytes)
        objective = ReplayObjective(table)
        self._results = {config: objective(config, limits=limits, on_event=ignore_events) for config in table.configs}
        walls = sorted(result.wall_s for result in self._results.values() if result.samples_per_s)
        self._usual_s = walls[len(walls) // 2]

    def study(self, sampler: CandidateSampler, *, n_trials: int, min_gain: float = 0.01) -> Replayed:
        """Let `sampler` choose so many trials, or all there are.

        Args:
            sampler: Of `candidates`.
            n_trials: At most.
            min_gain: Gain that would make a study go on.
        """
        records: list[TrialRecord] = []
        best: list[float] = []
        cost: list[float] = []
        stop: tuple[int, float, float] | None = None
        while len(records) < n_trials:
            try:
                config = sampler.next_config(records)
            except SpaceExhausted:
                break
            result = self._results[config]
            records.append(TrialRecord(number=len(records), config=config, result=result))
            top = best_of(records)
            best.append((top.samples_per_s or 0.0) / self.table.best_samples_per_s if top else 0.0)
            cost.append((cost[-1] if cost else 0.0) + result.wall_s / self._usual_s)
            if stop is None and (chance := sampler.chance_of_gain(records, min_gain)) is not None and chance < 0.05:
                stop = len(records), chance, self._left(records, best[-1])
        return Replayed(
            best=_padded(best, n_trials),
            ran=tuple(record.has_run for record in records),
            cost=tuple(cost),
            stopped_after=stop[0] if stop else None,
            promised=stop[1] if stop else None,
            left_better=stop[2] if stop else math.nan,
        )

    def _left(self, records: Sequence[TrialRecord], best: float) -> float:
        tried = {record.config for record in records}
        rates = [result.samples_per_s or 0.0 for config, result in self._results.items() if config not in tried]
        return max(rates, default=0.0) / self.table.best_samples_per_s / best


def _padded(values: list[float], n: int) -> tuple[float, ...]:
    return tuple(values + values[-1:] * (n - len(values)))
