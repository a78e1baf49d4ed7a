"""What became of a trial's promise: its interval, its confirmation, and the memory it leaves free, in words."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bo_tuner.goal import Goal
from bo_tuner.origin import REAL, Origin
from bo_tuner.outcome import Measurement, TrialResult
from bo_tuner.text import count, gib, percent, rate
from bo_tuner.trial import TrialRecord, goal_of, last_limit_bytes, memory_margin

__all__ = ["as_deepspeed_counts", "confirmation_text", "margin_text", "plus_minus", "remarks", "without_value"]


def plus_minus(record: TrialRecord, run: TrialResult | None = None) -> str:
    """Half of the 95 % interval of a complete trial's rate: "+-1.3 %"; "+-?" where one step says nothing, nothing for other trials.

    Args:
        record: The trial.
        run: One of its runs; None for what stands for its config.
    """
    interval = record.samples_per_s_interval if run is None else record.interval_of(run)
    value = (run or record).samples_per_s
    if interval is None or not value:
        return ""
    half_pct = 50 * (interval[1] - interval[0]) / value
    return f"+-{percent(half_pct)}" if math.isfinite(half_pct) else "+-?"  # ASCII: it goes to any terminal and file


def as_deepspeed_counts(measurement: Measurement) -> str:
    """Samples/s of forward, backward and step alone, and how far that overstates: "7.02 (+4.1 %)"."""
    return f"{rate(measurement.engine_samples_per_s).removesuffix('/s')} (+{percent(100 * measurement.overstatement)})"


def confirmation_text(record: TrialRecord, origin: Origin = REAL) -> str:
    """What a longer run said of a trial that was the best; of a table, which would say the same again, that it is one."""
    again = record.confirmation
    if again is None and not origin.can_confirm:
        return "as the table has it"
    if again is None:
        return "not confirmed by a longer run"
    if again.samples_per_s is None:
        return f"not confirmed: its longer run ended as {again.outcome.value}: {again.reason}"
    runs = "a longer run" if len(record.confirmations) == 1 else f"{len(record.confirmations)} longer runs"
    verdict = "confirmed at" if record.is_confirmed else f"not confirmed: slower in {runs}, at"
    held = f"{verdict} {rate(again.samples_per_s)}{record.goal.beside(again)}"
    return (
        held
        if record.trial_samples_per_s is None
        else f"{held}, where its trial had {rate(record.trial_samples_per_s)}"
    )


def margin_text(record: TrialRecord, limit_bytes: int | None) -> str:
    """Peak memory of all its runs against the limit: "peak 1.2 GiB of 2.0 GiB a rank, 0.8 GiB (40 %) left"."""
    peak, margin = record.peak_memory_bytes, memory_margin(record, limit_bytes)
    if peak is None or limit_bytes is None or margin is None:
        return "peak memory or its limit is not known"
    left = f"{gib(margin)} ({percent(100 * margin / limit_bytes)}) left" if margin >= 0 else f"{gib(-margin)} over it"
    return f"peak {gib(peak)} of {gib(limit_bytes)} a rank, {left}"


def without_value(records: Sequence[TrialRecord]) -> str:
    """Why trials that completed gave no best; empty where one has a value, or none completed."""
    goal = goal_of(records)
    complete = [record for record in records if record.samples_per_s is not None]
    if not complete or any(goal.value(record) is not None for record in complete):
        return ""
    return f"{count(len(complete), 'trial')} completed, and for each {_no_value(goal)}"


def _no_value(goal: Goal) -> str:
    return f"the figures for {goal.measure.words} are not known"


def remarks(record: TrialRecord) -> str:
    """The reason of a trial, and what was learned of it since."""
    parts = [record.result.reason if record.result else "no result yet"]
    if record.confirmation is not None:
        parts.append(confirmation_text(record))
    if record.samples_per_s is not None and record.goal.value(record) is None:
        parts.append(_no_value(record.goal))
    if record.samples_per_s is not None and not record.fits_today:
        parts.append(margin_text(record, last_limit_bytes([record])))
    return "; ".join(part for part in parts if part)
