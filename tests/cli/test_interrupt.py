"""How `tune` ends when it is stopped: at once, completely, and ready to go on."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess, Popen
from typing import Any

import psutil
import pytest

from tests.cli.test_commands import as_measured

Run = Callable[..., CompletedProcess[str]]

LONGEST_END_S = 5.0
LONG_TRIAL = [
    *("--device", "cpu", "--ranks", "2", "--seq-len", "128", "--global-batch", "1024", "--zero-stages", "0"),
    *("--sampler", "tpe"),
]
"""The first trial alone takes minutes, and the machine is not measured before it."""


@dataclass
class Stopped:
    """A `tune` that was sent a signal, and what it left behind."""

    arguments: list[str]
    folder: Path
    pid: int
    code: int
    seconds: float
    """From the signal to the last process gone."""
    stderr: str
    left: list[str]
    """Processes that live on."""
    temporary: list[Path]
    shared_memory: list[Path]
    """Segments that its ranks had and that are still there."""
    second: CompletedProcess[str] | None = None
    """The same command, run while it lived."""


@contextmanager
def tuning(program: str, arguments: list[str], folder: Path) -> Generator[Popen[bytes], None, None]:
    """A running `tune` with a temporary folder of its own and stderr in a file."""
    (folder / "tmp").mkdir()
    (folder / "work").mkdir()
    with open(folder / "stderr", "wb") as stderr:
        process = subprocess.Popen(
            [program, *arguments],
            cwd=folder / "work",
            # LOCAL_SIZE lets DeepSpeed reduce through shared memory, which it leaves behind when it is killed.
            env={**os.environ, "TMPDIR": str(folder / "tmp"), "LOCAL_SIZE": "2"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,
        )
    descendants: list[psutil.Process] = []
    try:
        descendants = psutil.Process(process.pid).children(recursive=True)
        yield process
    finally:
        if process.poll() is None:
            descendants = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            process.wait()
        for descendant in descendants:
            if lives(descendant):
                descendant.kill()


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def segments(processes: list[psutil.Process]) -> list[Path]:
    """Shared memory that DeepSpeed has mapped in these processes."""
    found: set[str] = set()
    for process in processes:
        try:
            maps = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        found |= {line.split()[-1] for line in maps.splitlines() if "/dev/shm/deepspeed_allreduce_buffer" in line}
    return sorted(map(Path, found))


def wait_for_ranks(process: Popen[bytes], folder: Path, *, after: str = "", busy_s: float = 0.0) -> None:
    """Wait until two ranks have computed for `busy_s` each, and stderr holds `after`."""
    deadline = time.monotonic() + 400.0
    while time.monotonic() < deadline:
        assert process.poll() is None, (folder / "stderr").read_text(encoding="utf-8")
        if after in (folder / "stderr").read_text(encoding="utf-8"):
            servers = psutil.Process(process.pid).children()
            ranks = [rank for server in servers for rank in children_of(server)]
            # Before the study exists, the server has one child that looks at the model.
            are_busy = len(ranks) == 2 and all(seconds_of(rank) >= busy_s for rank in ranks)
            if are_busy and len(segments(ranks)) == 2:
                return
        time.sleep(0.1)  # looking at all processes is work
    raise AssertionError(f"no ranks: {(folder / 'stderr').read_text(encoding='utf-8')}")


def children_of(process: psutil.Process) -> list[psutil.Process]:
    """Its children; none when it has just ended."""
    try:
        return process.children()
    except psutil.NoSuchProcess:
        return []


def seconds_of(process: psutil.Process) -> float:
    """Processor time; 0 when it has just ended."""
    try:
        return process.cpu_times().user
    except psutil.NoSuchProcess:
        return 0.0


def wait_for_start(process: Popen[bytes]) -> None:
    """Wait until the process that starts ranks is importing."""
    deadline = time.monotonic() + 200.0
    while not psutil.Process(process.pid).children():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(1.0)


def stop(process: Popen[bytes], arguments: list[str], folder: Path, sent: signal.Signals) -> Stopped:
    """Send a signal, as a terminal does for Ctrl-C, and look at what is left after at most five seconds."""
    descendants = psutil.Process(process.pid).children(recursive=True)
    assert descendants
    mapped = segments(descendants)
    started = time.monotonic()
    if sent is signal.SIGINT:
        os.killpg(process.pid, sent)
    else:
        process.send_signal(sent)
    code = process.wait(timeout=200.0)
    # A killed process cannot wait for its own; one that ends in order has ended them before.
    patience_s = LONGEST_END_S if sent is signal.SIGKILL else 0.2
    ended = time.monotonic()
    while time.monotonic() < ended + patience_s and (
        any(map(lives, descendants)) or any((folder / "tmp").glob("bo_tuner-*"))
    ):
        time.sleep(0.02)
    seconds = time.monotonic() - started
    shared_memory = [segment for segment in mapped if segment.exists()]
    for segment in shared_memory:
        segment.unlink()  # told below; it must not pile up
    left = [f"{descendant.pid} {descendant.name()}" for descendant in descendants if lives(descendant)]
    return Stopped(
        arguments=arguments,
        folder=folder,
        pid=process.pid,
        code=code,
        seconds=seconds,
        stderr=(folder / "stderr").read_text(encoding="utf-8"),
        left=left,
        temporary=list((folder / "tmp").glob("bo_tuner-*")),
        shared_memory=shared_memory,
    )


@pytest.fixture(scope="module")
def interrupted(program: str, run: Run, tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    """Ctrl-C during a trial; a second `tune` came before."""
    folder = tmp_path_factory.mktemp("interrupted")
    arguments = ["tune", "bert-tiny", *LONG_TRIAL, "--budget", "3 trials, 1h"]
    with tuning(program, arguments, folder) as process:
        wait_for_ranks(process, folder, busy_s=1.0)
        second = run(*arguments, cwd=folder / "work", timeout_s=60.0)
        stopped = stop(process, arguments, folder, signal.SIGINT)
    stopped.second = second
    return stopped


@pytest.fixture(scope="module")
def terminated(program: str, tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    """SIGTERM during a trial."""
    folder = tmp_path_factory.mktemp("terminated")
    arguments = ["tune", "bert-tiny", *LONG_TRIAL]
    with tuning(program, arguments, folder) as process:
        wait_for_ranks(process, folder, busy_s=1.0)
        return stop(process, arguments, folder, signal.SIGTERM)


@pytest.fixture(scope="module")
def killed(program: str, small: list[str], tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    """SIGKILL during the second trial or a later one."""
    folder = tmp_path_factory.mktemp("killed")
    arguments = ["tune", "bert-tiny", *small, "--budget", "4 trials", "--study", "killed"]
    with tuning(program, arguments, folder) as process:
        wait_for_ranks(process, folder, after="trial   0")
        return stop(process, arguments, folder, signal.SIGKILL)


@pytest.fixture(scope="module")
def interrupted_at_start(program: str, small: list[str], tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    """Ctrl-C before the training processes are ready."""
    folder = tmp_path_factory.mktemp("interrupted_at_start")
    arguments = ["tune", "bert-tiny", *small]
    with tuning(program, arguments, folder) as process:
        wait_for_start(process)
        return stop(process, arguments, folder, signal.SIGINT)


@pytest.fixture(scope="module")
def killed_at_start(program: str, small: list[str], tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    """SIGKILL before the training processes are ready."""
    folder = tmp_path_factory.mktemp("killed_at_start")
    arguments = ["tune", "bert-tiny", *small]
    with tuning(program, arguments, folder) as process:
        wait_for_start(process)
        return stop(process, arguments, folder, signal.SIGKILL)


@pytest.fixture
def stopped(request: pytest.FixtureRequest) -> Stopped:
    """One of the above, by name."""
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Stopped)
    return found


IN_ORDER = ["interrupted", "terminated", "interrupted_at_start"]
EVERY = [*IN_ORDER, "killed", "killed_at_start"]


@pytest.mark.parametrize("stopped", EVERY, indirect=True)
def test_all_processes_are_gone_within_five_seconds(stopped: Stopped) -> None:
    assert stopped.left == []
    assert stopped.seconds < LONGEST_END_S


@pytest.mark.parametrize("stopped", EVERY, indirect=True)
def test_the_private_folder_is_gone(stopped: Stopped) -> None:
    assert stopped.temporary == []


@pytest.mark.parametrize("stopped", ["interrupted", "terminated", "killed"], indirect=True)
def test_no_shared_memory_is_left(stopped: Stopped) -> None:
    assert stopped.shared_memory == []


@pytest.mark.parametrize("stopped", IN_ORDER, indirect=True)
def test_exit_code_is_130_and_the_last_line_is_the_command_that_goes_on(stopped: Stopped) -> None:
    assert stopped.code == 130
    assert shlex.split(stopped.stderr.splitlines()[-1]) == ["bo-tuner", *stopped.arguments]
    assert "every finished trial is kept" in stopped.stderr
    assert "Traceback" not in stopped.stderr


def test_a_second_tune_on_a_live_study_is_refused_by_process_and_host(interrupted: Stopped) -> None:
    second = interrupted.second
    assert second is not None
    assert second.returncode == 1
    assert second.stdout == ""
    errors = [line for line in second.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert f"process {interrupted.pid} on {socket.gethostname()}" in errors[0]
    assert "--study" in errors[0]
    assert "Traceback" not in second.stderr


def test_a_second_tune_is_refused_before_it_starts_training_processes(interrupted: Stopped) -> None:
    assert interrupted.second is not None
    assert "starting the training processes" not in interrupted.second.stderr


def test_after_a_kill_the_same_command_finishes_and_no_trial_is_lost(run: Run, killed: Stopped) -> None:
    folder = killed.folder / "work"
    before: dict[str, Any] = json.loads(run("show", "killed", "--json", cwd=folder).stdout)
    finished = [trial for trial in before["trials"] if trial["outcome"] is not None]
    assert finished
    assert before["spent"]["trials"] == len(finished)
    ended = run(*killed.arguments, "--json", cwd=folder)
    assert ended.returncode == 0, ended.stderr
    after: dict[str, Any] = json.loads(ended.stdout)
    for now, then in zip(after["trials"], finished, strict=False):
        assert as_measured(now) == as_measured(then)
    numbers = [trial["number"] for trial in after["trials"]]
    assert numbers == list(range(len(numbers))), "one that was ended early may run again"
    assert all(trial["outcome"] in ("complete", "pruned") for trial in after["trials"])
    # The trial that was running is run again, not replaced by another.
    names_before = [trial["name"] for trial in before["trials"]]
    assert [trial["name"] for trial in after["trials"]][: len(names_before)] == names_before
    assert len({trial["name"] for trial in after["trials"]}) == 4
    assert after["spent"]["seconds"] > before["spent"]["seconds"]
