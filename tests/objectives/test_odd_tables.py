"""Tables as people have them: other separators, cells that are blank or say something else, figures that follow from others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bo_tuner.errors import ConfigError
from bo_tuner.objectives.prior import cluster_of, problem_of
from bo_tuner.objectives.table import MeasuredTable
from tests.made_up_table import SHAPES

USUAL: dict[str, Any] = {
    "group": "ours",
    "model": "small",
    "params_b": 0.35,
    "gpu": "H100-80GB",
    "num_gpus": 16,
    "nodes": 2,
    "seq_len": 2048,
    "gbs": 64,
    "dp": 4,
    "tp": 2,
    "pp": 2,
    "mbs": 2,
    "gas": 8,
    "zero": 1,
    "recompute": "none",
    "extra": "",
    "status": "ok",
    "step_time_s": 2,
    "tokens_per_s": "",
    "samples_per_s": "",
    "mem_gb": 30,
    "trial_cost_s": 50,
}


def table_of(folder: Path, *lines: dict[str, Any], separator: str = ",", shapes: str = SHAPES) -> MeasuredTable:
    """A table of the usual line with these changes, one line each."""
    rows = [{**USUAL, **line} for line in lines]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = [separator.join(columns), *(separator.join(str(row.get(name, "")) for name in columns) for row in rows)]
    (folder / "models.csv").write_text(shapes, encoding="utf-8")
    (folder / "runs.csv").write_text("\n".join(text) + "\n", encoding="utf-8")
    return MeasuredTable.read(folder / "runs.csv")


def names(table: MeasuredTable) -> list[str]:
    return [run.config.name for run in table.runs]


# -- the file ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("separator", [";", "\t", "|", ", "])
def test_the_separator_is_that_of_the_header(tmp_path: Path, separator: str) -> None:
    assert names(table_of(tmp_path, {}, separator=separator)) == ["z1_tp2_pp2_gas8_mbs2"]


def test_marks_capitals_line_ends_and_empty_lines_of_spreadsheets_change_nothing(tmp_path: Path) -> None:
    plain = table_of(tmp_path, {}, {"mbs": 4, "gas": 4})
    header, *lines = plain.path.read_text(encoding="utf-8").splitlines()
    rough = "\r\n".join([header.upper(), lines[0], "," * header.count(","), "", lines[1] + ",,"])
    plain.path.write_text(rough, encoding="utf-8-sig")
    again = MeasuredTable.read(plain.path)
    assert (again.digest, again.notes) == (plain.digest, plain.notes)


def test_what_is_no_table_is_told_with_its_line(tmp_path: Path) -> None:
    file = table_of(tmp_path, {}, {}).path
    good = file.read_bytes()
    for content, words in (
        (good.replace(b"seq_len", b"gas", 1), "must name each column once; line 1 has gas twice"),
        (good.replace(b"\nours", b"\n\xe9", 1), "cannot be read: line 2 is not in UTF-8"),
        (good.replace(b"\nours", b'\n"ours', 1), "cannot be read: after line 1: unexpected end of data"),
    ):
        file.write_bytes(content)
        with pytest.raises(ConfigError) as caught:
            MeasuredTable.read(file)
        assert str(caught.value) == f"--replay must be a table in CSV; {file} {words}"


def test_a_table_without_a_usable_line_says_what_is_wrong_and_where(tmp_path: Path) -> None:
    for change, words in (
        ({"step_time_s": "3.5 s"}, "line 2: step_time_s must be a number above 0; got 3.5 s"),
        ({"step_time_s": "1e-320"}, "line 2: step_time_s must be that of a step of some seconds; got 1e-320"),
        ({"step_time_s": ""}, "line 2: step_time_s must be a number above 0; got nothing"),
        (
            {"step_time_s": "", "tokens_per_s": 9, "seq_len": ""},
            "line 2: seq_len must be a whole number of at least 1;",
        ),
        ({"mbs": 1.5}, "line 2: mbs must be a whole number of at least 1; got 1.5"),
        ({"mbs": ""}, "line 2: gbs must be a multiple of gas x dp = 28; got 64"),
        ({"num_gpus": "many"}, "line 2: num_gpus must be a whole number of at least 1; got many"),
        ({"zero": 4}, "line 2: zero must be 0, 1, 2 or 3; got 4"),
        ({"status": "success"}, "line 2: status must be ok, oom or fail; got success"),
        ({"extra": "a,b"}, "line 2: it has 1 cell more than the header"),
    ):
        with pytest.raises(ConfigError) as caught:
            table_of(tmp_path, {"gas": 7} | change if change == {"mbs": ""} else change)
        assert f"{tmp_path}/runs.csv has none that can be used; " in str(caught.value)
        assert words in str(caught.value)


# -- a line ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "blank",
    [
        {"gas": ""},
        {"mbs": "", "gas": 8},
        {"dp": ""},
        {"num_gpus": ""},
        {"gas": "", "gbs": "", "samples_per_s": 32},
        {"step_time_s": "", "samples_per_s": 32},
        {"step_time_s": "nan", "tokens_per_s": 32 * 2048},
        {"seq_len": "", "samples_per_s": 32, "tokens_per_s": 32 * 2048},
        {"status": ""},
        {"mbs": "2.0", "zero": "zero-1", "recompute": "False"},
    ],
)
def test_what_is_blank_follows_from_the_rest(tmp_path: Path, blank: dict[str, Any]) -> None:
    table = table_of(tmp_path, blank)
    assert table.digest == table_of(tmp_path, {}).digest
    assert (table.best_samples_per_s, table.notes) == (32, ())


def test_words_in_the_columns_of_knobs_stay_apart_from_what_is_plain(tmp_path: Path) -> None:
    table = table_of(tmp_path, {}, {"zero": "3-offload"}, {"zero": 3, "recompute": "selective"}, {"recompute": "TRUE"})
    assert names(table) == [
        "z1_tp2_pp2_gas8_mbs2_recompute_kind-plain_zero_kind-plain",
        "z3_tp2_pp2_gas8_mbs2_recompute_kind-plain_zero_kind-3-offload",
        "z3_tp2_pp2_gas8_mbs2_recompute_kind-selective_zero_kind-plain",
        "z1_tp2_pp2_gas8_mbs2_rc_recompute_kind-plain_zero_kind-plain",
    ]


def test_ranks_that_share_a_sample_count_as_tensor_parallel_and_stay_apart_from_those(tmp_path: Path) -> None:
    table = table_of(tmp_path, {"tp": 4, "dp": 2, "gas": 16}, {"dp": 2, "gas": 16}, {"dp": 2, "gbs": 64})
    assert names(table) == [
        "z1_tp4_pp2_gas16_mbs2_ranks_beside_tp-1",
        "z1_tp4_pp2_gas16_mbs2_ranks_beside_tp-2",
        "z1_tp2_pp2_gas8_mbs2_ranks_beside_tp-1",
    ], "the third has samples for all of its ranks"
    assert table.best_samples_per_s == 32
    (note,) = table.notes
    assert note == (
        "1 line whose ranks beside dp x tp x pp count as tensor-parallel: line 3: num_gpus must be dp x tp x pp = 8; got 16"
    )


def test_figures_that_no_run_needs_are_left_out_where_they_cannot_be_and_told(tmp_path: Path) -> None:
    odd = {"mem_gb": 40_000, "trial_cost_s": -5, "nodes": "two", "params_b": "7B", "gbs": 65}
    table = table_of(tmp_path, odd, odd | {"mbs": 4, "gas": 4})
    assert [(run.memory_bytes, run.trial_cost_s) for run in table.runs] == [(None, None)] * 2
    assert (table.n_parameters, table.n_nodes) == (0, None)
    assert [note.partition(" does")[0] for note in table.notes] == [
        f"2 lines whose {column}" for column in ("gbs", "mem_gb", "trial_cost_s", "nodes", "params_b")
    ]
    assert table.notes[1].endswith("first line 2: mem_gb must be GiB of one device, at most 1024; got 40000")


def test_a_status_that_is_unknown_counts_as_failed_and_is_told(tmp_path: Path) -> None:
    table = table_of(tmp_path, {}, {"mbs": 4, "gas": 4, "status": "Timeout"})
    assert [run.status for run in table.runs] == ["ok", "timeout"]
    assert table.notes == ("1 line taken for failed: line 3: status must be ok, oom or fail; got Timeout",)


# -- a group -----------------------------------------------------------------------------------------------------------


def test_lines_of_other_devices_are_left_out_and_other_lengths_told(tmp_path: Path) -> None:
    table = table_of(tmp_path, {"num_gpus": 8, "dp": 2, "gas": 16}, {}, {"mbs": 4, "gas": 4, "seq_len": 1024})
    assert (table.n_ranks, len(table.runs), table.seq_len) == (16, 2, 2048)
    assert table.notes == (
        "1 line left out: line 2: num_gpus must be 16, as in most lines; got 8",
        "1 line whose seq_len does not count: line 4: seq_len must be 2048, as before; got 1024",
    )


def test_switches_that_change_together_are_one_and_numbers_are_in_order(tmp_path: Path) -> None:
    table = table_of(
        tmp_path,
        *(
            {"extra": f"vpp={n};interleaved={n > 1};buckets={size};offload=cpu;fused"}
            for n in (1, 2)
            for size in (1e6, 5e6)
        ),
        {"extra": "vpp=2;interleaved=True;buckets=25000000;offload=cpu"},
    )
    assert [dict(run.config.extra) for run in table.runs[2:]] == [
        {"buckets": 1_000_000, "fused": "set", "interleaved": "True"},
        {"buckets": 5_000_000, "fused": "set", "interleaved": "True"},
        {"buckets": 25_000_000, "fused": "", "interleaved": "True"},
    ]


def test_a_switch_may_have_the_name_of_a_knob(tmp_path: Path) -> None:
    table = table_of(tmp_path, {"extra": "offload=none"}, {"extra": "offload=cpu"})
    assert [dict(run.config.extra) for run in table.runs] == [{"table_offload": "none"}, {"table_offload": "cpu"}]


def test_the_number_of_a_run_is_no_switch(tmp_path: Path) -> None:
    lines = [{"mbs": 2**m, "gas": 16 // 2**m, "zero": z, "extra": f"job={m}{z}"} for m in range(5) for z in (0, 1)]
    assert not any(run.config.extra for run in table_of(tmp_path, *lines).runs)
    assert all(run.config.extra for run in table_of(tmp_path, *lines[:4]).runs), "of a few lines it may be one"


def test_a_column_that_nobody_reads_is_told_where_lines_differ_in_nothing_else(tmp_path: Path) -> None:
    table = table_of(tmp_path, {"cp": 1, "host": "a"}, {"cp": 2, "host": "a"})
    (note,) = table.notes
    assert note == (
        "1 line of a config that stands there before: the faster counts (not read: cp; switches belong into extra)"
    )
    assert table_of(tmp_path, {"cp": 1}, {"cp": 2, "mbs": 4, "gas": 4}).notes == ()


# -- what to expect ----------------------------------------------------------------------------------------------------


def test_what_is_missing_for_an_expectation_is_told(tmp_path: Path) -> None:
    for change, shapes, words in (
        ({}, SHAPES, ""),
        ({"seq_len": ""}, SHAPES, "no expectation: seq_len is not told"),
        ({"model": "x", "params_b": ""}, SHAPES, "no expectation: no models.csv beside the table has the shape of x, and params_b is not told"),
        ({}, SHAPES.replace(",24,", ",two,"), "no expectation: models.csv, line 2: layers must be a whole number of at least 1; got two"),
        ({}, SHAPES.replace(",16,", ",0,"), "no expectation: models.csv, line 2: heads must be a whole number of at least 1; got 0"),
    ):  # fmt: skip
        problem, note = problem_of(table_of(tmp_path, change, shapes=shapes))
        assert (problem is None, note) == (words != "", words)


def test_where_the_table_tells_no_nodes_those_of_its_devices_are_taken(tmp_path: Path) -> None:
    for gpu, n_nodes in (("H100", 2), ("T4", 4), ("Abacus", 2)):
        cluster, note = cluster_of(table_of(tmp_path, {"gpu": gpu, "nodes": ""}))
        assert cluster.n_nodes == n_nodes
        assert note.endswith(f"nodes are not told: {n_nodes} taken")


def test_a_model_of_four_bytes_an_element_is_expected_in_fp32(tmp_path: Path) -> None:
    cluster, _ = cluster_of(table_of(tmp_path, {}, shapes=SHAPES.replace(",2,4", ",4,4")))
    assert cluster.usual_precision == "fp32"


def test_a_model_without_a_shape_is_expected_as_a_decoder_with_as_many_parameters(tmp_path: Path) -> None:
    for billions, layers in ((6.7, 32), (175, 96), (1e-5, 1)):  # of GPT-3 the first two
        problem, note = problem_of(table_of(tmp_path, {"model": "x", "params_b": billions}))
        assert problem is not None
        assert (problem.max_depth, problem.profile.hidden) == (layers + 2, 128 * layers)
        assert note.endswith(f"the shape of x: by its parameters {layers} layers of {128 * layers} are expected")


def test_a_device_that_nobody_knows_is_expected_to_be_like_another_and_called_by_its_name(tmp_path: Path) -> None:
    for gpu, name in (("", "unnamed"), ("Abacus", "Abacus"), ("V100+Abacus", "V100+Abacus")):
        table = table_of(tmp_path, {"gpu": gpu})
        problem, note = problem_of(table)
        assert problem is not None
        assert (problem.hardware.name, cluster_of(table)[0].device_name) == ("A100-80GB", name)
        assert note == f"no figures are known of {name!r}: those of A100-80GB are taken, memory included"
    assert cluster_of(table_of(tmp_path, {"gpu": "A100"}))[0].device_name == "A100-80GB"
