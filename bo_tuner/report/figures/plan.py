"""What a plan expects: memory and time by part, and a pipeline's timeline."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from bo_tuner.models.cost import TIME_PARTS
from bo_tuner.models.memory import MEMORY_PARTS
from bo_tuner.models.planner import Planned
from bo_tuner.report.figures.style import NEUTRAL, base_figure, label_rows
from bo_tuner.schedules import Backward, Forward, Timeline
from bo_tuner.text import gib, seconds

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["memory_parts_figure", "time_parts_figure", "timeline_figure"]

# As the colours of layouts, and three more that keep a contrast of at least 3 on white and on a dark page.
_COLOURS = ("#1f7fc4", "#d55e00", "#009e73", "#c2629b", "#8f6fd6", "#a47b00", NEUTRAL)
_FORWARD, _BACKWARD = _COLOURS[0], _COLOURS[1]
_ROW = 46
"""Pixels of one config: its name, and beneath it its bar."""
_LANE = 22
_LANES_ROOM = 520
"""Pixels of a stage, and of all stages where they are many."""


def memory_parts_figure(configs: Sequence[Planned], *, limit_bytes: int) -> go.Figure:
    """Memory of each config by part, and the limit as a line.

    Args:
        configs: In the order that they are shown in.
        limit_bytes: Of one device.
    """
    figure = _bars(
        "Memory by part",
        MEMORY_PARTS,
        [{part: n_bytes / 2**30 for part, n_bytes in planned.memory_bytes.items()} for planned in configs],
        [
            (planned.config.name, gib(planned.total_bytes), {part: gib(n) for part, n in planned.memory_bytes.items()})
            for planned in configs
        ],
    )
    figure.add_vline(x=limit_bytes / 2**30, line={"color": NEUTRAL, "dash": "dash", "width": 1.5})
    figure.update_xaxes(title={"text": "GiB a device"})
    return figure


def time_parts_figure(configs: Sequence[Planned]) -> go.Figure:
    """Step time of each config by part.

    Args:
        configs: In the order that they are shown in.
    """
    figure = _bars(
        "Step time by part",
        TIME_PARTS,
        [planned.times_s for planned in configs],
        [
            (
                planned.config.name,
                seconds(planned.step_time_s),
                {part: seconds(s) for part, s in planned.times_s.items()},
            )
            for planned in configs
        ],
    )
    figure.update_xaxes(title={"text": "seconds a step"})
    return figure


def _bars(
    title: str,
    parts: Sequence[str],
    values: Sequence[Mapping[str, float]],
    told: Sequence[tuple[str, str, Mapping[str, str]]],
) -> go.Figure:
    """One stacked bar a config, with its name and total above it; `told` has name, total and parts as text."""
    import plotly.graph_objects as go

    figure = base_figure(title, height=_ROW * len(values) + 110)
    for part, colour in zip(parts, _COLOURS, strict=True):
        figure.add_trace(
            go.Bar(
                x=[of_config[part] for of_config in values],
                y=list(range(len(values))),
                orientation="h",
                width=0.4,
                name=part,
                marker={"color": colour},
                text=[f"<b>{html.escape(name, quote=False)}</b><br>{part} {texts[part]}" for name, _, texts in told],
                textposition="none",
                hoverinfo="text",
            )
        )
    label_rows(figure, [(html.escape(name, quote=False), total) for name, total, _ in told], above=0.22)
    figure.update_layout(barmode="stack", legend={"traceorder": "normal"})
    figure.update_xaxes(rangemode="tozero")
    return figure


def timeline_figure(timeline: Timeline) -> go.Figure:
    """One lane a stage: forward and backward passes by colour, every other micro-batch lighter, and what is left open is idle.

    Args:
        timeline: Of one chunk a rank.
    """
    import plotly.graph_objects as go

    depth = len(timeline.orders)
    lanes = min(_LANE * depth, _LANES_ROOM)
    figure = base_figure("Pipeline timeline", height=lanes + 110)
    for kind, name, colour in ((Forward, "forward", _FORWARD), (Backward, "backward", _BACKWARD)):
        found = [
            (stage, action.micro_batch, start, end)
            for stage in range(depth)
            for action, start, end in zip(
                timeline.orders[stage], timeline.start_s[stage], timeline.end_s[stage], strict=True
            )
            if isinstance(action, kind)
        ]
        figure.add_trace(
            go.Bar(
                x=[end - start for *_, start, end in found],
                base=[start for *_, start, _ in found],
                y=[stage for stage, *_ in found],
                orientation="h",
                width=0.86,
                name=name,
                marker={"color": colour, "opacity": [1.0 - 0.35 * (number % 2) for _, number, *_ in found]},
                text=[
                    f"{name} pass of micro-batch {number}, stage {stage}<br>{seconds(start)} to {seconds(end)}"
                    for stage, number, start, end in found
                ],
                textposition="none",
                hoverinfo="text",
            )
        )
    figure.update_layout(barmode="overlay")
    figure.update_xaxes(title={"text": "seconds since the step began"}, rangemode="tozero")
    figure.update_yaxes(
        range=[depth - 0.4, -0.6], title={"text": "stage"}, dtick=max(1, -(-18 * depth // lanes)), showgrid=False
    )
    return figure
