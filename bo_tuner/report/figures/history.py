"""Every trial as it came, and the best so far."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from bo_tuner.goal import THROUGHPUT, Goal, Measure
from bo_tuner.report.figures.style import NEUTRAL, base_figure, hover_text, layout_style, note_figure
from bo_tuner.trial import TrialRecord, goal_of

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["history_figure"]

_TITLES = {"trials": "History over trials", "time": "History over time"}


def history_figure(
    records: Sequence[TrialRecord], *, n_ranks: int, over: Literal["trials", "time"] = "trials"
) -> go.Figure:
    """Samples/s of every trial as it came, and the best so far; what did not complete stands at zero.

    Where the goal is another figure of which more is better, that; less of latency or cost is more samples/s.

    Args:
        records: The trials of a study.
        n_ranks: World size.
        over: The x axis: the trial's number, or the time spent in trials until it ended (retries included, pauses left out).
    """
    import plotly.graph_objects as go

    ended = [record for record in records if record.result is not None]
    if not ended:
        return note_figure(_TITLES[over], "No trial has ended yet.")
    scale, unit = _time_unit(sum(record.wall_s for record in ended))
    if over == "trials":
        where = [float(record.number) for record in ended]
    else:
        where = [seconds / scale for seconds in itertools.accumulate(record.wall_s for record in ended)]
    figure = base_figure(_TITLES[over], height=380)
    bests = list(itertools.accumulate(map(_height, ended), max))
    first = next((index for index, best in enumerate(bests) if best > 0), len(bests))
    if first < len(bests):
        figure.add_trace(
            go.Scatter(
                x=where[first:],
                y=bests[first:],
                mode="lines",
                line={"color": NEUTRAL, "width": 2.5, "shape": "hv"},
                hoverinfo="skip",
                name="best so far",
            )
        )
    at = dict(zip((record.number for record in ended), where, strict=True))
    complete = [record for record in ended if _height(record)]
    for stage in sorted({record.config.zero_stage for record in complete}):
        own = [record for record in complete if record.config.zero_stage == stage]
        name = f"ZeRO {stage}"
        marker = layout_style(own[0].config).marker
        symbols = [layout_style(record.config).symbol for record in own]
        points = _marks(own, at, n_ranks, name=name, marker={**marker, "symbol": symbols})
        figure.add_trace(points.update(legendgroup=name, showlegend=False))
        # The legend tells the colour alone, so it shows the plainest symbol, not that of the stage's first trial.
        plain = {**marker, "symbol": "circle"}
        figure.add_trace(go.Scatter(x=[None], y=[None], mode="markers", marker=plain, name=name, legendgroup=name))
    by_memory = [record for record in ended if record.result and record.result.outcome.is_memory]
    others = [record for record in ended if not _height(record) and record not in by_memory]
    for group, name, symbol in ((by_memory, "did not fit", "x-thin"), (others, "other ends", "circle-x-open")):
        if group:
            colours = [layout_style(record.config).colour for record in group]
            marker = {"color": colours, "symbol": symbol, "size": 9, "line": {"width": 2, "color": colours}}
            figure.add_trace(_marks(group, at, n_ranks, name=name, marker=marker))
    figure.update_xaxes(title={"text": "trial" if over == "trials" else f"time spent in trials, {unit}"})
    if over == "time":
        figure.update_xaxes(rangemode="tozero", nticks=8)
    else:
        figure.update_xaxes(dtick=max(1, round(len(records) / 7)))  # trials are whole
    figure.update_yaxes(title={"text": _shown(goal_of(records)).heading}, rangemode="tozero")
    return figure


def _shown(goal: Goal) -> Measure:
    """The goal's own figure where more of it is better, else samples/s, which less of it follows."""
    return goal.measure if goal.measure.direction == "maximize" else THROUGHPUT.measure


def _height(record: TrialRecord) -> float:
    value = record.goal.value(record) if _shown(record.goal) is record.goal.measure else record.samples_per_s
    return value or 0.0


def _marks(
    group: Sequence[TrialRecord], at: dict[int, float], n_ranks: int, *, name: str, marker: Mapping[str, object]
) -> go.Scatter:
    import plotly.graph_objects as go

    return go.Scatter(
        x=[at[record.number] for record in group],
        y=list(map(_height, group)),
        mode="markers",
        marker=marker,
        text=[hover_text(record, n_ranks=n_ranks) for record in group],
        hoverinfo="text",
        name=name,
        cliponaxis=False,
    )


def _time_unit(seconds: float) -> tuple[float, str]:
    """Seconds in the unit, and its name."""
    if seconds < 180:
        return (1.0, "s")
    return (60.0, "min") if seconds < 3 * 3600 else (3600.0, "h")
