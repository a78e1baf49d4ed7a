"""Throughput over the micro-batch, one line a layout, and below it where memory ends."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bo_tuner.report.figures.style import (
    NEUTRAL,
    base_figure,
    hover_text,
    layout_style,
    micro_batch_axis,
    note_figure,
    or_blank,
)
from bo_tuner.report.frontier import Frontier, frontiers
from bo_tuner.text import rate
from bo_tuner.trial import TrialRecord, best_of

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["throughput_figure"]

_TITLE = "Throughput and where memory ends"
_UPPER, _ROW, _REST = 320, 22, 130
"""Pixels: the upper panel, one layout of the lower one, all that stands around them."""


def throughput_figure(records: Sequence[TrialRecord], *, n_ranks: int, limit_bytes: int | None) -> go.Figure:
    """Samples/s over the micro-batch; below, for every layout what fitted and what did not.

    A line joins the fastest trials of a layout at each micro-batch; other accumulations stand below it.

    Args:
        records: The trials of a study.
        n_ranks: World size.
        limit_bytes: Memory limit per rank that the frontier is drawn for; None when unknown.
    """
    known = frontiers(records, limit_bytes)
    if not known:
        return note_figure(_TITLE, "No trial has ended yet.")
    lower = _ROW * len(known) + 12
    figure = base_figure(_TITLE, height=_UPPER + lower + _REST, rows=(_UPPER, lower))
    for frontier in known:
        own = [record for record in records if record.config.layout == frontier.layout and record.result]
        _draw_rates(figure, own, n_ranks)
        _draw_frontier(figure, frontier, own, n_ranks)
    _draw_bounds(figure, records, n_ranks)
    _mark_best(figure, records)
    axis = micro_batch_axis([record.config.micro_batch_size for record in records if record.result])
    figure.update_xaxes(**axis, showticklabels=True)
    figure.update_xaxes(title={"text": ""}, row=1, col=1)
    figure.update_yaxes(title={"text": "samples/s"}, rangemode="tozero", row=1, col=1)
    figure.update_yaxes(autorange="reversed", showgrid=False, row=2, col=1)
    if best_of(records) is None:
        figure.update_yaxes(showticklabels=False, row=1, col=1)
        figure.add_annotation(
            text="No trial has completed.", x=0.5, y=0.5, xref="x domain", yref="y domain", showarrow=False
        )
    return figure


def _draw_rates(figure: go.Figure, own: Sequence[TrialRecord], n_ranks: int) -> None:
    import plotly.graph_objects as go

    style = layout_style(own[0].config)
    complete = [record for record in own if record.samples_per_s is not None]
    fastest: dict[int, float] = {}
    for record in complete:
        size = record.config.micro_batch_size
        fastest[size] = max(fastest.get(size, 0.0), record.samples_per_s or 0.0)
    figure.add_trace(
        go.Scatter(
            x=sorted(fastest),
            y=[fastest[size] for size in sorted(fastest)],
            mode="lines",
            line={"color": style.colour, "dash": style.dash, "width": 1.5},
            opacity=0.6,
            hoverinfo="skip",
            legendgroup=style.label,
            showlegend=False,
        ),
        row=1,
        col=1,
    )
    figure.add_trace(
        go.Scatter(
            x=or_blank([record.config.micro_batch_size for record in complete]),
            y=or_blank([record.samples_per_s for record in complete]),
            mode="markers",
            marker=style.marker,
            text=[hover_text(record, n_ranks=n_ranks) for record in complete],
            hoverinfo="text",
            name=style.label,
            legendgroup=style.label,
            showlegend=True,
        ),
        row=1,
        col=1,
    )


def _draw_frontier(figure: go.Figure, frontier: Frontier, own: Sequence[TrialRecord], n_ranks: int) -> None:
    """What fitted as a bar that ends at the largest, dots on to the smallest that did not, a cross for each that did not."""
    import plotly.graph_objects as go

    style = layout_style(frontier.layout)
    fitted = [record.config.micro_batch_size for record in own if record.has_run]
    if frontier.fits is not None:
        first, last = min(fitted), frontier.fits
        _row_line(figure, style.label, [first, last], width=7, dash="solid", colour=style.colour)
        figure.add_trace(
            go.Scatter(
                x=[last],
                y=[style.label],
                mode="markers",
                marker={**style.marker, "size": 10},
                text=[f"<b>{style.label}</b><br>micro-batch {last} fits: the largest that ran"],
                hoverinfo="text",
                legendgroup=style.label,
                showlegend=False,
            ),
            row=2,
            col=1,
        )
        if frontier.fails is not None and frontier.fails > last:
            _row_line(figure, style.label, [last, frontier.fails], width=2, dash="dot", colour=style.colour)
    ended = [record for record in own if record.result and record.result.outcome.is_memory]
    standing = [frontier.fails is not None and record.config.micro_batch_size >= frontier.fails for record in ended]
    figure.add_trace(
        go.Scatter(
            x=or_blank([record.config.micro_batch_size for record in ended]),
            y=[style.label] * max(len(ended), 1),  # every layout has its row
            mode="markers",
            marker={**style.cross, "opacity": [1.0 if holds else 0.4 for holds in standing] or 1.0},
            text=[
                hover_text(record, n_ranks=n_ranks) + ("" if holds else "<br>under an earlier, lower limit")
                for record, holds in zip(ended, standing, strict=True)
            ],
            hoverinfo="text",
            legendgroup=style.label,
            showlegend=False,
        ),
        row=2,
        col=1,
    )


def _row_line(figure: go.Figure, label: str, sizes: list[int], *, width: int, dash: str, colour: str) -> None:
    import plotly.graph_objects as go

    figure.add_trace(
        go.Scatter(
            x=sizes,
            y=[label, label],
            mode="lines",
            line={"color": colour, "width": width, "dash": dash},
            opacity=0.45,
            hoverinfo="skip",
            legendgroup=label,
            showlegend=False,
        ),
        row=2,
        col=1,
    )


def _draw_bounds(figure: go.Figure, records: Sequence[TrialRecord], n_ranks: int) -> None:
    """Trials that were ended early because they could not win, at the rate that they cannot exceed."""
    import plotly.graph_objects as go

    pruned = [(record, record.bound_samples_per_s) for record in records if record.bound_samples_per_s is not None]
    if pruned:
        figure.add_trace(
            go.Scatter(
                x=[record.config.micro_batch_size for record, _ in pruned],
                y=[bound for _, bound in pruned],
                mode="markers",
                marker={
                    "symbol": "triangle-down-open",
                    "size": 9,
                    "color": [layout_style(record.config).colour for record, _ in pruned],
                },
                text=[
                    f"{hover_text(record, n_ranks=n_ranks)}<br>at most {rate(bound or 0.0)}" for record, bound in pruned
                ],
                hoverinfo="text",
                name="ended early",
            ),
            row=1,
            col=1,
        )


def _mark_best(figure: go.Figure, records: Sequence[TrialRecord]) -> None:
    import plotly.graph_objects as go

    best = best_of(records)
    if best is None or best.standing_samples_per_s is None:
        return
    size = best.config.micro_batch_size
    sizes = sorted(record.config.micro_batch_size for record in records if record.result)
    is_right = size * size > sizes[0] * sizes[-1]  # in the right half of the logarithmic axis
    figure.add_trace(
        go.Scatter(
            x=[size],
            y=[best.standing_samples_per_s],
            mode="markers+text",
            marker={"symbol": "circle-open", "size": 17, "color": NEUTRAL, "line": {"width": 2}},
            text=[
                f"<b>{html.escape(best.config.name, quote=False)}</b> {rate(best.standing_samples_per_s)}{best.beside}   "
            ],
            textposition="top left" if is_right else "top right",
            hoverinfo="skip",
            showlegend=False,
            cliponaxis=False,
        ),
        row=1,
        col=1,
    )
