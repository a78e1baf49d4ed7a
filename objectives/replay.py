"""`ReplayObjective`: a measured table as the objective."""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import replace

from bo_tuner.config import TrainConfig
from bo_tuner.objectives.base import EventSink
from bo_tuner.objectives.pretended import START_UP_S, pretended
from bo_tuner.objectives.table import MeasuredRun, MeasuredTable
from bo_tuner.outcome import Outcome, TrialLimits, TrialResult
from bo_tuner.workload import UNKNOWN_LENGTH

__all__ = ["ReplayObjective"]

_FAILED_COST = 1.5
"""What a failed trial costs over a good one: medians of AMP's published trials are 210 s against 100, 165 against 124, 212 against 131."""
_USUAL_STEPS = 4
"""Of a trial: one to warm up, and three that agree."""


class ReplayObjective:
    """Says of every config what the table says, at once. Implements `Objective`.

    A run that failed for whatever reason counts as out of memory. What completed in the table completes here: no deadline and no
    incumbent ends it, and no memory limit. A trial takes the seconds that its source spent on it, or a start and its steps.
    """

    def __init__(self, table: MeasuredTable, *, start_up_s: float = START_UP_S) -> None:
        """Replay `table`.

        Args:
            table: One group.
            start_up_s: Of a trial, where the table does not tell its cost.
        """
        self._table = table
        self._runs = {run.config: run for run in table.runs}
        self._start_up_s = start_up_s
        good_s = [self._cost_s(run, run.step_time_s) for run in table.runs if run.step_time_s is not None]
        self._failed_s = _FAILED_COST * statistics.median(good_s)

    def __call__(self, config: TrainConfig, *, limits: TrialLimits, on_event: EventSink) -> TrialResult:
        """Look `config` up; see `Objective`."""
        run = self._runs.get(config)
        if run is None:
            return TrialResult(outcome=Outcome.REJECTED, reason="the table has no such config")
        if run.step_time_s is None:
            also = "" if run.status == "oom" else ", which counts as out of memory"
            return TrialResult(
                outcome=Outcome.OOM,
                reason=f"the table says {run.status or 'nothing'}{also}",
                peak_memory_bytes=run.memory_bytes,
                limit_bytes=limits.memory_bytes,
                wall_s=run.trial_cost_s or self._failed_s,
            )
        result = pretended(
            itertools.repeat([run.step_time_s]),
            limits=replace(limits, deadline_s=math.inf, incumbent_samples_per_s=None),
            on_event=on_event,
            n_ranks=1,
            global_batch=config.global_batch(self._table.n_ranks),
            seq_len=self._table.seq_len or UNKNOWN_LENGTH,
            start_up_s=self._start_up_s,
            peak_bytes=run.memory_bytes,
        )
        if run.trial_cost_s is None:
            return result
        return replace(result, wall_s=run.trial_cost_s, phases_s=None)

    def _cost_s(self, run: MeasuredRun, step_time_s: float) -> float:
        return run.trial_cost_s or self._start_up_s + _USUAL_STEPS * step_time_s
