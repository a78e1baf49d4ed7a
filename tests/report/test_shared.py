"""What a driving process shares with those who watch."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from bo_tuner.budget import Budget, Spent
from bo_tuner.config import TrainConfig
from bo_tuner.engine import Snapshot
from bo_tuner.objectives import TrialEvent
from bo_tuner.report import SharedProgress, SilentProgress
from bo_tuner.report.shared import RunningTrial, read_running
from bo_tuner.trial import TrialRecord

RUNNING = TrialRecord(number=3, config=TrainConfig())
HERE = socket.gethostname()


def step(number: int) -> Snapshot:
    return Snapshot(
        records=[RUNNING],
        budget=Budget(trials=5),
        spent=Spent(),
        running=RUNNING,
        running_since=time.monotonic() - 10.0,
        event=TrialEvent(phase="measure", step=number, n_steps=1000, memory_bytes=500),
        memory_limit_bytes=1000,
    )


def read(folder: Path) -> RunningTrial | None:
    return read_running(folder, host=HERE, pid=os.getpid())


def read_step(folder: Path, number: int) -> RunningTrial:
    """What is shared, once it is step `number`."""
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        told = read(folder)
        if told is not None and told.event.step == number:
            return told
        time.sleep(0.01)
    raise AssertionError(f"step {number} was not shared")


def test_the_running_trial_is_shared_with_its_newest_step_and_gone_at_the_end(tmp_path: Path) -> None:
    progress = SharedProgress(SilentProgress(), tmp_path)
    progress.shows(step(1))
    progress.shows(step(2))
    told = read_step(tmp_path, 2)
    assert (told.number, told.memory_limit_bytes) == (3, 1000)
    assert told.event == step(2).event
    assert time.time() - told.began_at == pytest.approx(10.0, abs=2.0)
    progress.close()
    assert list(tmp_path.iterdir()) == []


def test_many_steps_a_second_are_written_twice_a_second_at_most(tmp_path: Path) -> None:
    progress = SharedProgress(SilentProgress(), tmp_path)
    seen: set[int] = set()
    started = time.monotonic()
    number = 0
    while time.monotonic() - started < 1.2:
        number += 1
        progress.shows(step(number))
        told = read(tmp_path)
        seen |= {told.event.step} if told is not None else set()
        time.sleep(0.002)
    assert read_step(tmp_path, number)
    progress.close()
    assert 2 <= len(seen) <= 4


def test_everything_is_passed_on(tmp_path: Path) -> None:
    told: list[str] = []

    class Told(SilentProgress):
        def shows(self, snapshot: Snapshot) -> None:
            told.append("shows")

        def ended(self, record: TrialRecord, snapshot: Snapshot) -> None:
            told.append("ended")

        def close(self) -> None:
            told.append("close")

    progress = SharedProgress(Told(), tmp_path)
    progress.shows(step(1))
    progress.ended(RUNNING, step(1))
    progress.close()
    assert told == ["shows", "ended", "close"]


def test_what_another_process_left_behind_says_nothing(tmp_path: Path) -> None:
    progress = SharedProgress(SilentProgress(), tmp_path)
    progress.shows(step(1))
    read_step(tmp_path, 1)
    assert read_running(tmp_path, host=HERE, pid=os.getpid() + 1) is None
    assert read_running(tmp_path, host="elsewhere", pid=os.getpid()) is None
    progress.close()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"host": "HERE", "pid": PID, "event": {"a": 1}}'])
def test_a_file_that_cannot_be_read_says_nothing(tmp_path: Path, text: str) -> None:
    text = text.replace("HERE", HERE).replace("PID", str(os.getpid()))
    (tmp_path / "live.json").write_text(text, encoding="utf-8")
    assert read(tmp_path) is None


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    progress = SharedProgress(SilentProgress(), tmp_path / "not" / "there")
    progress.shows(step(1))
    progress.ended(RUNNING, step(1))
    time.sleep(0.1)
    progress.close()
    assert list(tmp_path.iterdir()) == []


def test_a_progress_closed_before_anything_ran_writes_nothing(tmp_path: Path) -> None:
    SharedProgress(SilentProgress(), tmp_path).close()
    assert list(tmp_path.iterdir()) == []
