"""A clock that is set while a study runs does it no harm, and a disk that becomes read-only stops it in one line, to go on later."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bo_tuner.storage import Location, StudyStore

if TYPE_CHECKING:
    from tests.storage.conftest import SmallDisk

DRIVER = Path(__file__).with_name("crash_driver.py")
JUMPING_CLOCK = Path(__file__).parents[1] / "faults" / "clock.c"
N_TRIALS = 6
DAY_S = 86_400


def command(folder: Path, journal: Path, *options: str | float) -> list[str]:
    return [sys.executable, str(DRIVER), str(folder), str(journal), "--budget", str(N_TRIALS), *map(str, options)]


@pytest.fixture(scope="module")
def jumping_clock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that sets the clock of the process that loads it."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler is installed")
    library = tmp_path_factory.mktemp("clock") / "clock.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, JUMPING_CLOCK, "-ldl"], check=True)
    return library


@pytest.mark.parametrize("jump_s", [DAY_S, -DAY_S])
def test_a_clock_that_is_set_while_a_study_runs_does_it_no_harm(
    jump_s: int, jumping_clock: Path, tmp_path: Path
) -> None:
    folder, journal, moment = tmp_path / "studies", tmp_path / "journal", tmp_path / "moment"
    ended = subprocess.run(
        command(
            folder, journal, "--trial-s", 0.6, "--run-at", 2, f"touch {moment}"
        ),  # long enough for the lease to be renewed
        env={
            **os.environ,
            "LD_PRELOAD": str(jumping_clock),
            "CLOCK_JUMP_S": str(jump_s),
            "CLOCK_JUMP_WHEN": str(moment),
        },
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    told: list[dict[str, Any]] = [json.loads(line) for line in ended.stdout.splitlines()]
    assert told[-1]["stopped"] == "BUDGET"
    location = Location(folder=folder)
    store = StudyStore(location, "mine")
    records = store.records()
    assert len(records) == N_TRIALS
    assert all(record.result is not None for record in records)
    assert store.driver() is None
    assert 0 < store.spent().seconds < 240
    begun = [trial.datetime_start for trial in store.study.trials if trial.datetime_start is not None]
    assert any(abs((later - earlier).total_seconds()) > DAY_S / 2 for earlier, later in itertools.pairwise(begun)), (
        "the clock never jumped"
    )
    location.open().engine.dispose()


def test_a_store_that_cannot_be_written_is_told_in_one_line_and_nothing_is_lost(
    small_disk: SmallDisk, tmp_path: Path
) -> None:
    folder, journal = small_disk.path / "studies", tmp_path / "journal"
    small_disk.run("mkdir", str(folder))
    if small_disk.run("chattr", "+i", str(folder)).returncode != 0:
        pytest.skip("this user or this file system cannot make a folder immutable")
    small_disk.run("chattr", "-i", str(folder))

    midway = small_disk.run(*command(folder, journal, "--run-at", 3, f"chattr +i {folder}"))
    assert_one_line(midway)
    small_disk.run("chattr", "-i", str(folder))
    assert small_disk.run("mount", "-o", "remount,ro", str(small_disk.path)).returncode == 0
    from_the_start = small_disk.run(*command(folder, journal))
    assert_one_line(from_the_start)
    assert len(journal.read_text(encoding="ascii").splitlines()) == 3, "no trial begins that cannot be kept"

    assert small_disk.run("mount", "-o", "remount,rw", str(small_disk.path)).returncode == 0
    ended = small_disk.run(*command(folder, journal))
    assert (ended.returncode, ended.stderr) == (0, "")
    found: list[dict[str, Any]] = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(found[0]["done"]) == 2
    assert len(found[0]["running"]) == 1
    assert found[-1]["stopped"] == "BUDGET"


def assert_one_line(ended: subprocess.CompletedProcess[str]) -> None:
    assert ended.returncode == 1, ended.stderr
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    assert ended.stderr.startswith("StoreError: ")
    assert "run the same command again" in ended.stderr
