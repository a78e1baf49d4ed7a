"""Bad input: one line that says what must hold, what came and the way out; the right exit code; nothing written."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from subprocess import CompletedProcess

import pytest

Run = Callable[..., CompletedProcess[str]]

CPU = ["tune", "bert-tiny", "--device", "cpu"]

USED_WRONGLY = {
    "unknown model": (["tune", "no-such-thing"], ["'no-such-thing'", "presets: bert-base-uncased"]),
    "misspelt model": (["tune", "bert-tny"], ["'bert-tny'", "did you mean bert-tiny?"]),
    "folder without a config": (["tune", "."], ["folder .", "must hold a config.json"]),
    "no model": (["tune"], ["Missing argument", "MODEL"]),
    "unknown command": (["frobnicate"], ["'frobnicate'", "--help"]),
    "unknown option": ([*CPU, "--buget", "3"], ["--buget", "--budget"]),
    "unknown device": (["tune", "bert-tiny", "--device", "tpu"], ["--device", "auto, cpu or cuda", "'tpu'"]),
    "unknown precision": ([*CPU, "--precision", "int8"], ["--precision", "fp32, bf16, fp16", "'int8'"]),
    "unknown optimizer": (
        [*CPU, "--optimizer", "sgd"],
        ["--optimizer", "adamw, adam, fused_adam, FILE.py:FUNCTION", "'sgd'"],
    ),
    "unknown recomputation": ([*CPU, "--recompute", "maybe"], ["--recompute", "both, on, off", "'maybe'"]),
    "unknown balance": ([*CPU, "--balance", "maybe"], ["--balance", "time, parameters", "'maybe'"]),
    "no pipeline stage": ([*CPU, "--max-depth", "0"], ["--max-depth", "from 1 to the 2 ranks", "got 0"]),
    "more stages than ranks": ([*CPU, "--max-depth", "3"], ["--max-depth", "from 1 to the 2 ranks", "got 3"]),
    "no time for data": ([*CPU, "--data-timeout", "0"], ["--data-timeout", "over 0 s", "got 0"]),
    "no time for a step": ([*CPU, "--first-step-timeout", "0"], ["--first-step-timeout", "over 0 s", "got 0"]),
    "unknown sampler": (
        [*CPU, "--sampler", "ramdom"],
        ["--sampler", "bo, tpe, gp, random, grid", "did you mean random?"],
    ),
    "unknown ZeRO stage": ([*CPU, "--zero-stages", "0,7"], ["--zero-stages", "0, 1, 2, 3", "0,7"]),
    "ZeRO stages that are no numbers": ([*CPU, "--zero-stages", "all"], ["--zero-stages", "as in 0,1,2", "'all'"]),
    "unreadable budget": ([*CPU, "--budget", "lots"], ["--budget", '"20 trials"', "'lots'"]),
    "budget of nothing": ([*CPU, "--budget", "0 trials"], ["--budget", '"20 trials"', "0 trials"]),
    "unreadable memory limit": (
        [*CPU, "--memory-limit", "3parsecs"],
        ["--memory-limit", "0.92", "3GiB", "'3parsecs'"],
    ),
    "memory limit beyond the machine": (
        [*CPU, "--memory-limit", "90000GiB"],
        ["--memory-limit", "at most", "lower it"],
    ),
    "memory limit and reserve": (
        [*CPU, "--memory-limit", "0.9", "--memory-reserve", "2GiB"],
        ["--memory-limit", "--memory-reserve", "give one"],
    ),
    "reserve beyond the machine": (
        [*CPU, "--memory-reserve", "90000GiB"],
        ["--memory-reserve", "less than", "lower it"],
    ),
    "precision of nothing": ([*CPU, "--precision-target", "0%"], ["--precision-target", "0.02", "'0%'"]),
    "unreadable precision": ([*CPU, "--precision-target", "sharp"], ["--precision-target", "over 0", "'sharp'"]),
    "unreadable gain": ([*CPU, "--min-gain", "some"], ["--min-gain", "at least 0", "'some'"]),
    "gain of all": ([*CPU, "--min-gain", "100%"], ["--min-gain", "under 1", "'100%'"]),
    "too few steps": ([*CPU, "--max-steps", "3"], ["--max-steps", "at least 4", "got 3"]),
    "unreadable reserve": ([*CPU, "--memory-reserve", "half"], ["--memory-reserve", "2GiB", "'half'"]),
    "seed that is none": ([*CPU, "--seed", "-1"], ["--seed", "from 0 to 4294967295", "got -1"]),
    "storage that is no plain file": (
        [*CPU, "--storage", "sqlite:///file:x.db?uri=true"],
        ["--storage", "plain file", "uri=true"],
    ),
    "export below a file": ([*CPU, "--out", "/etc/hostname/x"], ["--out must be a folder", "/etc/hostname/x"]),
    "sequence length of nothing": ([*CPU, "--seq-len", "0"], ["--seq-len", "at least 1", "got 0"]),
    "sequence length beyond the model": ([*CPU, "--seq-len", "513"], ["--seq-len", "at most the 512", "got 513"]),
    "sequence length that is no number": ([*CPU, "--seq-len", "abc"], ["--seq-len", "integer", "abc"]),
    "global batch that no config meets": (
        [*CPU, "--ranks", "2", "--global-batch", "7", "--max-depth", "1"],
        ["--global-batch", "multiple of the 2", "got 7", "use 6"],
    ),
    "bound that no config meets": (
        [*CPU, "--ranks", "2", "--max-global-batch", "1", "--max-depth", "1"],
        ["--max-global-batch", "at least", "got 1", "use 2"],
    ),
    "both batch options": (
        [*CPU, "--global-batch", "8", "--max-global-batch", "8"],
        ["--global-batch", "--max-global-batch", "give one"],
    ),
    "more ranks than cores": ([*CPU, "--ranks", "4096"], ["--ranks", "CPU cores", "got 4096", "or fewer"]),
    "no ranks": ([*CPU, "--ranks", "0"], ["--ranks", "at least 1", "got 0"]),
    "unreadable storage": (
        ["list", "--storage", "nonsense"],
        ["--storage", "sqlite:///studies.db", "'nonsense'"],
    ),
    "storage of an unknown kind": (["show", "x", "--storage", "foo://x"], ["--storage", "postgresql://", "'foo://x'"]),
}


def the_error(ended: CompletedProcess[str], *, code: int) -> str:
    """Its one error line, after the checks that hold for all."""
    errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, ended.stderr
    assert ended.stderr.splitlines()[-1] == errors[0]
    assert "Traceback" not in ended.stderr
    assert ended.returncode == code
    return errors[0]


@pytest.mark.parametrize(("arguments", "told"), USED_WRONGLY.values(), ids=USED_WRONGLY.keys())
def test_wrong_use_gives_one_line_exit_code_2_and_leaves_nothing(
    run: Run, tmp_path: Path, arguments: list[str], told: list[str]
) -> None:
    ended = run(*arguments, cwd=tmp_path)
    error = the_error(ended, code=2)
    assert len(ended.stderr.splitlines()) == 1
    assert [words for words in told if words not in error] == [], error
    assert ended.stdout == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["tune", "no-such-thing"], 2),
        ([*CPU, "--budget", "lots"], 2),
        ([*CPU, "--seq-len", "abc"], 2),
        (["show", "nothing"], 1),
    ],
)
def test_debug_adds_the_traceback(run: Run, tmp_path: Path, arguments: list[str], code: int) -> None:
    plain = run(*arguments, cwd=tmp_path)
    ended = run(*arguments, "--debug", cwd=tmp_path)
    assert "Traceback (most recent call last)" in ended.stderr
    assert ended.stderr.splitlines()[-1] == the_error(plain, code=code)
    assert ended.returncode == code


@pytest.mark.parametrize("command", ["show", "export", "dashboard", "watch"])
def test_an_unknown_study_in_an_empty_folder_says_how_to_start_one(run: Run, tmp_path: Path, command: str) -> None:
    error = the_error(run(command, "nothing", cwd=tmp_path), code=1)
    assert "'nothing'" in error
    assert "bo-tuner tune MODEL" in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["show", "export", "dashboard", "watch"])
def test_an_unknown_study_beside_others_names_them(
    run: Run, tuned: CompletedProcess[str], study_folder: Path, command: str
) -> None:
    error = the_error(run(command, "shard", cwd=study_folder), code=1)
    assert "'shard'" in error
    assert "did you mean shared?" in error


def test_a_storage_that_does_not_answer_is_told_without_the_password(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("psycopg", reason="the driver of PostgreSQL is not installed")
    url = "postgresql://user:secret@127.0.0.1:1/studies"
    ended = run(*CPU, "--storage", url, cwd=tmp_path)
    error = the_error(ended, code=1)
    assert "127.0.0.1" in error
    assert "must answer" in error
    assert "secret" not in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_storage_that_cannot_be_written_is_told(run: Run, tmp_path: Path) -> None:
    ended = run(*CPU, "--seq-len", "16", "--storage", "sqlite:////proc/studies.db", cwd=tmp_path)
    error = the_error(ended, code=1)
    assert "sqlite:////proc/studies.db" in error
    assert "run the same command again" in error
    assert list(tmp_path.iterdir()) == []


def test_a_storage_without_its_driver_is_told(run: Run, tmp_path: Path) -> None:
    error = the_error(run("list", "--storage", "mssql+pymssql://u@127.0.0.1:1/x", cwd=tmp_path), code=2)
    assert "driver" in error
    assert "pymssql" in error
    assert list(tmp_path.iterdir()) == []


def test_a_study_for_another_workload_is_refused_with_the_difference(
    run: Run, tuned: CompletedProcess[str], tune_command: list[str], study_folder: Path
) -> None:
    before = sorted(study_folder.rglob("*"))
    ended = run(*tune_command, "--seq-len", "32", cwd=study_folder)
    error = the_error(ended, code=2)
    for words in ("'shared'", "seq_len is 16, not 32", "--study"):
        assert words in error
    assert ended.stdout == ""
    assert sorted(study_folder.rglob("*")) == before


def test_a_model_whose_constructor_raises_is_told_with_its_words(run: Run, small: list[str], tmp_path: Path) -> None:
    preset = resources.files("bo_tuner.presets").joinpath("bert-tiny.json").read_text(encoding="utf-8")
    config = tmp_path / "models" / "broken.json"
    config.parent.mkdir()
    config.write_text(json.dumps({**json.loads(preset), "hidden_size": 129}), encoding="utf-8")
    folder = tmp_path / "work"
    folder.mkdir()
    ended = run("tune", str(config), *small, cwd=folder)
    error = the_error(ended, code=2)
    for words in ("model broken", "ValueError", "hidden size (129) is not a multiple"):
        assert words in error
    assert list(folder.iterdir()) == []


def test_a_precision_that_deepspeed_refuses_on_this_device_is_told_with_those_it_takes(
    run: Run, small: list[str], tmp_path: Path
) -> None:
    ended = run("tune", "bert-tiny", *small, "--precision", "fp16", "--budget", "1 trials", cwd=tmp_path)
    if ended.returncode == 0:
        pytest.skip("DeepSpeed supports fp16 on this CPU")
    error = the_error(ended, code=2)
    for words in ("--precision", "got fp16", "use fp32"):
        assert words in error
    assert list(tmp_path.iterdir()) == []


def test_a_study_where_nothing_fits_prints_its_trials_and_fails_with_the_way_out(
    run: Run, small: list[str], tmp_path: Path
) -> None:
    limit = ["--memory-limit", "1MiB", "--zero-stages", "3", "--recompute", "off", "--max-global-batch", "2"]
    ended = run("tune", "bert-tiny", *small, *limit, "--json", cwd=tmp_path)
    error = the_error(ended, code=1)
    for words in ("1 MiB", "--memory-limit", "--seq-len", "z3_gas1_mbs1"):
        assert words in error
    told = json.loads(ended.stdout)
    assert told["best"] is None
    assert [trial["outcome"] for trial in told["trials"]] == ["guarded"]
    assert told["trials"][0]["samples_per_s"] is None
    assert "1 MiB" in told["trials"][0]["reason"]


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A working folder with 64 KiB of room; less than a database of studies needs."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount a small disk")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_full_disk_gives_one_line_and_nothing_half_written(run: Run, small: list[str], full_disk: Path) -> None:
    ended = run("tune", "bert-tiny", *small, cwd=full_disk)
    error = the_error(ended, code=1)
    for words in ("full", "studies.db", "run the same command again"):
        assert words in error
    assert ended.stdout == ""
    assert list(full_disk.iterdir()) == []


def test_a_busy_dashboard_port_is_told_with_the_way_out(
    run: Run, tuned: CompletedProcess[str], study_folder: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = run("dashboard", "shared", "--port", str(port), cwd=study_folder)
    error = the_error(ended, code=2)
    for words in ("--port must be free", str(port), "--port 0"):
        assert words in error
    assert ended.stdout == ""


def test_export_out_that_is_a_file_is_told_and_the_file_kept(
    run: Run, tuned: CompletedProcess[str], study_folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("mine", encoding="utf-8")
    ended = run("export", "shared", "--out", str(file), cwd=study_folder)
    error = the_error(ended, code=1)
    for words in ("--out must be a folder", str(file)):
        assert words in error
    assert file.read_text(encoding="utf-8") == "mine"


def test_tune_out_that_is_a_file_is_refused_before_anything_runs(run: Run, small: list[str], tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine", encoding="utf-8")
    ended = run("tune", "bert-tiny", *small, "--budget", "1 trials", "--out", "file", cwd=tmp_path)
    error = the_error(ended, code=ended.returncode)
    assert ended.returncode in (1, 2)
    assert "--out must be a folder" in error
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
