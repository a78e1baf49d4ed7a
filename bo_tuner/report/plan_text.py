"""A plan as text for people."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from typing import TypeVar

from bo_tuner.models.planner import Family, Plan, Planned
from bo_tuner.report.summary import aligned
from bo_tuner.text import count, gib, large, rate, seconds

__all__ = ["fallen_lines", "parts_text", "plan_question", "plan_text"]

Number = TypeVar("Number", int, float)
_SHOWN = 3
"""Reasons of one cause."""
_NAMED = 4
"""Layouts that fell for one reason."""


def plan_text(plan: Plan, top: int = 10) -> str:
    """The question, the first configs as a table, where time and memory of the best go, and why families fell.

    Args:
        plan: What to tell.
        top: Rows of the table.
    """
    shown = plan.best(top)
    header = ("config", "samples/s", "step", f"of {gib(plan.limit_bytes)} a device", "")
    parts = [*plan_question(plan), "", *aligned([header, *map(_row, shown)])]
    if plan.n_fitting:
        best = shown[0] if shown else plan.best(1)[0]
        parts += [
            "",
            f"best: {best.config.name}, predicted",
            f"  step {seconds(best.step_time_s)}: {parts_text(best.times_s, seconds)}",
            f"  memory {gib(best.total_bytes)} of {gib(plan.limit_bytes)}: {parts_text(best.memory_bytes, gib)}",
        ]
    if plan.families:
        parts += ["", f"fell, {count(len(plan.families), 'layout')}:"]
        parts += [f"  {line}" for line in fallen_lines(plan.families)]
    return "\n".join(parts)


def _row(planned: Planned) -> tuple[str, ...]:
    return (
        planned.config.name,
        rate(planned.samples_per_s).removesuffix("/s"),
        seconds(planned.step_time_s),
        gib(planned.total_bytes),
        "" if planned.fits else "does not fit",
    )


def plan_question(plan: Plan) -> tuple[str, str, str]:
    """One line on the model, one on the cluster and its rates, one on what was predicted."""
    problem = plan.problem
    profile, hardware = problem.profile, problem.hardware
    nodes = f"{problem.n_nodes} nodes x " if problem.n_nodes > 1 else ""
    return (
        (
            f"{profile.name}: {large(profile.n_parameters)} parameters, {profile.seq_len} tokens a sample, "
            f"{8 * profile.element_bytes} bits an element"
        ),
        (
            f"on {nodes}{min(problem.node_size, problem.n_ranks)} x {hardware.name}, {gib(hardware.memory_bytes)} each; rates from data "
            f"sheets: {hardware.source}"
        ),
        (
            f"predicted, not measured: {count(len(plan), 'config')} of {count(plan.global_batch, 'sample')} a step, "
            f"{plan.n_fitting} of them within {gib(plan.limit_bytes)} a device"
        ),
    )


def parts_text(parts: Mapping[str, Number], text: Callable[[Number], str]) -> str:
    """Parts that are something, the largest first."""
    return ", ".join(
        f"{name} {text(value)}" for name, value in sorted(parts.items(), key=lambda part: -part[1]) if value
    )


def fallen_lines(families: Iterable[Family]) -> list[str]:
    """Why families fell, a few lines for each cause."""
    lines: list[str] = []
    for cause, of_cause in groupby(sorted(families, key=lambda family: family.cause), lambda family: family.cause):
        names: dict[str, list[str]] = {}
        for family in of_cause:
            names.setdefault(family.reason, []).append(family.layout.layout_name)
        for reason, layouts in [*names.items()][:_SHOWN]:
            more = f" and {len(layouts) - _NAMED} more" if len(layouts) > _NAMED else ""
            lines.append(f"{cause}: {', '.join(layouts[:_NAMED])}{more}: {reason}")
        n_left = sum(map(len, [*names.values()][_SHOWN:]))
        if n_left:
            lines.append(f"{cause}: {n_left} more")
    return lines
