"""The figures, as data: what stands where, and that every study can be drawn."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from bo_tuner.config import TrainConfig
from bo_tuner.outcome import Outcome
from bo_tuner.report import (
    dashboard_figures,
    history_figure,
    importance_figure,
    memory_figure,
    step_time_figure,
    study_figures,
    throughput_figure,
)
from bo_tuner.report.figures.importance import parameter_importances
from bo_tuner.report.figures.style import layout_style
from bo_tuner.trial import TrialRecord, best_of, ranked
from tests.report.studies import GIB, LIMIT_BYTES, N_RANKS, edge_studies, ended, measured, numbered, rich_trials

STUDIES = {"rich": rich_trials(), **edge_studies()}
RICH = STUDIES["rich"]


def numbers(value: Any) -> Iterator[float]:
    """Every number in plain data."""
    if isinstance(value, dict):
        for item in value.values():
            yield from numbers(item)
    elif isinstance(value, list):
        for item in value:
            yield from numbers(item)
    elif isinstance(value, float):
        yield value


def points(figure: Any, **wanted: Any) -> list[tuple[float, Any]]:
    """(x, y) of every point on the traces that have these properties."""
    return [
        (x, y)
        for trace in figure.data
        if all(trace[name] == value for name, value in wanted.items())
        for x, y in zip(trace.x, trace.y, strict=True)
        if x is not None
    ]


def crosses(figure: Any) -> list[tuple[float, Any]]:
    """Points of trials that memory ended."""
    return [
        (x, y)
        for trace in figure.data
        if trace.type == "scatter" and trace.marker.symbol == "x-thin"
        for x, y in zip(trace.x, trace.y, strict=True)
        if x is not None
    ]


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_is_drawn_or_told_in_one_line(name: str) -> None:
    figures: dict[str, Any] = study_figures(STUDIES[name], n_ranks=N_RANKS)
    assert list(figures) == ["throughput", "memory", "history-trials", "history-time", "step-time", "importances"]
    for figure in figures.values():
        assert figure.data or len(figure.layout.annotations) == 1
        assert figure.layout.title.text
        assert all(math.isfinite(number) for number in numbers(json.loads(figure.to_json())))


def test_the_throughput_of_every_complete_trial_is_a_point_and_the_best_has_a_ring() -> None:
    figure: Any = throughput_figure(RICH, n_ranks=N_RANKS, limit_bytes=LIMIT_BYTES)
    drawn = points(figure, mode="markers", yaxis="y", showlegend=True)
    complete = ranked(RICH)
    assert {(trial.config.micro_batch_size, trial.samples_per_s) for trial in complete} <= set(drawn)
    assert points(figure, mode="markers+text") == [(complete[0].config.micro_batch_size, complete[0].samples_per_s)]


def test_a_line_joins_the_fastest_of_a_layout_at_each_micro_batch() -> None:
    slow, fast = TrainConfig(micro_batch_size=4), TrainConfig(micro_batch_size=4, grad_accum_steps=2)
    first = TrainConfig(micro_batch_size=1)
    records = numbered(*((config, measured(config, step_s=1.0, peak_bytes=GIB)) for config in (slow, first, fast)))
    figure: Any = throughput_figure(records, n_ranks=N_RANKS, limit_bytes=LIMIT_BYTES)
    rates = [record.samples_per_s for record in records]
    assert points(figure, mode="lines", yaxis="y") == [(1, rates[1]), (4, rates[2])]


def test_the_frontier_has_a_row_a_layout_a_cross_a_failure_and_its_edge_at_the_largest_that_fitted() -> None:
    figure: Any = throughput_figure(RICH, n_ranks=N_RANKS, limit_bytes=LIMIT_BYTES)
    by_memory = [trial for trial in RICH if trial.result and trial.result.outcome.is_memory]
    assert sorted(crosses(figure)) == sorted(
        (trial.config.micro_batch_size, layout_style(trial.config).label) for trial in by_memory
    )
    largest: dict[str, int] = {}
    for trial in RICH:
        if trial.has_run:
            label = layout_style(trial.config).label
            largest[label] = max(largest.get(label, 0), trial.config.micro_batch_size)
    edges = points(figure, mode="markers", yaxis="y2")
    assert {(size, label) for label, size in largest.items()} == set(edges) - set(crosses(figure))


def test_what_an_earlier_limit_ended_is_a_faint_cross() -> None:
    figure: Any = throughput_figure(STUDIES["earlier-limit"], n_ranks=N_RANKS, limit_bytes=LIMIT_BYTES)
    (marker,) = [trace.marker for trace in figure.data if trace.marker.symbol == "x-thin" and trace.x != (None,)]
    assert marker.opacity == (0.4,)


def test_a_trial_that_was_ended_early_stands_at_what_it_cannot_exceed() -> None:
    figure: Any = throughput_figure(RICH, n_ranks=N_RANKS, limit_bytes=LIMIT_BYTES)
    (pruned,) = [trial for trial in RICH if trial.result and trial.result.outcome is Outcome.PRUNED]
    assert points(figure, name="ended early") == [(pruned.config.micro_batch_size, 210.0)]


def test_memory_stands_against_the_limit_and_the_earlier_limits() -> None:
    figure: Any = memory_figure(STUDIES["earlier-limit"], n_ranks=N_RANKS, limit_bytes=LIMIT_BYTES)
    assert [shape.y0 for shape in figure.layout.shapes] == [8, LIMIT_BYTES / GIB]
    assert [note.text for note in figure.layout.annotations] == ["earlier limit 8.00 GiB", "limit 73.60 GiB"]
    assert set(points(figure, mode="markers")) == {(16, 9), (1, 9)}
    assert figure.layout.yaxis.type != "log"


def test_memory_far_below_the_limit_is_drawn_on_a_logarithmic_axis_with_the_limit_in_place() -> None:
    config = TrainConfig()
    records = numbered((config, measured(config, step_s=1.0, peak_bytes=GIB // 8)))
    figure: Any = memory_figure(records, n_ranks=N_RANKS, limit_bytes=LIMIT_BYTES)
    assert figure.layout.yaxis.type == "log"
    assert figure.layout.shapes[0].y0 == pytest.approx(LIMIT_BYTES / GIB)
    assert figure.layout.annotations[0].y == pytest.approx(math.log10(LIMIT_BYTES / GIB))


def test_small_memory_is_told_in_mib() -> None:
    config = TrainConfig()
    result = replace(measured(config, step_s=1.0, peak_bytes=200 * 2**20), limit_bytes=300 * 2**20)
    figure: Any = memory_figure(numbered((config, result)), n_ranks=N_RANKS, limit_bytes=300 * 2**20)
    assert points(figure, mode="markers") == [(1, 200)]
    assert figure.layout.yaxis.title.text == "MiB a rank"
    assert figure.layout.shapes[0].y0 == 300


def test_the_best_so_far_only_rises_and_ends_at_the_best() -> None:
    best = best_of(RICH)
    assert best is not None
    for over in ("trials", "time"):
        line = points(history_figure(RICH, n_ranks=N_RANKS, over=over), name="best so far")
        rates = [rate for _, rate in line]
        assert rates == sorted(rates)
        assert rates[-1] == best.samples_per_s


def test_time_is_what_the_trials_took_retries_included() -> None:
    figure: Any = history_figure(RICH, n_ranks=N_RANKS, over="time")
    total_s = sum(trial.wall_s for trial in RICH)
    assert figure.layout.xaxis.title.text == "time spent in trials, min"
    last = max(x for trace in figure.data for x in trace.x if x is not None)
    assert last == pytest.approx(total_s / 60)


def test_the_history_has_every_trial_that_ended_once() -> None:
    figure: Any = history_figure(RICH, n_ranks=N_RANKS)
    numbers_drawn = sorted(x for x, _ in points(figure, mode="markers"))
    assert numbers_drawn == [trial.number for trial in RICH if trial.result is not None]


def test_step_times_are_relative_to_the_median_of_their_config_fastest_first() -> None:
    figure: Any = step_time_figure(RICH, top=4)
    assert [note.text.split("</b>")[0].removeprefix("<b>") for note in figure.layout.annotations] == [
        trial.config.name for trial in ranked(RICH)[:4]
    ]
    for trace in figure.data:
        assert sorted(trace.x)[len(trace.x) // 2] == pytest.approx(0)


def trials_by(rate_of: Any, configs: Sequence[TrainConfig]) -> list[TrialRecord]:
    """Complete trials whose rate follows from the config."""
    return numbered(
        *(
            (config, measured(config, step_s=config.global_batch(N_RANKS) / rate_of(config), peak_bytes=GIB))
            for config in configs
        )
    )


GRID = [TrainConfig(zero_stage=stage, micro_batch_size=size) for stage in (0, 1, 2, 3) for size in (1, 2, 4, 8, 16)]


def test_the_dimension_that_decides_has_the_largest_share() -> None:
    by_stage = parameter_importances(trials_by(lambda config: 100 + 50 * config.zero_stage, GRID))
    assert next(iter(by_stage)) == "zero_stage"
    by_size = parameter_importances(trials_by(lambda config: 100 + 50 * config.micro_batch_size, GRID))
    assert next(iter(by_size)) == "micro_batch_size"
    assert sum(by_size.values()) == pytest.approx(1)


def test_importances_are_the_same_every_time_and_leave_out_what_never_varied() -> None:
    records = trials_by(lambda config: 100 + config.micro_batch_size, GRID)
    shares = parameter_importances(records)
    assert shares == parameter_importances(records)
    assert set(shares) == {"zero_stage", "micro_batch_size"}


def test_importances_say_when_there_are_too_few_trials_or_nothing_to_tell_apart() -> None:
    few: Any = importance_figure(trials_by(lambda config: 100.0, GRID[:7]))
    assert few.layout.annotations[0].text == "Needs 8 complete trials; there are 7."
    same = TrainConfig()
    result = measured(same, step_s=1.0, peak_bytes=GIB)
    alike: Any = importance_figure(numbered(*((config, result) for config in GRID)))
    assert alike.layout.annotations[0].text.replace("<br>", " ") == (
        "All complete trials are equally good, or alike in every dimension."
    )


def test_a_layout_has_one_colour_in_all_figures() -> None:
    figures: dict[str, Any] = study_figures(RICH, n_ranks=N_RANKS)
    for stage in (0, 1, 2, 3):
        colours = {
            trace.marker.color
            for name in ("throughput", "memory", "history-trials", "history-time")
            for trace in figures[name].data
            if trace.legendgroup and trace.legendgroup.startswith(f"ZeRO {stage}") and trace.marker.color
        }
        assert colours == {layout_style(TrainConfig(zero_stage=stage)).colour}


def test_layouts_of_one_stage_differ_in_symbol_or_dash() -> None:
    layouts = [
        TrainConfig(zero_stage=1, pipeline_depth=depth, recompute=recompute)
        for depth in (1, 2, 4, 8)
        for recompute in (False, True)
    ]
    assert len({(layout_style(layout).symbol, layout_style(layout).dash) for layout in layouts}) == len(layouts)


def luminance(colour: str) -> float:
    """Relative, after WCAG 2."""
    parts = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("background", ["#ffffff", "#171b22"])
def test_every_colour_stands_out_on_light_and_on_dark(background: str) -> None:
    for stage in (0, 1, 2, 3):
        colour = layout_style(TrainConfig(zero_stage=stage)).colour
        bright, dim = sorted((luminance(colour), luminance(background)), reverse=True)
        assert (bright + 0.05) / (dim + 0.05) >= 3, colour


def test_markup_in_a_reason_is_text_in_the_hover() -> None:
    config = TrainConfig()
    records = numbered((config, ended(Outcome.FAILED, "<b>x</b> & y")), (replace(config, zero_stage=1), None))
    figure: Any = history_figure(records, n_ranks=N_RANKS)
    (texts,) = [trace.text for trace in figure.data if trace.name == "other ends"]
    assert "&lt;b&gt;x&lt;/b&gt; &amp; y" in texts[0]


def test_figures_for_the_dashboard_leave_their_height_to_it() -> None:
    assert all(figure.layout.height is None for figure in dashboard_figures(RICH, n_ranks=N_RANKS).values())


def test_importing_the_report_does_not_import_plotly_or_jinja() -> None:
    code = "import sys, bo_tuner.report; print([name for name in ('plotly', 'jinja2') if name in sys.modules])"
    ended = subprocess.run(
        [sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, check=True, timeout=200
    )
    assert ended.stdout == "[]\n"
