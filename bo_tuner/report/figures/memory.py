"""Peak memory against the limit."""

from __future__ import annotations

import math
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
from bo_tuner.report.frontier import frontiers
from bo_tuner.text import gib
from bo_tuner.trial import TrialRecord

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["memory_figure"]

_TITLE = "Peak memory against the limit"
_FLAT = 0.1
"""Where all peaks lie below this fraction of the limit, only a logarithmic axis tells them apart."""


def memory_figure(records: Sequence[TrialRecord], *, n_ranks: int, limit_bytes: int | None) -> go.Figure:
    """Peak memory of the fullest rank over the micro-batch, one line a layout, and the limit.

    A cross is a trial that memory ended: it stands at what it held, and would have needed more.

    Args:
        records: The trials of a study.
        n_ranks: World size.
        limit_bytes: Memory limit per rank of the last run; None when unknown.
    """
    import plotly.graph_objects as go

    read = [record for record in records if _peak(record) is not None]
    if not read:
        return note_figure(_TITLE, "No trial has told its memory yet.")
    most_bytes = max(limit_bytes or 0, *(_peak(record) or 0 for record in read))
    unit, unit_bytes = ("GiB", 2**30) if most_bytes >= 2**30 else ("MiB", 2**20)
    figure = base_figure(_TITLE, height=420)
    for frontier in frontiers(read, limit_bytes):
        style = layout_style(frontier.layout)
        own = sorted(
            (record for record in read if record.config.layout == frontier.layout),
            key=lambda record: record.config.micro_batch_size,
        )
        ran = [record for record in own if record.result and not record.result.outcome.is_memory]
        ended = [record for record in own if record.result and record.result.outcome.is_memory]
        most: dict[int, int] = {}
        for record in ran:
            size = record.config.micro_batch_size
            most[size] = max(most.get(size, 0), _peak(record) or 0)
        figure.add_trace(
            go.Scatter(
                x=list(most),
                y=[peak / unit_bytes for peak in most.values()],
                mode="lines",
                line={"color": style.colour, "dash": style.dash, "width": 1.5},
                opacity=0.6,
                hoverinfo="skip",
                legendgroup=style.label,
                showlegend=False,
            )
        )
        for group, marker in ((ran, style.marker), (ended, style.cross)):
            figure.add_trace(
                go.Scatter(
                    x=or_blank([record.config.micro_batch_size for record in group]),
                    y=or_blank([(_peak(record) or 0) / unit_bytes for record in group]),
                    mode="markers",
                    marker=marker,
                    text=[hover_text(record, n_ranks=n_ranks) for record in group],
                    hoverinfo="text",
                    name=style.label,
                    legendgroup=style.label,
                    showlegend=group is ran,
                )
            )
    figure.update_xaxes(**micro_batch_axis([record.config.micro_batch_size for record in read]))
    figure.update_yaxes(title={"text": f"{unit} a rank"}, rangemode="tozero")
    _draw_limits(figure, read, limit_bytes, unit_bytes)
    return figure


def _draw_limits(figure: go.Figure, read: Sequence[TrialRecord], limit_bytes: int | None, unit_bytes: int) -> None:
    is_log = limit_bytes is not None and max(_peak(record) or 0 for record in read) < _FLAT * limit_bytes
    if is_log:
        ticks = [digit * 10.0**power for power in range(-4, 4) for digit in (1, 2, 5)]
        figure.update_yaxes(type="log", tickvals=ticks, ticktext=[f"{tick:g}" for tick in ticks])
    earlier = {record.result.limit_bytes for record in read if record.result and record.result.limit_bytes}
    for limit in sorted(earlier | ({limit_bytes} if limit_bytes else set())):
        is_last = limit == limit_bytes
        height = limit / unit_bytes
        figure.add_hline(
            y=height, line={"color": NEUTRAL, "width": 2 if is_last else 1, "dash": "dash" if is_last else "dot"}
        )
        figure.add_annotation(
            text=f"{'limit' if is_last else 'earlier limit'} {gib(limit)}",
            x=0,
            xref="paper",
            xanchor="left",
            y=math.log10(height) if is_log else height,  # plotly wants the logarithm for a text, but not for a line
            yanchor="bottom",
            showarrow=False,
        )


def _peak(record: TrialRecord) -> int | None:
    """Bytes of the fullest rank; None when nothing was read."""
    return (record.result.peak_memory_bytes if record.result else None) or None
