"""A study as a table for people, and as plain data for programs."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from bo_tuner.budget import Spent
from bo_tuner.config import TrainConfig
from bo_tuner.goal import THROUGHPUT, Goal
from bo_tuner.open_candidates import MemoryProof, memory_proofs
from bo_tuner.origin import REAL, Origin
from bo_tuner.report.progress import ending
from bo_tuner.report.standing import (
    as_deepspeed_counts,
    confirmation_text,
    margin_text,
    plus_minus,
    remarks,
    without_value,
)
from bo_tuner.text import count, gib, rate
from bo_tuner.trial import (
    TrialRecord,
    best_of,
    goal_of,
    last_limit_bytes,
    memory_margin,
    pareto_front,
    ranked,
)

__all__ = ["aligned", "study_to_dict", "summary_text", "trials_table"]


def study_to_dict(
    name: str,
    records: Sequence[TrialRecord],
    candidates: Sequence[TrainConfig],
    *,
    budget: str | None,
    spent: Spent,
    origin: Origin = REAL,
    goal: Goal = THROUGHPUT,
) -> dict[str, Any]:
    """What `tune --json` and `show --json` print."""
    best = best_of(records)
    limit_bytes = last_limit_bytes(records)
    return {
        "study": name,
        "origin": origin.kind,
        "objective": goal.name,
        "direction": goal.measure.direction,
        "unit": goal.measure.unit,
        "budget": budget,
        "spent": spent.to_dict(),
        "best": best.to_dict() if best else None,
        "pareto": [record.number for record in pareto_front(records)] if goal.has_front else None,
        "memory_limit_bytes": limit_bytes,
        "memory_margin_bytes": memory_margin(best, limit_bytes) if best else None,
        "launches_differ_by": _noise(records),
        "excluded": [
            {
                "layout": layout.layout_name,
                "micro_batch_size": proof.micro_batch_size,
                "n_candidates": n_excluded,
                "trial": proof.trial,
            }
            for layout, proof, n_excluded in excluded(records, candidates, limit_bytes=limit_bytes or 0)
        ],
        "trials": [record.to_dict() for record in records],
    }


def _noise(records: Sequence[TrialRecord]) -> dict[str, float] | None:
    """What launches of one config differ by; None before the first trial, and where nothing differs."""
    noise = records[0].noise if records else None
    if noise is None:
        return None
    return {
        "sd_fraction": round(noise.sd, 5),
        "half_width_fraction": round(noise.half_width, 5),
        "degrees_of_freedom": noise.n_free,
    }


def excluded(
    records: Sequence[TrialRecord], candidates: Sequence[TrainConfig], *, limit_bytes: int
) -> list[tuple[TrainConfig, MemoryProof, int]]:
    """Per layout that a trial showed not to hold some micro-batch: that proof, and how many candidates it rules out."""
    found: list[tuple[TrainConfig, MemoryProof, int]] = []
    for layout, proof in memory_proofs(records, limit_bytes=limit_bytes).items():
        own = [config for config in candidates if config.layout == layout]
        found.append((layout, proof, sum(config.micro_batch_size >= proof.micro_batch_size for config in own)))
    return found


def trials_table(records: Sequence[TrialRecord], *, n_ranks: int) -> str:
    """One row a trial: number, config, global batch, outcome, samples/s with half of its 95 % interval, the goal's own value where that is
    another one, samples/s as DeepSpeed's tuner counts, step time, peak memory, wall time, reason. A star marks the best, a plus the
    others of the front of a goal that has one."""
    goal = goal_of(records)
    header = (
        "trial",
        "config",
        "batch",
        "outcome",
        "samples/s",
        "95 %",
        *([goal.measure.heading] if goal.has_own_value else []),
        "as DeepSpeed counts",
        "step",
        "peak memory",
        "wall",
    )
    marks = {record.number: " +" for record in pareto_front(records)}
    best = best_of(records)
    if best is not None:
        marks[best.number] = " *"
    rows: list[tuple[str, ...]] = []
    for record in records:
        result = record.result
        value = record.samples_per_s
        measurement = record.told.measurement if record.told and value is not None else None
        rows.append(
            (
                f"{record.number}{marks.get(record.number, '')}",
                record.config.name,
                str(record.config.global_batch(n_ranks)),
                result.outcome.value if result else "-",
                f"{value:.4g}" if value is not None else "-",
                plus_minus(record) or "-",
                *([goal.cell(record)] if goal.has_own_value else []),
                as_deepspeed_counts(measurement) if measurement else "-",
                f"{measurement.step_time_s * 1000:.0f} ms" if measurement else "-",
                gib(record.peak_memory_bytes) if record.peak_memory_bytes else "-",
                f"{record.wall_s:.1f} s" if result else "-",
            )
        )
    reasons = [remarks(record) for record in records]
    lines = aligned([header, *rows])
    return "\n".join(f"{line}  {reason}".rstrip() for line, reason in zip(lines, ["", *reasons], strict=True))


def summary_text(
    records: Sequence[TrialRecord],
    *,
    candidates: Sequence[TrainConfig],
    limit_bytes: int | None,
    stages: Sequence[int],
    depths: Sequence[int] = (1,),
    origin: Origin = REAL,
) -> str:
    """The summary that DeepSpeed's tuner prints, per ZeRO stage and over all: trials, best value, best name; likewise per depth where
    there are pipelines; then what was ruled out and by which trial."""
    groups = [(f"z{stage}", [record for record in records if record.config.zero_stage == stage]) for stage in stages]
    if max(depths) > 1:
        groups += [
            (f"pp{depth}", [record for record in records if record.config.pipeline_depth == depth]) for depth in depths
        ]
    goal = goal_of(records)
    values = (f"best {goal.measure.heading}", *(["samples/s"] if goal.has_own_value else []))
    header = ("space", "trials", *values, "best name")
    groups.append(("all", list(records)))
    rows = [header, *(_summary_row(name, group, goal) for name, group in groups)]
    lines = aligned(rows)
    endings = Counter(record.result.outcome.value for record in records if record.result)
    counted = ", ".join(f"{n_such} {outcome}" for outcome, n_such in endings.most_common())
    n_configs = len({record.config for record in records if record.result})
    lines.append(f"\n{n_configs} of {len(candidates)} candidates ran: {counted or 'none finished'}")
    if limit_bytes is not None:
        for layout, proof, n_excluded in excluded(records, candidates, limit_bytes=limit_bytes):
            in_flight = f" with {layout.grad_accum_steps} in flight" if layout.pipeline_depth > 1 else ""
            lines.append(
                f"{layout.layout_name}: micro-batch {proof.micro_batch_size} and larger{in_flight} do not fit, which rules out "
                f"{count(n_excluded, 'candidate')} (trial {proof.trial})"
            )
    lines += _median_trial(records)
    best = best_of(records)
    if best is not None:
        per_rank = " a rank" if best.result and best.result.peak_memory_bytes else ""
        lines.append(f"best: {best.config.name}, {ending(best)}{per_rank}, {confirmation_text(best, origin)}")
        lines.append(margin_text(best, limit_bytes))
    elif without_value(records):
        lines.append(f"no best: {without_value(records)}")
    lines += _front(records)
    return "\n".join(lines)


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """One line a row, with columns as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _front(records: Sequence[TrialRecord]) -> list[str]:
    """The trials of the front, and how each is exported; nothing under a goal that has none."""
    front, ranks = pareto_front(records), [record.number for record in ranked(records)]
    if not front:
        return []
    rows = [
        (
            f"  trial {record.number}",
            record.config.name,
            rate(record.standing_samples_per_s or 0.0),
            gib(record.peak_memory_bytes or 0),
            f"--rank {ranks.index(record.number) + 1}",
        )
        for record in front
    ]
    return ["front of samples/s against peak memory, and its ranks for export:", *aligned(rows)]


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


def _summary_row(name: str, records: Sequence[TrialRecord], goal: Goal) -> tuple[str, ...]:
    best = best_of(records)
    if best is None or best.standing_samples_per_s is None:
        return (name, str(len(records)), "-", *(["-"] if goal.has_own_value else []), "-")
    value = [goal.cell(best.standing)] if goal.has_own_value else []
    return (name, str(len(records)), *value, rate(best.standing_samples_per_s).removesuffix("/s"), best.config.name)
