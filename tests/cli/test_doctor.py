"""`bo-tuner doctor` as people and programs use it."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

CHECKS = [
    *(
        "bo_tuner",
        "started by",
        "python",
        "packages",
        "gpu driver",
        "torch",
        "devices",
        "compiler",
        "ninja",
        "cpu cores",
        "memory",
    ),
    *("open files", "/dev/shm", "shared segments", "extension locks"),
    *("disk: studies", "disk: temporary", "disk: compiled ops", "storage"),
    *("fork server", "process group", "all-reduce"),
]
CPU = ("--device", "cpu")


@pytest.fixture(scope="module")
def healthy(run: Callable[..., CompletedProcess[str]], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Lines of the text report on this machine."""
    folder = tmp_path_factory.mktemp("doctor")
    ended = run("doctor", *CPU, cwd=folder)
    assert ended.returncode == 0, ended.stdout
    assert "forming a group of 2 ranks ..." in ended.stderr
    assert list(folder.iterdir()) == [], "the doctor leaves nothing behind"
    return ended.stdout.splitlines()


def test_every_check_has_its_aligned_line(healthy: list[str]) -> None:
    lines = [line for line in healthy[:-1] if not line.startswith(" ")]
    assert [line[6:24].strip() for line in lines] == CHECKS
    assert all(re.match(r"(ok  |warn)  \S", line) and line[24:26] == "  " and line[26] != " " for line in lines)


def test_without_a_terminal_there_are_no_colours(healthy: list[str]) -> None:
    assert not any("\x1b" in line for line in healthy)


def test_the_last_line_is_the_verdict(healthy: list[str]) -> None:
    assert re.fullmatch(r"this machine is fit for tuning|\d+ warnings?", healthy[-1])


def test_json_holds_every_finding_with_its_numbers(run: Callable[..., CompletedProcess[str]], tmp_path: Path) -> None:
    ended = run("doctor", *CPU, "--ranks", "1", "--json", cwd=tmp_path)
    assert ended.returncode == 0
    told = json.loads(ended.stdout)
    assert told["is_fit"] is True
    assert [finding["name"] for finding in told["findings"]] == CHECKS
    for finding in told["findings"]:
        assert finding.keys() == {"name", "status", "found", "mend", "details", "log_tail"}
        assert finding["status"] in ("ok", "warn")
        assert (finding["status"] == "ok") == (finding["mend"] == "")
    details = {finding["name"]: finding["details"] for finding in told["findings"]}
    assert details["/dev/shm"]["needed_bytes"] == 66 * 2**20
    assert details["devices"]["n_ranks"] == 1


def test_a_problem_ends_it_with_1_and_its_mend_beneath(
    run: Callable[..., CompletedProcess[str]], tmp_path: Path
) -> None:
    n_ranks = len(os.sched_getaffinity(0)) + 1
    ended = run("doctor", *CPU, "--ranks", str(n_ranks), "--storage", "sqlite:////no/such/folder/s.db", cwd=tmp_path)
    assert ended.returncode == 1
    lines = ended.stdout.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("fail  devices"))
    assert lines[at + 1].strip() == f"-> use --ranks {n_ranks - 1} or fewer"
    assert "fork server" not in ended.stdout
    assert re.search(r"^\d problems?", lines[-1])


def test_on_a_terminal_the_status_is_coloured(program: str, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    arguments = [program, "doctor", "--device", "cpu", "--ranks", "999999"]
    with subprocess.Popen(arguments, cwd=tmp_path, stdout=theirs, stderr=subprocess.DEVNULL, env=_without_no_color()):
        os.close(theirs)
        text = b""
        while True:
            try:
                read = os.read(ours, 65536)
            except OSError:  # how Linux says that the other end is closed
                break
            text += read
    os.close(ours)
    assert b"\x1b[31mfail\x1b[0m  devices" in text


def _without_no_color() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "NO_COLOR"}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--device", "tpu"), "--device must be one of auto, cpu, cuda; got 'tpu'"),
        (("--ranks", "0"), "greater than or equal to 1; got '0'"),
    ],
)
def test_wrong_use_is_refused_before_anything_is_looked_at(
    run: Callable[..., CompletedProcess[str]], tmp_path: Path, arguments: tuple[str, ...], text: str
) -> None:
    ended = run("doctor", *arguments, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert text in ended.stderr
