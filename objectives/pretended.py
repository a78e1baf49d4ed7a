"""`pretended`: the trial that steps of given lengths would have made, under the stopping rule and the limits of real trials."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from bo_tuner.objectives.base import EventSink, TrialEvent
from bo_tuner.objectives.training.stopping import RankStep, StoppingRule
from bo_tuner.outcome import Measurement, Outcome, TrialLimits, TrialResult
from bo_tuner.text import rate

__all__ = ["START_UP_S", "pretended"]

START_UP_S = 20.0
"""From launch to the first step where nothing tells it: what processes on some nodes take to start, meet and build a model. Guessed once."""


def pretended(
    steps: Iterable[Sequence[float]],
    *,
    limits: TrialLimits,
    on_event: EventSink,
    n_ranks: int,
    global_batch: int,
    seq_len: int,
    start_up_s: float,
    peak_bytes: int | None,
) -> TrialResult:
    """Take steps until enough are measured, the incumbent is out of reach, or the deadline has come; nobody waits for them.

    Args:
        steps: Seconds of each step, by rank; as many as it takes.
        limits: Of the trial.
        on_event: Told of every step.
        n_ranks: Whose times a step has.
        global_batch: Samples of a step.
        seq_len: Tokens of a sample.
        start_up_s: Before the first step.
        peak_bytes: Of every rank; None where it is not known.

    Returns:
        COMPLETE, PRUNED or TIMEOUT; `wall_s` and `phases_s` are what it would have taken.
    """
    deadline_s = min(limits.deadline_s, limits.left_s if limits.left_s is not None else math.inf)
    rule = StoppingRule(limits, n_ranks=n_ranks, global_batch=global_batch)
    passed_s = start_up_s
    on_event(TrialEvent(phase="start"))
    for times in steps:
        passed_s += max(times)
        if passed_s > deadline_s:
            return TrialResult(
                outcome=Outcome.TIMEOUT,
                reason=f"not done after {deadline_s:.0f} s, still in step {rule.n_finished + 1}",
                limit_bytes=limits.memory_bytes,
                peak_memory_bytes=peak_bytes,
                wall_s=deadline_s,
            )
        for rank, seconds in enumerate(times):
            rule.add(rank, RankStep(total_s=seconds, engine_s=seconds))
        on_event(TrialEvent(phase=rule.phase, step=rule.n_finished, n_steps=rule.n_steps, memory_bytes=peak_bytes))
        if rule.is_done:
            break
    assert rule.is_done, "steps go on for as long as they are asked for"
    rows = tuple(tuple(step.total_s for step in row) for row in rule.measured())
    peaks = (peak_bytes,) * n_ranks if peak_bytes is not None else ()
    bound = rule.bound_samples_per_s
    return TrialResult(
        outcome=Outcome.COMPLETE if bound is None else Outcome.PRUNED,
        reason="" if bound is None else f"ended early: slower than {rate(bound)}, which is below the best so far",
        measurement=Measurement(
            global_batch=global_batch,
            seq_len=seq_len,
            step_times_s=rows,
            engine_times_s=rows,
            peak_memory_bytes=peaks,
            n_warmup=rule.n_warmup,
            is_settled=rule.is_settled,
        ),
        bound_samples_per_s=bound,
        steps_bound_samples_per_s=rule.steps_bound_samples_per_s,
        peak_memory_bytes=peak_bytes,
        rank_peaks_bytes=peaks,
        limit_bytes=limits.memory_bytes,
        wall_s=passed_s,
        phases_s={
            "start": start_up_s,
            "warmup": passed_s - start_up_s - rule.measured_s,
            "measure": rule.measured_s,
            "teardown": 0.0,
        },
    )
