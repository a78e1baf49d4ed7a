"""`MeasuredTable`: a group of a table becomes configs with their ends, whatever is missing or odd in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from bo_tuner.errors import ConfigError
from bo_tuner.objectives.table import MeasuredTable, group_sizes
from tests.made_up_table import BEST, HEADER, KNOWN, MIXED, write_table

MEASURED = sorted((Path(__file__).parent.parent.parent / "benchmarks" / "measured").glob("*/runs.csv"))


@pytest.fixture
def mixed(tmp_path: Path) -> MeasuredTable:
    return MeasuredTable.read(write_table(tmp_path), "mixed")


def test_knobs_and_switches_become_configs(mixed: MeasuredTable) -> None:
    assert [run.config.name for run in mixed.runs] == [
        "z0_gas4_mbs1_fuse-0",
        "z0_gas2_mbs2_fuse-0",
        "z0_gas1_mbs4_fuse-0",
        BEST,
        "z1_tp2_gas1_mbs8_rc_fuse-1",
        "z0_pp2_gas4_mbs2_fuse-1",
    ]


def test_ends_times_memory_and_costs_are_read(mixed: MeasuredTable) -> None:
    assert [run.status for run in mixed.runs] == ["ok", "ok", "oom", "ok", "fail", "ok"]
    assert [run.step_time_s for run in mixed.runs] == [0.8, 0.5, None, 16 / 40, None, 0.45], "also from samples/s"
    assert mixed.runs[0].memory_bytes == 9 * 2**30
    assert [run.trial_cost_s for run in mixed.runs] == [40, 36, 70, None, None, None]
    assert mixed.best_samples_per_s == 40


def test_the_problem_is_told(mixed: MeasuredTable) -> None:
    assert (mixed.model, mixed.n_parameters, mixed.gpu) == ("nobody-knows", 300_000_000, "V100+T4")
    assert (mixed.n_ranks, mixed.n_nodes, mixed.seq_len, mixed.shape) == (4, 1, 512, None)
    assert mixed.notes == ("1 line left out: line 8: num_gpus must be a multiple of dp x tp x pp = 3; got 4",)


def test_the_shape_of_a_model_is_found_whatever_its_capitals(tmp_path: Path) -> None:
    shape = MeasuredTable.read(write_table(tmp_path), "known").shape
    assert shape is not None and shape.whole("layers") == 24


def test_of_a_config_that_stands_twice_the_faster_counts(tmp_path: Path) -> None:
    again = KNOWN[0].replace(",1.2,", ",1.1,")
    failed = KNOWN[1].replace(",ok,1.0,", ",fail,,")
    table = MeasuredTable.read(write_table(tmp_path, [*KNOWN, again, failed]))
    assert [run.step_time_s for run in table.runs] == [1.1, 1.0, 0.9, 0.85]
    assert table.notes == ("2 lines of a config that stands there before: the faster counts",)


def test_devices_that_differ_within_a_group_are_all_named(tmp_path: Path) -> None:
    other = KNOWN[3].replace("H100-80GB", "A100-80GB")
    assert MeasuredTable.read(write_table(tmp_path, [*KNOWN[:3], other])).gpu == "H100-80GB+A100-80GB"


@pytest.mark.parametrize("step", ["nan", "inf", "-1", "0", "fast"])
def test_a_time_that_is_none_leaves_its_line_out(tmp_path: Path, step: str) -> None:
    table = MeasuredTable.read(write_table(tmp_path, [KNOWN[0].replace(",1.2,", f",{step},"), *KNOWN[1:]]))
    assert len(table.runs) == 3


def test_the_digest_tells_figures_and_not_where_they_lie(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    here, there = write_table(tmp_path), write_table(tmp_path / "there")
    assert MeasuredTable.read(here, "mixed").digest == MeasuredTable.read(there, "mixed").digest
    changed = write_table(tmp_path / "there", [MIXED[0].replace(",0.8,", ",0.81,"), *MIXED[1:]])
    assert MeasuredTable.read(here, "mixed").digest != MeasuredTable.read(changed, "mixed").digest


def test_wrong_tables_and_groups_are_told_in_one_line(tmp_path: Path) -> None:
    table = write_table(tmp_path)
    lacking = tmp_path / "lacking.csv"
    lacking.write_text(HEADER.replace(",mbs", "") + "\n" + MIXED[0], encoding="utf-8")
    empty = tmp_path / "empty.csv"
    empty.write_text(HEADER + "\n", encoding="utf-8")
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\xff\xfe\x00")
    failed = tmp_path / "failed"
    failed.mkdir()
    for file, group, words in (
        (table, "mixt", "--group must be one of the 2 groups of {}: mixed, known; got 'mixt' (did you mean mixed?)"),
        (table, None, "--group must be one of the 2 groups of {}: mixed, known"),
        (tmp_path / "none.csv", None, "--replay must be a table in CSV; {} cannot be read: [Errno 2]"),
        (tmp_path, None, "--replay must be a table in CSV; {} cannot be read: [Errno 21]"),
        (binary, None, "--replay must be a table in CSV; {} cannot be read: line 1 is not in UTF-8"),
        (
            lacking,
            None,
            "--replay must be a table with the columns group, model, gpu, num_gpus, mbs, status; {} lacks mbs",
        ),
        (empty, None, "--replay must be a table with a line for every run; {} has none"),
        (write_table(failed, [MIXED[2]]), None, "--group must be one with a complete run; mixed of {} has none"),
    ):
        with pytest.raises(ConfigError) as caught:
            MeasuredTable.read(file, group)
        assert str(caught.value).startswith(words.format(file))
        assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.parent.name)
def test_every_published_group_with_a_complete_run_is_read(path: Path) -> None:
    read = 0
    for name in group_sizes(path):
        try:
            table = MeasuredTable.read(path, name)
        except ConfigError as error:
            assert "has none that can be used" in str(error)
            continue
        read += 1
        assert len(set(table.configs)) == len(table.configs) > 0
    assert read > 0
