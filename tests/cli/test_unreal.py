"""Simulations and replays on the command line: every place that shows their figures says first that they are not real."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from tests.cli.test_bad_input import the_error
from tests.cli.test_commands import PER_TRIAL, TOP_LEVEL
from tests.made_up_table import BEST, HEADER, MIXED, write_table

Run = Callable[..., CompletedProcess[str]]

REPLAYED = "REPLAYED: nothing was run here; all figures are those of group {} of {}"
SIMULATED = "SIMULATED: nothing was run, nothing was measured; all figures come from a cost model with made-up noise"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with the made-up table."""
    folder = tmp_path_factory.mktemp("unreal")
    write_table(folder)
    return folder


@pytest.fixture(scope="module")
def replayed(run: Run, folder: Path) -> CompletedProcess[str]:
    """Both groups of the table, the last as JSON."""
    assert run("tune", "--replay", "runs.csv", "--group", "known", cwd=folder).returncode == 0
    return run("tune", "--replay", "runs.csv", "--group", "mixed", "--json", cwd=folder)


@pytest.fixture(scope="module")
def simulated(run: Run, folder: Path) -> CompletedProcess[str]:
    cluster = ["--simulate", "--cluster", "8x8xV100-16GB", "--seq-len", "64"]
    budget = ["--budget", "4 trials", "--study", "sim", "--seed", "2", "--out", "job"]
    return run("tune", "bert-tiny", *cluster, *budget, cwd=folder)


def test_a_replay_prints_the_json_of_any_study_and_its_origin(replayed: CompletedProcess[str]) -> None:
    assert replayed.returncode == 0, replayed.stderr
    told: dict[str, Any] = json.loads(replayed.stdout)
    assert set(told) == TOP_LEVEL
    assert told["origin"] == "replay"
    assert (told["best"]["name"], told["best"]["samples_per_s"]) == (BEST, 40)
    assert told["best"]["params"]["extra"] == {"fuse": "1"}
    assert all(set(trial) == PER_TRIAL for trial in told["trials"])


def test_a_replay_says_first_that_it_is_one_and_reproaches_nothing(
    run: Run, replayed: CompletedProcess[str], folder: Path
) -> None:
    warning = REPLAYED.format("mixed", folder / "runs.csv")
    assert replayed.stderr.splitlines()[0] == warning
    shown = run("show", "mixed_replayed", cwd=folder).stdout
    assert shown.splitlines()[0] == warning
    assert "as the table has it" in shown
    assert "not confirmed" not in shown


def test_a_simulation_says_first_that_it_is_one_and_hands_over_a_job_that_says_so(
    run: Run, simulated: CompletedProcess[str], folder: Path
) -> None:
    assert simulated.returncode == 0, simulated.stderr
    assert simulated.stderr.splitlines()[0] == SIMULATED
    assert simulated.stdout.splitlines()[0] == SIMULATED
    assert simulated.stderr.splitlines().count(SIMULATED) == 2, "and where the job is written"
    assert (folder / "job" / "launch.sh").read_text(encoding="utf-8").splitlines()[1] == f"# {SIMULATED}"
    again = run("export", "sim", cwd=folder)
    assert again.stderr.splitlines()[0] == SIMULATED
    assert json.loads(again.stdout)["train_batch_size"] % 64 == 0


@pytest.mark.parametrize("name", ["sim", "mixed_replayed"])
def test_report_watch_and_list_say_it_too(
    run: Run, replayed: CompletedProcess[str], simulated: CompletedProcess[str], folder: Path, tmp_path: Path, name: str
) -> None:
    warning = SIMULATED if name == "sim" else REPLAYED.format("mixed", folder / "runs.csv")
    page = tmp_path / "page.html"
    assert run("report", name, "--out", str(page), cwd=folder).returncode == 0
    header = page.read_text(encoding="utf-8").partition("<header>")[2]
    assert header.split("\n")[1].strip() == f'<p class="warning">{warning}.</p>'
    assert run("watch", name, "--once", cwd=folder).stderr.splitlines()[0] == warning
    (line,) = [line for line in run("list", cwd=folder).stdout.splitlines() if line.startswith(f"{name} ")]
    assert line.endswith("(simulation)" if name == "sim" else "(replay)")


