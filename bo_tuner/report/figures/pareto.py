"""Samples/s against peak memory, and the trials that none beats in both."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bo_tuner.report.figures.style import NEUTRAL, base_figure, hover_text, layout_style, note_figure
from bo_tuner.text import rate
from bo_tuner.trial import TrialRecord, pareto_front

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["pareto_figure"]

_TITLE = "Samples/s against peak memory"


def pareto_figure(records: Sequence[TrialRecord], *, n_ranks: int) -> go.Figure:
    """Every complete trial that fits by samples/s and peak memory of its fullest rank; a line leads along the front, which is named.

    Args:
        records: The trials of a study with the goal `throughput,memory`; of any other one there is no front.
        n_ranks: World size.
    """
    import plotly.graph_objects as go

    told = [record for record in records if record.standing_samples_per_s is not None and record.peak_memory_bytes]
    if not told:
        return note_figure(_TITLE, "No trial has completed and told its memory yet.")
    figure = base_figure(_TITLE, height=420)
    front = pareto_front(told)
    widest = max(map(_gib, told))
    figure.add_trace(
        go.Scatter(
            x=[_gib(record) for record in front],
            y=[record.standing_samples_per_s for record in front],
            mode="lines+markers+text",
            line={"color": NEUTRAL, "width": 2.5, "shape": "vh"},
            marker={"symbol": "circle-open", "size": 17, "color": NEUTRAL, "line": {"width": 2}},
            text=[
                f"<b>{html.escape(record.config.name, quote=False)}</b> {rate(record.standing_samples_per_s or 0.0)}"
                for record in front
            ],
            textposition=["bottom right" if _gib(record) < widest / 2 else "top left" for record in front],
            hoverinfo="skip",
            name="front",
            cliponaxis=False,
        )
    )
    for layout in dict.fromkeys(record.config.layout for record in told):
        style = layout_style(layout)
        own = [record for record in told if record.config.layout == layout]
        figure.add_trace(
            go.Scatter(
                x=[_gib(record) for record in own],
                y=[record.standing_samples_per_s for record in own],
                mode="markers",
                marker=style.marker,
                text=[hover_text(record, n_ranks=n_ranks) for record in own],
                hoverinfo="text",
                name=style.label,
            )
        )
    figure.update_xaxes(title={"text": "peak memory, GiB a rank"}, rangemode="tozero")
    figure.update_yaxes(title={"text": "samples/s"}, rangemode="tozero")
    return figure


def _gib(record: TrialRecord) -> float:
    return (record.peak_memory_bytes or 0) / 2**30
