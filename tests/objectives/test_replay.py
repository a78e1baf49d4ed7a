"""`ReplayObjective`: exactly what the table says, at what it cost."""

from __future__ import annotations

from pathlib import Path

import pytest

from bo_tuner.config import TrainConfig
from bo_tuner.objectives import ignore_events
from bo_tuner.objectives.replay import ReplayObjective
from bo_tuner.objectives.table import MeasuredTable
from bo_tuner.outcome import Outcome, TrialLimits, TrialResult
from tests.made_up_table import BEST, write_table


@pytest.fixture
def table(tmp_path: Path) -> MeasuredTable:
    return MeasuredTable.read(write_table(tmp_path), "mixed")


def looked_up(table: MeasuredTable, name: str, **limits: float) -> TrialResult:
    config = next(config for config in table.configs if config.name == name)
    given = TrialLimits(memory_bytes=2**20, **limits)  # type: ignore[arg-type]  # those that are numbers
    return ReplayObjective(table, start_up_s=10.0)(config, limits=given, on_event=ignore_events)


def test_the_rate_is_the_tables_and_known_exactly(table: MeasuredTable) -> None:
    result = looked_up(table, BEST)
    assert result.samples_per_s == 40
    assert result.measurement is not None
    assert result.measurement.step_time_interval_s == (result.measurement.step_time_s,) * 2
    assert result.peak_memory_bytes == 12 * 2**30


def test_what_completed_in_the_table_completes_under_any_limit(table: MeasuredTable) -> None:
    result = looked_up(table, BEST, deadline_s=0.1, incumbent_samples_per_s=1e9)
    assert result.outcome is Outcome.COMPLETE


def test_out_of_memory_and_failures_count_as_out_of_memory_and_say_what_they_were(table: MeasuredTable) -> None:
    for name, reason in (
        ("z0_gas1_mbs4_fuse-0", "the table says oom"),
        ("z1_tp2_gas1_mbs8_rc_fuse-1", "the table says fail, which counts as out of memory"),
    ):
        result = looked_up(table, name)
        assert (result.outcome, result.reason, result.peak_memory_bytes) == (Outcome.OOM, reason, None)


def test_trials_cost_what_the_source_spent_else_a_start_and_steps_and_failures_half_as_much_again(
    table: MeasuredTable,
) -> None:
    assert looked_up(table, "z0_gas2_mbs2_fuse-0").wall_s == 36
    assert looked_up(table, "z0_gas1_mbs4_fuse-0").wall_s == 70
    known = looked_up(table, BEST)
    assert known.wall_s == pytest.approx(10 + 6 * 0.4), "one to warm up, and those that fill 2 s"
    assert known.phases_s == pytest.approx({"start": 10, "warmup": 0.4, "measure": 2.0, "teardown": 0})
    good = sorted([40, 36, 10 + 4 * 0.4, 10 + 4 * 0.45])
    assert looked_up(table, "z1_tp2_gas1_mbs8_rc_fuse-1").wall_s == pytest.approx(1.5 * (good[1] + good[2]) / 2)


def test_a_config_that_is_not_in_the_table_is_rejected(table: MeasuredTable) -> None:
    objective = ReplayObjective(table)
    result = objective(TrainConfig(), limits=TrialLimits(memory_bytes=1), on_event=ignore_events)
    assert (result.outcome, result.reason) == (Outcome.REJECTED, "the table has no such config")