def test_a_report_of_what_cannot_be_trained_has_no_command_to_copy(
    run: Run, replayed: CompletedProcess[str], folder: Path, tmp_path: Path
) -> None:
    pages: dict[str, str] = {}
    for name in ("mixed_replayed", "known_replayed"):
        page = tmp_path / f"{name}.html"
        assert run("report", name, "--out", str(page), cwd=folder).returncode == 0
        pages[name] = page.read_text(encoding="utf-8").partition("Train with it")[2].partition("</section>")[0]
    assert "No job can be written: DeepSpeed must be able to run" in pages["mixed_replayed"]
    assert "ZeRO" not in pages["mixed_replayed"] and "zero_optimization" not in pages["mixed_replayed"]
    assert "No job can be written: a job needs the model itself" in pages["known_replayed"]
    assert "zero_optimization" in pages["known_replayed"]
    assert not any("bo-tuner export" in page for page in pages.values())


def test_what_deepspeed_cannot_run_is_not_exported(run: Run, replayed: CompletedProcess[str], folder: Path) -> None:
    error = the_error(run("export", "mixed_replayed", cwd=folder), code=2)
    assert f"{BEST} has tensor parallelism" in error
    again = run("tune", "--replay", "runs.csv", "--group", "mixed", "--budget", "1 trials", "--out", "none", cwd=folder)
    assert again.returncode == 0, "the study is good all the same"
    assert f"nothing is written to none: DeepSpeed must be able to run what is exported, and {BEST}" in again.stderr
    assert not (folder / "none" / "ds_config.json").exists()
    switched = the_error(run("export", "mixed_replayed", "--rank", "2", cwd=folder), code=2)
    assert "switches of its table's framework (fuse)" in switched
    known = run("export", "known_replayed", cwd=folder)
    assert json.loads(known.stdout)["train_micro_batch_size_per_gpu"] == 8
    assert known.stderr.splitlines()[0] == REPLAYED.format("known", folder / "runs.csv")
    error = the_error(run("export", "known_replayed", "--out", "nowhere", cwd=folder), code=2)
    assert "the table only names small" in error
    assert not (folder / "nowhere").exists()


WRONG = {
    "unknown group": (["--replay", "runs.csv", "--group", "mixt"], ["--group", "'mixt'", "did you mean mixed?"]),
    "no group of several": (["--replay", "runs.csv"], ["--group must be one of the 2 groups", "mixed, known"]),
    "no such table": (["--replay", "no.csv", "--group", "x"], ["--replay must be a table", "no.csv cannot be read"]),
    "no column": (["--replay", "lacking.csv", "--group", "x"], ["--replay", "columns group, model", "lacks mbs"]),
    "a replay of a model": (
        ["bert-tiny", "--replay", "runs.csv", "--seq-len", "16"],
        ["--replay", "got MODEL and --seq-len: leave them out"],
    ),
    "a cluster that is not here": (["bert-tiny", "--cluster", "8xH100"], ["add --simulate", "got --cluster"]),
    "an unknown device": (
        ["bert-tiny", "--simulate", "--cluster", "8xV1000"],
        ["--cluster must name devices", "'8xV1000'", "V100"],
    ),
    "ranks beside a cluster": (
        ["bert-tiny", "--simulate", "--cluster", "8xV100", "--ranks", "4"],
        ["--cluster tells the devices", "got --ranks"],
    ),
}


@pytest.mark.parametrize(("arguments", "told"), WRONG.values(), ids=WRONG.keys())
def test_wrong_use_gives_one_line_exit_code_2_and_leaves_nothing(
    run: Run, tmp_path: Path, arguments: list[str], told: list[str]
) -> None:
    write_table(tmp_path)
    (tmp_path / "lacking.csv").write_text(f"{HEADER.replace(',mbs', '')}\n{MIXED[0]}\n", encoding="utf-8")
    before = sorted(tmp_path.rglob("*"))
    ended = run("tune", *arguments, cwd=tmp_path)
    error = the_error(ended, code=2)
    assert len(ended.stderr.splitlines()) == 1
    assert [words for words in told if words not in error] == [], error
    assert sorted(tmp_path.rglob("*")) == before


def test_help_tells_of_simulations_and_replays(run: Run, tmp_path: Path) -> None:
    shown = " ".join(re.sub(r"[^\w.-]+", " ", run("tune", "--help", cwd=tmp_path).stdout).split())
    for words in ("--replay", "--group", "--simulate", "--cluster", "8x8xV100-16GB"):
        assert words in shown
