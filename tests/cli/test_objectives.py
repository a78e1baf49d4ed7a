"""`--objective` on the command line: what every command says of such a study, and what is refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from tests.cli.test_bad_input import the_error

Run = Callable[..., CompletedProcess[str]]
SIMULATED = ["--simulate", "--cluster", "8xV100-16GB", "--seq-len", "64", "--budget", "5 trials"]


@pytest.fixture(scope="module")
def folder(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with the studies `cost` and `front`, and what tuning the second said."""
    folder = tmp_path_factory.mktemp("objectives")
    cost = ["--objective", "cost", "--price-per-gpu-hour", "2", "--study", "cost"]
    front = ["--objective", "throughput,memory", "--study", "front", "--no-confirm"]
    for options in (cost, front):
        ended = run("tune", "bert-tiny", *SIMULATED, *options, cwd=folder)
        assert ended.returncode == 0, ended.stderr
        (folder / "said").write_text(ended.stderr, encoding="utf-8")
    return folder


def told(run: Run, folder: Path, study: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(run("show", study, "--json", cwd=folder).stdout)
    return data


def test_show_watch_list_and_export_tell_the_cost_of_the_best(run: Run, folder: Path) -> None:
    best = told(run, folder, "cost")["best"]
    cost = f"{best['standing_value']:.4g} a million tokens"
    assert best["standing_value"] == pytest.approx(2 * 8 / (3600 * best["standing_samples_per_s"] * 64) * 1e6)
    listed = run("list", cwd=folder).stdout
    assert re.search(rf"^cost +5 trials +best [\d.]+/s, {cost} {best['name']} \(simulation\)$", listed, re.MULTILINE)
    for command in (["show", "cost"], ["watch", "cost", "--once"]):
        shown = run(*command, cwd=folder).stdout
        assert "cost/M tokens" in shown and "samples/s" in shown
        assert f"{best['value']:.4g} a million tokens" in shown
    assert f"{best['value']:.4g} a million tokens" in run("export", "cost", cwd=folder).stderr


def test_list_json_has_the_objective_and_the_value(run: Run, folder: Path) -> None:
    rows = {row["study"]: row for row in json.loads(run("list", "--json", cwd=folder).stdout)["studies"]}
    best = told(run, folder, "cost")["best"]
    assert (rows["cost"]["objective"], rows["cost"]["value"]) == ("cost", best["standing_value"])
    assert rows["front"]["value"] == rows["front"]["samples_per_s"]


def test_show_json_has_the_front_and_each_of_it_is_exported_by_the_rank_that_show_tells(run: Run, folder: Path) -> None:
    data = told(run, folder, "front")
    trials = {trial["number"]: trial for trial in data["trials"]}
    assert data["pareto"] and data["pareto"][0] == data["best"]["number"]
    shown = run("show", "front", cwd=folder).stdout.partition("front of samples/s against peak memory")[2]
    rows = re.findall(r"^ +trial (\d+) +(\S+) .*--rank (\d+)$", shown, re.MULTILINE)
    assert [int(number) for number, *_ in rows] == data["pareto"]
    number, name, rank = rows[-1]
    assert trials[int(number)]["name"] == name
    exported = run("export", "front", "--rank", rank, cwd=folder)
    assert exported.stderr.splitlines()[1].startswith(f"{name}: ")


def test_a_report_has_the_front(run: Run, folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert run("report", "front", "--out", str(page), cwd=folder).returncode == 0
    assert 'data-figure="pareto"' in page.read_text(encoding="utf-8")


def test_the_first_lines_of_tune_name_the_objective(folder: Path) -> None:
    said = (folder / "said").read_text(encoding="utf-8").splitlines()
    assert "objective throughput,memory (samples/s against peak memory)" in said[:8]


def test_another_objective_does_not_go_on(run: Run, folder: Path) -> None:
    error = the_error(run("tune", "bert-tiny", *SIMULATED, "--study", "cost", cwd=folder), code=2)
    assert "study 'cost' exists for something else (objective is cost, not throughput): repeat its options" in error


WRONG = {
    "unknown": (["--objective", "speed"], "--objective must be one of throughput; latency; energy; cost; throughput,memory"),
    "no batch": (["--objective", "latency"], "add --global-batch N"),
    "no price": (["--objective", "cost"], "add --price-per-gpu-hour P"),
    "a price of nothing": (["--objective", "cost", "--price-per-gpu-hour", "0"], "must be a number over 0; got 0"),
    "a price for nothing": (["--price-per-gpu-hour", "2"], "goes with --objective cost"),
    "no power on CPUs": (["--objective", "energy", "--device", "cpu"], "CPU ranks tell none"),
    "no power in a simulation": (["--objective", "energy", "--simulate", "--cluster", "8xH100"], "a simulation draws none"),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "words"), WRONG.values(), ids=WRONG.keys())
def test_wrong_use_gives_one_line_exit_code_2_and_leaves_nothing(
    run: Run, tmp_path: Path, arguments: list[str], words: str
) -> None:
    ended = run("tune", "bert-tiny", *arguments, cwd=tmp_path)
    assert words in the_error(ended, code=2)
    assert ended.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_gpus_that_do_not_tell_their_power_are_named_before_anything_is_written(
    program: str, driver_folder: Path, tmp_path: Path
) -> None:
    script = tmp_path / "script"
    script.write_text("missing nvmlDeviceGetPowerUsage\nmissing nvmlDeviceGetTotalEnergyConsumption\n", "utf-8")
    (tmp_path / "here").mkdir()
    ended = subprocess.run(
        [program, "tune", "bert-tiny", "--device", "cuda", "--objective", "energy"],
        cwd=tmp_path / "here",
        env={**os.environ, "LD_LIBRARY_PATH": str(driver_folder), "NVML_SCRIPT": str(script)},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    error = the_error(ended, code=2)
    assert "--objective energy needs power that is measured, and the driver does not tell that of GPU 0, 1:" in error
    assert list((tmp_path / "here").iterdir()) == []
