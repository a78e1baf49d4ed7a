"""The study note of the Optuna dashboard: our best trial in Markdown."""

from __future__ import annotations

from bo_tuner.origin import REAL, Origin
from bo_tuner.outcome import Outcome
from bo_tuner.text import gib, rate
from bo_tuner.trial import TrialRecord, best_of, pareto_front

__all__ = ["best_note"]


def best_note(records: list[TrialRecord], origin: Origin = REAL) -> str:
    """The best trial in Markdown; first of all that it is not real, where it is not."""
    best, warning = best_of(records), f"**{origin.warning}.**\n\n" if origin.warning else ""
    if best is None or best.result is None:
        return f"{warning}bo_tuner: no trial has completed yet."
    peak = gib(best.result.peak_memory_bytes) if best.result.peak_memory_bytes else "unknown"
    front = ", ".join(f"`{record.config.name}` (trial {record.number})" for record in pareto_front(records))
    n_memory = sum(record.result is not None and record.result.outcome.is_memory for record in records)
    return (
        f"{warning}### Best: `{best.config.name}` (trial {best.number})\n\n"
        f"**{rate(best.standing_samples_per_s or 0.0)}** samples{best.beside}, peak memory {peak} a rank. "
        f"{len(records)} trials, {n_memory} ended by memory ({Outcome.OOM}, {Outcome.GUARDED} or {Outcome.HOST_OOM})."
        + (f"\n\nFront of samples/s against peak memory: {front}." if front else "")
    )
