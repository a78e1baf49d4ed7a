"""A plan as one HTML page: the best first, its memory and time by part, and how a pipeline goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bo_tuner.models.planner import Plan, Planned, timeline_of
from bo_tuner.report.figures.plan import memory_parts_figure, time_parts_figure, timeline_figure
from bo_tuner.report.figures.style import note_figure
from bo_tuner.report.html import rendered, write_page
from bo_tuner.report.plan_text import parts_text, plan_question
from bo_tuner.schedules import SCHEDULES
from bo_tuner.text import gib, rate, seconds

__all__ = ["plan_html", "write_plan"]

_FEWEST_DRAWN = 8
"""Micro-batches of a timeline, or twice as many as the pipeline is deep,"""
_MOST_DRAWN = 3_000
"""as long as there are no more passes than a page can hold and a reader can tell apart."""


def write_plan(plan: Plan, path: Path, *, top: int = 10, timeline: str | None = None) -> Path:
    """Write the page, whole or not at all; returns the file.

    Args:
        plan: What to tell.
        path: The file.
        top: How many configs the figures show.
        timeline: Name of the config whose pipeline is shown; None for the best that has one.

    Raises:
        ConfigError: The plan has no config of that name.
        StoreError: The file cannot be written.
    """
    write_page(plan_html(plan, top=top, timeline=timeline), path)
    return path


def plan_html(plan: Plan, *, top: int = 10, timeline: str | None = None) -> str:
    """The page; arguments as for `write_plan`."""
    shown = plan.best(top)
    model, cluster, count = plan_question(plan)
    return rendered(
        "plan.html",
        {
            "memory": (
                "Memory by part",
                (
                    "Of the device that needs most, for the configs of the table, in its order. The dashed line is the limit, "
                    f"{gib(plan.limit_bytes)}."
                ),
                memory_parts_figure(shown, limit_bytes=plan.limit_bytes),
            ),
            "time": (
                "Step time by part",
                (
                    "Compute is that of the busiest stage; bubble and exchange are what it waits for; gradients, what nothing "
                    "hides of their exchange."
                ),
                time_parts_figure(shown),
            ),
            "timeline": _timeline(plan, plan.best_pipeline() if timeline is None else plan.find(timeline)),
        },
        {
            "name": plan.problem.profile.name,
            "model": model.partition(": ")[2],
            "cluster": cluster,
            "count": count,
            "limit": gib(plan.limit_bytes),
            "best": _best(plan),
            "rows": [_row(planned) for planned in shown],
            "families": [(family.layout.layout_name, family.cause, family.reason) for family in plan.families],
        },
    )


def _timeline(plan: Plan, planned: Planned | None) -> tuple[str, str, Any]:
    """Title, caption and figure."""
    title = "Pipeline timeline"
    if planned is None:
        return title, "Stages over time.", note_figure(title, "No pipeline fits.")
    config = planned.config
    depth, m = config.pipeline_depth, config.grad_accum_steps
    n_drawn = min(m, max(_FEWEST_DRAWN, 2 * depth), max(depth, _MOST_DRAWN // (2 * depth)))
    caption = f"One step of {config.name}: a lane a stage, and what is left open is idle. "
    if n_drawn < m:
        caption += (
            f"Drawn with {n_drawn} micro-batches; the step has {m}, and those in the middle go on in the same way. "
        )
    if not SCHEDULES[config.pipeline_schedule].drains:
        caption += f"It is the first of a training: {config.pipeline_schedule} does not drain, and later steps begin while this one ends. "
    return title, caption.strip(), timeline_figure(timeline_of(plan.problem, config, n_micro_batches=n_drawn))


def _best(plan: Plan) -> dict[str, Any] | None:
    if not plan.n_fitting:
        return None
    best = plan.best(1)[0]
    used_pct = 100 * best.total_bytes / plan.limit_bytes
    return {
        "name": best.config.name,
        "rate": rate(best.samples_per_s).removesuffix("/s"),
        "step": seconds(best.step_time_s),
        "times": parts_text(best.times_s, seconds),
        "memory": gib(best.total_bytes),
        "parts": parts_text(best.memory_bytes, gib),
        "used_pct": round(used_pct, 1),
        "choices": [(name.replace("_", " "), str(value)) for name, value in best.config.params().items()],
    }


def _row(planned: Planned) -> dict[str, Any]:
    return {
        "name": planned.config.name,
        "rate": (rate(planned.samples_per_s).removesuffix("/s"), planned.samples_per_s),
        "step": (seconds(planned.step_time_s), planned.step_time_s),
        "memory": (gib(planned.total_bytes), planned.total_bytes),
        "fits": planned.fits,
    }
