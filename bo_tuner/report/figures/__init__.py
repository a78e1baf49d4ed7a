"""Figures of a study, one function each; plotly is imported when one is called.

A layout (ZeRO stage, depth, recompute, ...) looks the same in all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bo_tuner.report.figures.history import history_figure
from bo_tuner.report.figures.importance import importance_figure
from bo_tuner.report.figures.memory import memory_figure
from bo_tuner.report.figures.pareto import pareto_figure
from bo_tuner.report.figures.step_time import step_time_figure
from bo_tuner.report.figures.throughput import throughput_figure
from bo_tuner.trial import TrialRecord, goal_of, last_limit_bytes

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = [
    "dashboard_figures",
    "history_figure",
    "importance_figure",
    "memory_figure",
    "pareto_figure",
    "step_time_figure",
    "study_figures",
    "throughput_figure",
]


def study_figures(records: Sequence[TrialRecord], *, n_ranks: int) -> dict[str, go.Figure]:
    """All figures of a study by name, in the order of the report; the front is among them where the study's goal has one."""
    limit_bytes = last_limit_bytes(records)
    front = {"pareto": pareto_figure(records, n_ranks=n_ranks)} if goal_of(records).has_front else {}
    return {
        **front,
        "throughput": throughput_figure(records, n_ranks=n_ranks, limit_bytes=limit_bytes),
        "memory": memory_figure(records, n_ranks=n_ranks, limit_bytes=limit_bytes),
        "history-trials": history_figure(records, n_ranks=n_ranks, over="trials"),
        "history-time": history_figure(records, n_ranks=n_ranks, over="time"),
        "step-time": step_time_figure(records),
        "importances": importance_figure(records),
    }


def dashboard_figures(records: Sequence[TrialRecord], *, n_ranks: int) -> dict[str, go.Figure]:
    """The same, as tall as the Optuna dashboard makes each."""
    figures = study_figures(records, n_ranks=n_ranks)
    for figure in figures.values():
        figure.update_layout(height=None)
    return figures
