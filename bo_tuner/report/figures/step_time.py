"""How much the step time of the top configs varies."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bo_tuner.report.figures.style import base_figure, label_rows, layout_style, note_figure
from bo_tuner.text import seconds
from bo_tuner.trial import TrialRecord, ranked

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["step_time_figure"]

_TITLE = "Step-time spread of the top configs"
_ROW = 46
"""Pixels of one config."""


def step_time_figure(records: Sequence[TrialRecord], *, top: int = 6) -> go.Figure:
    """Every measured step of the fastest configs, as its slowest rank saw it, against the median of its config.

    Relative, since configs with other batches take steps of other lengths; the label tells the median.

    Args:
        records: The trials of a study.
        top: How many configs, the fastest first.
    """
    import plotly.graph_objects as go

    fastest = ranked(records)[:top]
    if not fastest:
        return note_figure(_TITLE, "No trial has completed, so no step was measured.")
    figure = base_figure(_TITLE, height=_ROW * len(fastest) + 130)
    labels: list[tuple[str, str]] = []
    for place, record in enumerate(fastest):
        measurement = record.result.measurement if record.result else None
        assert measurement is not None  # complete trials have one
        median = measurement.median_step_time_s
        colour = layout_style(record.config).colour
        name = html.escape(record.config.name, quote=False)
        figure.add_trace(
            go.Box(
                x=[100 * (time / median - 1) for time in measurement.slowest_s],
                y=[place] * len(measurement.slowest_s),
                orientation="h",
                boxpoints="all",
                pointpos=0,
                jitter=0.5,
                width=0.38,
                line={"color": colour, "width": 1.5},
                fillcolor="rgba(0, 0, 0, 0)",
                marker={"color": colour, "size": 5, "opacity": 0.8},
                text=[f"<b>{name}</b><br>step {seconds(time)}" for time in measurement.slowest_s],
                hoverinfo="text",
                hoveron="points",
                showlegend=False,
            )
        )
        labels.append((name, f"median {seconds(median)}"))
    label_rows(figure, labels, above=0.25)
    figure.update_xaxes(title={"text": "step time against the config's median, %"}, zeroline=True)
    return figure
