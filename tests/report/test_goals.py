"""Studies of other goals than samples/s, as people see them: their own value stands beside samples/s, and the front is shown."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
from rich.console import Console

from bo_tuner.budget import Budget, Spent
from bo_tuner.config import TrainConfig
from bo_tuner.engine import Snapshot
from bo_tuner.goal import Goal
from bo_tuner.report import (
    LineProgress,
    ReportedStudy,
    history_figure,
    importance_figure,
    pareto_figure,
    report_html,
    study_figures,
    study_to_dict,
    summary_text,
    throughput_figure,
    trials_table,
)
from bo_tuner.report.answer import answer_of
from bo_tuner.report.frame import StudyFrame
from bo_tuner.trial import TrialRecord
from tests.report.studies import GIB, N_RANKS, SEQ_LEN, measured, reported_manifest

ENERGY, LATENCY, BOTH = Goal(name="energy"), Goal(name="latency"), Goal(name="throughput,memory")
COST = Goal.of("cost", price_per_gpu_hour=2.0, n_ranks=N_RANKS)


def trial(number: int, step_s: float, goal: Goal, *, joules: float | None = None, peak_gib: int = 10) -> TrialRecord:
    """Five steps of 64 samples, each in exactly `step_s`."""
    config = TrainConfig(zero_stage=(0, 1, 2, 3)[number], micro_batch_size=8)
    result = measured(config, step_s=step_s, peak_bytes=peak_gib * GIB)
    assert result.measurement is not None
    times = ((step_s,) * 5,) * 2
    measurement = replace(result.measurement, step_times_s=times, engine_times_s=times, energy_j=joules)
    return TrialRecord(number=number, config=config, result=replace(result, measurement=measurement), goal=goal)


def trials(goal: Goal) -> list[TrialRecord]:
    """The third is the fastest, the second the most frugal; the first and the second need less memory each."""
    return [
        trial(0, 0.5, goal, joules=2000.0, peak_gib=5),
        trial(1, 0.4, goal, joules=1000.0, peak_gib=10),
        trial(2, 0.25, goal, joules=1600.0, peak_gib=20),
        trial(3, 0.8, goal, joules=2000.0, peak_gib=30),
    ]


def page_of(records: Sequence[TrialRecord], goal: Goal) -> str:
    manifest = replace(reported_manifest(), goal=goal)
    study = ReportedStudy(name="study", records=records, manifest=manifest, spent=Spent())
    return report_html(study, now=datetime(2026, 1, 1))


def cells(text: str) -> list[list[str]]:
    return [re.split(r" {2,}", line) for line in text.splitlines()]


def drawn(figure: Any, name: str) -> Any:
    (trace,) = [trace for trace in figure.data if trace.name == name]
    return trace


OWN = [
    (ENERGY, "tokens/J", ["81.92", "163.8", "102.4", "81.92"], 1),
    (LATENCY, "latency", ["500 ms", "400 ms", "250 ms", "800 ms"], 2),
    (COST, "cost/M tokens", ["0.06782", "0.05425", "0.03391", "0.1085"], 2),
]
own = pytest.mark.parametrize(("goal", "heading", "values", "best"), OWN, ids=["energy", "latency", "cost"])


@own
def test_the_table_has_the_own_value_beside_samples_a_second(
    goal: Goal, heading: str, values: list[str], best: int
) -> None:
    rows = cells(trials_table(trials(goal), n_ranks=N_RANKS))
    assert rows[0][4:7] == ["samples/s", "95 %", heading]
    assert [row[4] for row in rows[1:]] == ["128", "160", "256", "80"]
    assert [row[6] for row in rows[1:]] == values
    assert [row[0] for row in rows[1:]].index(f"{best} *") == best


@own
def test_the_summary_tells_both_of_the_best(goal: Goal, heading: str, values: list[str], best: int) -> None:
    text = summary_text(trials(goal), candidates=[], limit_bytes=None, stages=(0, 1, 2, 3))
    rows = cells(text)
    assert rows[0] == ["space", "trials", f"best {heading}", "samples/s", "best name"]
    rate = ["128", "160", "256", "80"][best]
    assert rows[5] == ["all", "4", values[best], rate, f"z{best}_gas1_mbs8"]
    after = {"tokens/J": " tokens/J", "latency": " a step", "cost/M tokens": " a million tokens"}[heading]
    assert f"best: z{best}_gas1_mbs8, {rate}/s +-0 %, {values[best]}{after}, " in text


@own
def test_the_live_view_has_it_too(goal: Goal, heading: str, values: list[str], best: int) -> None:
    snapshot = Snapshot(records=trials(goal), budget=Budget(trials=4), spent=Spent(trials=4))
    console = Console(file=io.StringIO(), width=120)
    with console.capture() as captured:
        console.print(StudyFrame(snapshot=snapshot, now=0.0, is_over=True))
    lines = captured.get().splitlines()
    header = re.split(r" {2,}", lines[0].strip())
    assert header[:6] == ["trial", "config", "outcome", "samples/s", heading, "memory"]
    assert all(value in line for value, line in zip(values, lines[1:5], strict=True))
    assert f"trial {best} z{best}_gas1_mbs8" in lines[5]


@own
def test_lines_of_progress_have_it_too(goal: Goal, heading: str, values: list[str], best: int) -> None:
    stream = io.StringIO()
    records = trials(goal)
    LineProgress(stream).ended(records[best], Snapshot(records=records, budget=Budget(trials=4), spent=Spent(trials=4)))
    assert f"/s +-0 %, {values[best]} " in stream.getvalue().replace("tokens/J", " ")
    assert " * " in stream.getvalue()


@own
def test_the_page_has_it_in_the_answer_and_in_both_tables(
    goal: Goal, heading: str, values: list[str], best: int
) -> None:
    page = page_of(trials(goal), goal)
    kind = {"tokens/J": "Most frugal", "latency": "Lowest-latency", "cost/M tokens": "Cheapest"}[heading]
    assert f'<p class="kind">{kind} config that fits</p>' in page
    assert re.search(rf"samples/s<span><b>{re.escape(values[best])}[^<]*</b></span>", page)
    assert page.count(f'<td class="number">{values[best]}</td>') == 1, "of its layout"
    assert f'<th scope="col" class="number">best {heading}</th>' in page
    assert f'<th scope="col" class="number"><button type="button">{heading}</button></th>' in page
    assert f"<dt>objective</dt><dd>{goal}</dd>" in page


def test_the_gain_is_told_by_the_goal() -> None:
    records = trials(ENERGY)
    answer = answer_of(records, records[0].config)
    assert answer is not None and answer.best == records[1]
    assert answer.over_default.factor == pytest.approx(2.0), "of tokens a joule; of samples/s it is 1.25"
    assert "with 128/s, 81.92 tokens/J (trial 0)" in answer.over_default.text


def test_figures_are_drawn_by_the_goal() -> None:
    energy, cost = trials(ENERGY), trials(COST)
    figure: Any = history_figure(energy, n_ranks=N_RANKS)
    assert figure.layout.yaxis.title.text == "tokens/J"
    joules_per_run = [2000.0, 1000.0, 1600.0, 2000.0]
    tokens = 5 * 64 * SEQ_LEN
    bests = [tokens / 2000, *[tokens / 1000] * 3]
    assert list(drawn(figure, "best so far").y) == pytest.approx(bests)
    marks = {trace.name: trace.y[0] for trace in figure.data if trace.mode == "markers" and trace.x[0] is not None}
    assert list(marks.values()) == pytest.approx([tokens / joules for joules in joules_per_run])
    figure = history_figure(cost, n_ranks=N_RANKS)
    assert figure.layout.yaxis.title.text == "samples/s", "which cost follows, the other way round"
    assert list(drawn(figure, "best so far").y) == pytest.approx([128, 160, 256, 256])
    figure = throughput_figure(energy, n_ranks=N_RANKS, limit_bytes=None)
    (marked,) = [trace for trace in figure.data if trace.mode == "markers+text"]
    assert marked.text[0].strip() == "<b>z1_gas1_mbs8</b> 160/s, 163.8 tokens/J"


def test_importances_ask_what_is_good_by_the_goal() -> None:
    """Micro-batch alone decides the energy, the ZeRO stage alone the speed."""
    records: list[TrialRecord] = []
    for stage in (0, 1, 2, 3):
        for size in (1, 2, 4, 8):
            config = TrainConfig(zero_stage=stage, micro_batch_size=size)
            one = trial(0, 0.1 * (stage + 1) * size, ENERGY, joules=10.0)
            assert one.result is not None and one.result.measurement is not None
            measurement = replace(one.result.measurement, global_batch=8 * size, energy_j=100.0)
            records.append(
                replace(one, number=len(records), config=config, result=replace(one.result, measurement=measurement))
            )
    by_energy: Any = importance_figure(records)
    by_rate: Any = importance_figure([replace(record, goal=Goal()) for record in records])
    assert by_energy.data[0].y[0] == "micro batch size"
    assert by_rate.data[0].y[0] == "zero stage"


# -- no power ----------------------------------------------------------------------------------------------------------


def test_complete_trials_without_power_are_said_to_be_no_best_and_why() -> None:
    silent = [trial(0, 0.5, ENERGY), trial(1, 0.25, ENERGY)]
    why = "2 trials completed, and for each the figures for tokens a joule are not known"
    assert f"no best: {why}" in summary_text(silent, candidates=[], limit_bytes=None, stages=(0, 1))
    rows = cells(trials_table(silent, n_ranks=N_RANKS))
    assert rows[1][6] == "-" and rows[1][-1] == "the figures for tokens a joule are not known"
    assert f"No trial can be the best: {why}." in page_of(silent, ENERGY)
    mixed = [*silent, trial(2, 0.5, ENERGY, joules=1000.0)]
    assert "no best" not in summary_text(mixed, candidates=[], limit_bytes=None, stages=(0, 1, 2))
    answer = answer_of(mixed, silent[0].config)
    assert answer is not None
    assert answer.over_default.factor is None and "has run: 1 trial completed" in answer.over_default.text
    assert answer.first_is_default is False


# -- the front ---------------------------------------------------------------------------------------------------------


def test_the_table_and_the_summary_show_the_front_and_how_to_export_each() -> None:
    records = trials(BOTH)
    rows = cells(trials_table(records, n_ranks=N_RANKS))
    assert [row[0] for row in rows[1:]] == ["0 +", "1 +", "2 *", "3"]
    text = summary_text(records, candidates=[], limit_bytes=None, stages=(0, 1, 2, 3))
    assert cells(text)[-4:] == [
        ["front of samples/s against peak memory, and its ranks for export:"],
        ["", "trial 2", "z2_gas1_mbs8", "256/s", "20.00 GiB", "--rank 1"],
        ["", "trial 1", "z1_gas1_mbs8", "160/s", "10.00 GiB", "--rank 2"],
        ["", "trial 0", "z0_gas1_mbs8", "128/s", "5.00 GiB", "--rank 3"],
    ]


def test_plain_data_name_the_front_by_trial() -> None:
    told = study_to_dict("study", trials(BOTH), [], budget=None, spent=Spent(), goal=BOTH)
    assert (told["objective"], told["unit"], told["pareto"]) == ("throughput,memory", "samples/s", [2, 1, 0])
    assert told["best"]["number"] == 2
    nothing = study_to_dict("study", [], [], budget=None, spent=Spent(), goal=BOTH)
    assert nothing["pareto"] == []


def test_a_figure_leads_along_the_front_and_only_where_there_is_one() -> None:
    figure: Any = pareto_figure(trials(BOTH), n_ranks=N_RANKS)
    front = drawn(figure, "front")
    assert (list(front.x), list(front.y)) == ([20, 10, 5], [256, 160, 128])
    shown = [(x, y) for trace in figure.data if trace.name != "front" for x, y in zip(trace.x, trace.y, strict=True)]
    assert sorted(shown) == [(5, 128), (10, 160), (20, 256), (30, 80)]
    assert next(iter(study_figures(trials(BOTH), n_ranks=N_RANKS))) == "pareto"
    assert "pareto" not in study_figures(trials(COST), n_ranks=N_RANKS)
    empty: Any = pareto_figure([], n_ranks=N_RANKS)
    assert empty.layout.annotations[0].text.startswith("No trial has completed")


def test_the_page_draws_the_front_and_marks_its_trials() -> None:
    page = page_of(trials(BOTH), BOTH)
    assert page.count('<span class="badge calm">front</span>') == 3
    assert 'data-figure="pareto"' in page
    assert 'data-figure="pareto"' not in page_of(trials(COST), COST)
