"""Tables and progress lines, from trials made by hand."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import pytest

from bo_tuner.budget import Budget, Spent
from bo_tuner.config import TrainConfig
from bo_tuner.engine import Snapshot
from bo_tuner.objectives import TrialEvent
from bo_tuner.outcome import Measurement, Outcome, TrialResult
from bo_tuner.report import LineProgress, SilentProgress, study_to_dict, summary_text, trials_table
from bo_tuner.trial import TrialRecord

GIB = 2**30
CANDIDATES = [TrainConfig(zero_stage=stage, micro_batch_size=size) for stage in (0, 1, 2, 3) for size in range(1, 11)]
"""Forty."""


def config(stage: Literal[0, 1, 2, 3], micro_batch: int, accum: int = 1) -> TrainConfig:
    return TrainConfig(zero_stage=stage, micro_batch_size=micro_batch, grad_accum_steps=accum)


def complete(number: int, of: TrainConfig, *, step_s: float, peak_bytes: int = GIB) -> TrialRecord:
    """A trial on two ranks whose slower one takes `step_s`."""
    measurement = Measurement(
        global_batch=of.global_batch(2),
        seq_len=16,
        step_times_s=((step_s, step_s), (step_s / 2, step_s / 2)),
        engine_times_s=((0.8 * step_s, 0.8 * step_s), (step_s / 2, step_s / 2)),
        peak_memory_bytes=(peak_bytes, peak_bytes),
    )
    result = TrialResult(
        outcome=Outcome.COMPLETE,
        measurement=measurement,
        peak_memory_bytes=peak_bytes,
        limit_bytes=4 * GIB,
        wall_s=2.5,
    )
    return TrialRecord(number=number, config=of, result=result)


def ended(number: int, of: TrainConfig, outcome: Outcome, reason: str) -> TrialRecord:
    result = TrialResult(outcome=outcome, reason=reason, peak_memory_bytes=5 * GIB, limit_bytes=4 * GIB, wall_s=1.25)
    return TrialRecord(number=number, config=of, result=result)


@pytest.fixture
def records() -> list[TrialRecord]:
    """Two stages that completed, one that ran out of memory, and one trial that runs."""
    return [
        complete(0, config(0, 1), step_s=0.2),  # 2 samples a step: 10/s
        complete(1, config(1, 4), step_s=0.25, peak_bytes=2 * GIB),  # 32/s, the best
        complete(2, config(1, 2), step_s=0.4),  # 10/s
        ended(3, config(3, 8), Outcome.GUARDED, "rank 0 used 5.00 GiB, over the limit of 4.00 GiB"),
        ended(4, config(3, 4), Outcome.OOM, "the allocator refused a request of 1.00 GiB"),
        TrialRecord(number=5, config=config(3, 2)),
    ]


def table_rows(text: str) -> list[list[str]]:
    """Cells, which two or more spaces part."""
    return [re.split(r" {2,}", line) for line in text.splitlines()]


def test_the_table_has_a_row_per_trial_with_batch_outcome_rate_step_and_memory(records: list[TrialRecord]) -> None:
    rows = table_rows(trials_table(records, n_ranks=2))
    columns = ["samples/s", "95 %", "as DeepSpeed counts", "step", "peak memory", "wall"]
    assert rows[0] == ["trial", "config", "batch", "outcome", *columns]
    first = ["10", "+-0 %", "12.5 (+25 %)", "200 ms", "1.00 GiB", "2.5 s"]
    assert rows[1] == ["0", "z0_gas1_mbs1", "2", "complete", *first]
    assert rows[2] == [
        "1 *",
        "z1_gas1_mbs4",
        "8",
        "complete",
        "32",
        "+-0 %",
        "40 (+25 %)",
        "250 ms",
        "2.00 GiB",
        "2.5 s",
    ]
    assert len(rows) == 1 + len(records)


def test_the_table_marks_the_best_alone(records: list[TrialRecord]) -> None:
    lines = trials_table(records, n_ranks=2).splitlines()
    assert [line.split()[0] for line in lines if " * " in line] == ["1"]


def test_the_table_gives_a_trial_that_did_not_complete_no_rate_and_its_reason(records: list[TrialRecord]) -> None:
    rows = table_rows(trials_table(records, n_ranks=2))
    reason = "rank 0 used 5.00 GiB, over the limit of 4.00 GiB"
    assert rows[4] == ["3", "z3_gas1_mbs8", "16", "guarded", "-", "-", "-", "-", "5.00 GiB", "1.2 s", reason]
    assert rows[6] == ["5", "z3_gas1_mbs2", "4", "-", "-", "-", "-", "-", "-", "-", "no result yet"]


def test_the_table_of_no_trials_is_its_header() -> None:
    assert len(trials_table([], n_ranks=2).splitlines()) == 1


def summarized(records: Sequence[TrialRecord]) -> str:
    return summary_text(records, candidates=CANDIDATES, limit_bytes=4 * GIB, stages=(0, 1, 3))


def test_the_summary_has_trials_best_value_and_best_name_per_stage_and_over_all(records: list[TrialRecord]) -> None:
    rows = table_rows(summarized(records))
    assert rows[:5] == [
        ["space", "trials", "best samples/s", "best name"],
        ["z0", "1", "10", "z0_gas1_mbs1"],
        ["z1", "2", "32", "z1_gas1_mbs4"],
        ["z3", "3", "-", "-"],
        ["all", "6", "32", "z1_gas1_mbs4"],
    ]


def test_the_summary_counts_how_trials_ended(records: list[TrialRecord]) -> None:
    assert "5 of 40 candidates ran: 3 complete, 1 guarded, 1 oom" in summarized(records)


def test_the_summary_names_what_does_not_fit_and_the_tightest_proof(records: list[TrialRecord]) -> None:
    lines = [line for line in summarized(records).splitlines() if "do not fit" in line]
    assert lines == ["z3: micro-batch 4 and larger do not fit, which rules out 7 candidates (trial 4)"]


def test_a_guarded_trial_proves_nothing_under_a_higher_limit(records: list[TrialRecord]) -> None:
    text = summary_text(records[:4], candidates=CANDIDATES, limit_bytes=8 * GIB, stages=(0, 1, 3))
    assert "do not fit" not in text
    assert "do not fit, which rules out 3 candidates (trial 3)" in summarized(records[:4])


def test_where_there_are_pipelines_the_summary_has_a_row_per_depth(records: list[TrialRecord]) -> None:
    deep = complete(6, replace(config(0, 2), pipeline_depth=2), step_s=0.1)  # one replica: 20/s
    text = summary_text([*records, deep], candidates=CANDIDATES, limit_bytes=None, stages=(0, 1, 3), depths=(1, 2))
    rows = {row[0]: row[1:] for row in table_rows(text)}
    assert rows["pp1"] == ["6", "32", "z1_gas1_mbs4"]
    assert rows["pp2"] == ["1", "20", "z0_pp2_gas1_mbs2"]
    assert "pp1" not in summarized(records)


def test_the_summary_ends_with_the_best(records: list[TrialRecord]) -> None:
    assert summarized(records).splitlines()[-2:] == [
        "best: z1_gas1_mbs4, 32/s +-0 %, 2.00 GiB a rank, not confirmed by a longer run",
        "peak 2.00 GiB of 4.00 GiB a rank, 2.00 GiB (50 %) left",
    ]


def test_where_no_memory_is_known_the_best_has_only_its_rate() -> None:
    alone = complete(0, config(0, 2), step_s=0.5, peak_bytes=0)
    assert summarized([alone]).splitlines()[-2:] == [
        "best: z0_gas1_mbs2, 8/s +-0 %, not confirmed by a longer run",
        "peak memory or its limit is not known",
    ]


def test_the_summary_without_a_complete_trial_names_no_best(records: list[TrialRecord]) -> None:
    text = summarized(records[3:5])
    assert "best:" not in text
    assert ["all", "2", "-", "-"] in table_rows(text)


def test_of_equally_fast_trials_the_one_with_less_memory_is_best() -> None:
    pair = [
        complete(0, config(0, 2), step_s=0.5, peak_bytes=3 * GIB),
        complete(1, config(1, 2), step_s=0.5, peak_bytes=2 * GIB),
    ]
    assert "best: z1_gas1_mbs2" in summarized(pair)


def test_plain_data_has_null_where_nothing_completed_and_survives_json(records: list[TrialRecord]) -> None:
    spent = Spent(trials=2, seconds=3.0, device_seconds=7200.0)
    data = json.loads(json.dumps(study_to_dict("mine", records[3:], CANDIDATES, budget=None, spent=spent)))
    assert data["best"] is None
    assert data["spent"] == {"trials": 2, "seconds": 3.0, "gpu_h": 2.0}
    assert [trial["samples_per_s"] for trial in data["trials"]] == [None, None, None]
    assert [trial["outcome"] for trial in data["trials"]] == ["guarded", "oom", None]
    assert data["excluded"] == [{"layout": "z3", "micro_batch_size": 4, "n_candidates": 7, "trial": 4}]


def test_plain_data_tells_how_well_the_best_is_known_and_what_memory_it_leaves(records: list[TrialRecord]) -> None:
    assert records[1].result is not None
    slower = replace(complete(1, config(1, 4), step_s=0.5), number=1).result
    assert slower is not None
    records[1] = replace(records[1], confirmations=(slower,))
    data = json.loads(json.dumps(study_to_dict("mine", records, CANDIDATES, budget=None, spent=Spent())))
    assert data["memory_margin_bytes"] == 2 * GIB
    best = data["best"]
    assert best["samples_per_s_interval"] == [16.0, 16.0]
    assert (best["value"], best["samples_per_s"], best["trial_samples_per_s"]) == (16.0, 16.0, 32.0)
    assert best["engine_samples_per_s"] == pytest.approx(20)
    assert (best["confirmed"], best["confirmation"]["samples_per_s"]) == (False, 16.0)


# -- progress ----------------------------------------------------------------------------------------------------------


def snapshot(records: Sequence[TrialRecord], *, event: TrialEvent | None = None) -> Snapshot:
    return Snapshot(
        records=records,
        budget=Budget.parse("20 trials, 1h"),
        spent=Spent(trials=5, seconds=600.0),
        running=records[-1] if event else None,
        event=event,
        memory_limit_bytes=4 * GIB,
    )


STEP = TrialEvent(phase="measure", step=3, n_steps=7, memory_bytes=GIB)


def test_a_stream_that_is_no_terminal_gets_one_line_per_trial_and_nothing_between(records: list[TrialRecord]) -> None:
    stream = io.StringIO()
    progress = LineProgress(stream)
    progress.shows(snapshot(records, event=STEP))
    assert stream.getvalue() == ""
    progress.ended(records[1], snapshot(records))
    progress.ended(records[3], snapshot(records))
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert re.fullmatch(r"trial +1  z1_gas1_mbs4 +32/s \+-0 %, 2\.00 GiB \*   \[15 trials, 50m00s left\]", lines[0])
    assert re.fullmatch(r"trial +3  z3_gas1_mbs8 +guarded: rank 0 used 5\.00 GiB.*left\]", lines[1])


def test_where_steps_take_long_plain_lines_tell_the_running_micro_batch_now_and_then(
    records: list[TrialRecord],
) -> None:
    stream, now = io.StringIO(), [100.0]
    progress = LineProgress(stream, clock=lambda: now[0])
    long = replace(STEP, step=1, micro_batch=3, n_micro_batches=64)
    for now[0] in (101.0, 114.0, 116.0, 120.0, 130.0, 132.0):
        progress.shows(snapshot(records, event=long))
        progress.shows(snapshot(records, event=STEP))
    said = f"      {records[-1].number:>3}  {records[-1].config.name:<18} step 2, micro-batch 3 of 64"
    assert stream.getvalue().splitlines() == [said, said]


def test_silent_progress_prints_nothing(records: list[TrialRecord], capfd: pytest.CaptureFixture[str]) -> None:
    progress = SilentProgress()
    progress.shows(snapshot(records, event=STEP))
    progress.ended(records[1], snapshot(records))
    assert capfd.readouterr() == ("", "")
