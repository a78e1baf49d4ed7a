"""A study as a table for people, and as plain data for programs."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from bo_tuner.budget import Spent
from bo_tuner.open_candidates import memory_proofs
from bo_tuner.report.progress import ending
from bo_tuner.text import gib, rate
from bo_tuner.trial import TrialRecord, best_of, ranked

__all__ = ["UNIT", "study_to_dict", "summary_text", "trials_table"]

UNIT = "samples/s"


def study_to_dict(name: str, records: Sequence[TrialRecord], *, budget: str | None, spent: Spent) -> dict[str, Any]:
    """What `tune --json` and `show --json` print."""
    best = best_of(records)
    return {
        "study": name,
        "direction": "maximize",
        "unit": UNIT,
        "budget": budget,
        "spent": spent.to_dict(),
        "best": best.to_dict() if best else None,
        "trials": [record.to_dict() for record in records],
    }


def trials_table(records: Sequence[TrialRecord], *, n_ranks: int) -> str:
    """One row a trial: number, config, global batch, outcome, samples/s, step time, peak memory, wall time, reason."""
    header = ("trial", "config", "batch", "outcome", "samples/s", "step", "peak memory", "wall")
    best = best_of(records)
    rows: list[tuple[str, ...]] = []
    for record in records:
        result = record.result
        value, measurement = record.samples_per_s, result.measurement if result else None
        rows.append(
            (
                f"{record.number}{' *' if best and best.number == record.number else ''}",
                record.config.name,
                str(record.config.global_batch(n_ranks)),
                result.outcome.value if result else "-",
                f"{value:.4g}" if value is not None else "-",
                f"{measurement.step_time_s * 1000:.0f} ms" if measurement and value is not None else "-",
                gib(result.peak_memory_bytes) if result and result.peak_memory_bytes else "-",
                f"{record.wall_s:.1f} s" if result else "-",
            )
        )
    reasons = [record.result.reason if record.result else "no result yet" for record in records]
    lines = _aligned([header, *rows])
    return "\n".join(f"{line}  {reason}".rstrip() for line, reason in zip(lines, ["", *reasons], strict=True))


def summary_text(
    records: Sequence[TrialRecord],
    *,
    n_candidates: int,
    limit_bytes: int | None,
    stages: Sequence[int],
    depths: Sequence[int] = (1,),
) -> str:
    """The summary that DeepSpeed's tuner prints, per ZeRO stage and over all: trials, best value, best name; likewise per depth where
    there are pipelines; then what was ruled out and by which trial."""
    groups = [(f"z{stage}", [record for record in records if record.config.zero_stage == stage]) for stage in stages]
    if max(depths) > 1:
        groups += [
            (f"pp{depth}", [record for record in records if record.config.pipeline_depth == depth]) for depth in depths
        ]
    header = ("space", "trials", "best samples/s", "best name")
    rows = [header, *(_summary_row(name, group) for name, group in groups), _summary_row("all", list(records))]
    lines = _aligned(rows)
    endings = Counter(record.result.outcome.value for record in records if record.result)
    counted = ", ".join(f"{count} {outcome}" for outcome, count in endings.most_common())
    n_configs = len({record.config for record in records if record.result})
    lines.append(f"\n{n_configs} of {n_candidates} candidates ran: {counted or 'none finished'}")
    if limit_bytes is not None:
        for layout, proof in memory_proofs(records, limit_bytes=limit_bytes).items():
            in_flight = f" with {layout.grad_accum_steps} in flight" if layout.pipeline_depth > 1 else ""
            lines.append(
                f"{layout.layout_name}: micro-batch {proof.micro_batch_size} and larger{in_flight} do not fit (trial {proof.trial})"
            )
    lines += _median_trial(records)
    best = best_of(records)
    if best is not None:
        lines.append(f"best: {best.config.name}, {ending(best.result)} a rank")
    return "\n".join(lines)


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """One line a row, with columns as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _median_trial(records: Sequence[TrialRecord]) -> list[str]:
    """Where the time of a complete trial goes: the median of its wall time and of each phase, in one line."""
    phases = [
        {"wall": record.result.wall_s, **record.result.phases_s}
        for record in records
        if record.samples_per_s is not None and record.result is not None and record.result.phases_s
    ]
    if not phases:
        return []
    medians = {name: statistics.median(phase[name] for phase in phases) for name in phases[0]}
    split = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in medians.items() if name != "wall")
    return [f"median complete trial: {medians['wall']:.1f} s ({split})"]


def _summary_row(name: str, records: Sequence[TrialRecord]) -> tuple[str, str, str, str]:
    best = next(iter(ranked(records)), None)
    if best is None or best.samples_per_s is None:
        return (name, str(len(records)), "-", "-")
    return (name, str(len(records)), rate(best.samples_per_s).removesuffix("/s"), best.config.name)
