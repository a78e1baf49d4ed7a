"""What the figures share: one look per layout, hover texts, and the line that stands where there is nothing to draw."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bo_tuner.config import TrainConfig
from bo_tuner.report.frontier import layout_label
from bo_tuner.text import gib, rate, seconds
from bo_tuner.trial import TrialRecord

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = [
    "NEUTRAL",
    "LayoutStyle",
    "base_figure",
    "hover_text",
    "label_rows",
    "layout_style",
    "micro_batch_axis",
    "note_figure",
    "or_blank",
]

# After Okabe and Ito's palette for colour-blind readers (2008), with a lighter blue and a darker pink, so that each has a
# contrast of at least 3 both on white and on a dark page.
_STAGE_COLOURS = ("#1f7fc4", "#d55e00", "#009e73", "#c2629b")
NEUTRAL = "#7d8590"
"""Lines and marks that stand for no layout; readable on both."""
_TEXT = "#6e7781"
_GRID = "rgba(125, 133, 144, 0.25)"
_DEPTH_SYMBOLS = {1: "circle", 2: "square", 3: "pentagon", 4: "diamond", 6: "star", 8: "triangle-up"}
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


@dataclass(frozen=True, slots=True)
class LayoutStyle:
    """How a layout looks, in every figure: the colour tells the ZeRO stage, the symbol the depth, open and dotted recompute."""

    label: str
    colour: str
    symbol: str
    dash: str

    @property
    def marker(self) -> dict[str, Any]:
        """For points of a trial that ran."""
        return {"color": self.colour, "symbol": self.symbol, "size": 8, "line": {"width": 1.5, "color": self.colour}}

    @property
    def cross(self) -> dict[str, Any]:
        """For points of a trial that memory ended."""
        return {"symbol": "x-thin", "size": 9, "line": {"width": 2.5, "color": self.colour}}


def layout_style(config: TrainConfig) -> LayoutStyle:
    """The look follows from the layout alone, so that figures of different studies compare."""
    symbol = _DEPTH_SYMBOLS.get(config.pipeline_depth, "hexagon")
    return LayoutStyle(
        label=html.escape(layout_label(config), quote=False),
        colour=_STAGE_COLOURS[config.zero_stage],
        symbol=f"{symbol}-open" if config.recompute else symbol,
        dash="dot" if config.recompute else "solid",
    )


def base_figure(title: str, *, height: int, rows: Sequence[int] = ()) -> go.Figure:
    """A figure without traces, transparent, for light and dark pages.

    Args:
        title: Of the whole.
        height: Pixels.
        rows: Pixels of each panel, for panels above one another that share the x axis; empty for one panel.
    """
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    figure = (
        make_subplots(rows=len(rows), shared_xaxes=True, vertical_spacing=34 / height, row_heights=list(rows))
        if rows
        else go.Figure()
    )
    figure.update_layout(
        template="none",
        title={"text": title, "x": 0, "xref": "container", "xanchor": "left", "pad": {"l": 12}, "font": {"size": 15}},
        height=height,
        margin={"l": 8, "r": 16, "t": 48, "b": 8},  # the axes widen them as they need
        paper_bgcolor="rgba(0, 0, 0, 0)",
        plot_bgcolor="rgba(0, 0, 0, 0)",
        font={"family": _FONT, "size": 12, "color": _TEXT},
        legend={"tracegroupgap": 0},
        hoverlabel={"align": "left"},
        showlegend=True,
        hovermode="closest",
    )
    axis: dict[str, Any] = {
        "gridcolor": _GRID,
        "linecolor": _GRID,
        "zeroline": False,
        "automargin": True,
        "title": {"standoff": 8},
    }
    figure.update_xaxes(**axis)
    figure.update_yaxes(**axis)
    return figure


def note_figure(title: str, note: str) -> go.Figure:
    """One line that says why there is nothing to draw."""
    figure = base_figure(title, height=180)
    figure.update_layout(showlegend=False)
    figure.update_xaxes(visible=False, fixedrange=True)
    figure.update_yaxes(visible=False, fixedrange=True)
    figure.add_annotation(
        text="<br>".join(textwrap.wrap(html.escape(note, quote=False), 44)),
        x=0.5,
        y=0.5,
        xref="paper",
        yref="paper",
        showarrow=False,
        font={"size": 14},
    )
    return figure


def micro_batch_axis(sizes: Sequence[int]) -> dict[str, Any]:
    """A logarithmic x axis with ticks at powers of two; at every other one where a phone has no room for all."""
    powers = range(max(sizes).bit_length() + 1)
    ticks = [2**power for power in powers[:: 1 if len(powers) <= 8 else 2]]
    return {
        "type": "log",
        "title": {"text": "micro-batch, samples a rank"},
        "tickvals": ticks,
        "ticktext": [str(tick) for tick in ticks],
        "tickangle": 0,
    }


def label_rows(figure: go.Figure, labels: Sequence[tuple[str, str]], *, above: float) -> None:
    """Rows from the top down instead of an axis, each with a config's name, already safe in HTML, and what is said of it over its place.

    Args:
        figure: Its rows stand at 0, 1, 2, ...
        labels: Name and text of every row.
        above: Distance of a label from its row; rows are 1 apart.
    """
    for place, (name, text) in enumerate(labels):
        figure.add_annotation(
            text=f"<b>{name}</b>  {text}",
            x=0,
            xref="paper",
            xanchor="left",
            y=place - above,
            yanchor="bottom",
            showarrow=False,
        )
    figure.update_yaxes(range=[len(labels) - 0.6, -0.75], showticklabels=False, showgrid=False)


def or_blank(values: list[Any]) -> list[Any]:
    """`values`, or one point that is nowhere: a trace without points has no entry in the legend, and no row."""
    return values or [None]


def hover_text(record: TrialRecord, *, n_ranks: int) -> str:
    """All that is known of a trial, for people who point at it."""
    config, result = record.config, record.result
    lines = [f"<b>{html.escape(config.name, quote=False)}</b>, trial {record.number}"]
    batch = f"micro-batch {config.micro_batch_size} x accumulation {config.grad_accum_steps}"
    lines.append(f"{batch} = {config.global_batch(n_ranks)} samples a step")
    if result is None:
        return "<br>".join([*lines, "no result yet"])
    measurement, interval = (record.told or result).measurement, record.samples_per_s_interval
    if record.samples_per_s is not None and measurement is not None and interval is not None:
        low, high = interval
        lines.append(f"{rate(record.samples_per_s)} ({rate(low)} to {rate(high)} with 95 %)")
        lines.append(f"step {seconds(measurement.step_time_s)}{record.goal.beside(record)}")
    else:
        lines.append(f"ended as {result.outcome.value}")
        lines += textwrap.wrap(html.escape(result.reason, quote=False), 60)[:4]
    if result.peak_memory_bytes:
        of_limit = f" of {gib(result.limit_bytes)}" if result.limit_bytes else ""
        lines.append(f"peak memory {gib(result.peak_memory_bytes)}{of_limit} a rank")
    return "<br>".join(lines)
