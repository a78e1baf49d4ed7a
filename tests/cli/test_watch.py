"""`bo-tuner watch` beside a `tune` in another process."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess, Popen
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.cli.conftest import Terminal

Run = Callable[..., CompletedProcess[str]]
Open = Callable[..., "AbstractContextManager[Terminal]"]

LONG_TRIAL = [
    "--device",
    "cpu",
    "--ranks",
    "2",
    "--seq-len",
    "128",
    "--global-batch",
    "1024",
    "--zero-stages",
    "0",
    "--sampler",
    "tpe",
]
"""The first trial alone takes minutes."""
STUDY = "watched"
LINE = re.compile(r"^trial +(\d+)  \S+ +.*\[.+ left\]$", re.MULTILINE)


@contextmanager
def tuning(program: str, folder: Path, *arguments: str) -> Generator[Popen[bytes]]:
    """A running `tune` in its first trial; its stderr is a file."""
    with open(folder / "stderr", "wb") as stderr:
        process = Popen(
            [program, "tune", "bert-tiny", *arguments, "--study", STUDY],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )
    try:
        deadline = time.monotonic() + 400.0
        while not live_file(folder).exists():
            assert process.poll() is None, (folder / "stderr").read_text(encoding="utf-8")
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(30)


def live_file(folder: Path) -> Path:
    return folder / "bo_tuner_studies" / STUDY / "live.json"


@contextmanager
def watching(program: str, folder: Path, *more: str) -> Generator[Popen[str]]:
    """A `watch` whose output is no terminal."""
    process = Popen(
        [program, "watch", STUDY, *more],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


# -- a study to its end ----------------------------------------------------------------------------------------------


@dataclass
class Followed:
    """A whole study, as two that watched it saw it."""

    told: str
    """What `tune` wrote to stderr."""
    screens: list[str]
    text: str
    has_cursor: bool
    code: int
    piped: CompletedProcess[str]
    files: list[str]
    """In the study's folder afterwards."""


@pytest.fixture(scope="module")
def followed(program: str, terminal: Open, small: list[str], tmp_path_factory: pytest.TempPathFactory) -> Followed:
    folder = tmp_path_factory.mktemp("followed")
    with (
        tuning(program, folder, *small, "--budget", "6 trials") as tune,
        watching(program, folder) as piped,
        terminal("watch", STUDY, cwd=folder) as opened,
    ):
        assert tune.wait(200) == 0
        code = opened.wait(timeout_s=60)
        stdout, stderr = piped.communicate(timeout=60)
        return Followed(
            told=(folder / "stderr").read_text(encoding="utf-8"),
            screens=opened.screens,
            text=opened.text,
            has_cursor=opened.has_cursor,
            code=code,
            piped=CompletedProcess([], piped.returncode, stdout, stderr),
            files=sorted(file.name for file in live_file(folder).parent.iterdir()),
        )


def test_a_terminal_shows_the_running_trial_with_step_and_memory(followed: Followed) -> None:
    text = "\n\n".join(followed.screens)
    assert re.search(r"^running  [━─]{16}  trial \d z\d_\S+, (warmup|measure) \d+/\d+, \w+$", text, re.MULTILINE), text
    assert re.search(r"^memory   [━─]{16}  \d+ MiB of [\d.]+ GiB, \d+%$", text, re.MULTILINE)
    assert re.search(r"^best     trial \d z\d_\S+, [\d.]+/s \+-[\d.]+ %, \d+ MiB$", text, re.MULTILINE)
    assert re.search(r"^left     \d trials? \(about \w+\), \w+ spent$", text, re.MULTILINE)


def test_a_terminal_is_left_with_the_trials_the_best_and_the_reason(followed: Followed) -> None:
    assert followed.code == 0
    assert followed.has_cursor
    assert "running" not in followed.text
    assert re.search(r"^ *5 .  z\d_\S+ +(complete|pruned)", followed.text, re.MULTILINE)
    assert "6 of 6 trials" in followed.text
    assert followed.text.splitlines()[-1] == f"{STUDY} is not tuned now: the budget is used up (6 trials)"


def test_without_a_terminal_there_is_one_line_per_trial_that_ends(followed: Followed) -> None:
    assert followed.piped.returncode == 0
    told, piped = LINE.findall(followed.told), LINE.findall(followed.piped.stdout)
    assert told == ["0", "1", "2", "3", "4", "5"]
    assert len(piped) >= 2
    assert piped == told[-len(piped) :]  # those that ended before it came are not news
    assert len(followed.piped.stdout.splitlines()) == len(piped), "no line while the best is confirmed"
    assert "\x1b" not in followed.piped.stdout + followed.piped.stderr


def test_it_ends_by_itself_and_says_why(followed: Followed) -> None:
    first, last = followed.piped.stderr.splitlines()
    assert re.fullmatch(rf"{STUDY} is tuned by process \d+ on \S+; Ctrl-C ends the view", first)
    assert last == f"{STUDY} is not tuned now: the budget is used up (6 trials)"


def test_the_driver_leaves_nothing_behind_for_watchers(followed: Followed) -> None:
    assert followed.files == ["lock", "logs"]


# -- a trial that takes long, and a kill ------------------------------------------------------------------------------


@dataclass
class Killed:
    """Looks at a study whose first trial takes minutes, and whose driver is killed at last."""

    once: CompletedProcess[str]
    elsewhere: CompletedProcess[str]
    """`--once` from another folder, by the database's URL."""
    left: int
    """Exit code after Ctrl-C in a terminal."""
    has_cursor: bool
    left_text: str
    killed: CompletedProcess[str]
    after: CompletedProcess[str]


@pytest.fixture(scope="module")
def killed(program: str, run: Run, terminal: Open, tmp_path_factory: pytest.TempPathFactory) -> Killed:
    folder, other = tmp_path_factory.mktemp("killed"), tmp_path_factory.mktemp("other")
    with tuning(program, folder, *LONG_TRIAL, "--budget", "2 trials, 1h") as tune:
        once = run("watch", STUDY, "--once", cwd=folder)
        database = f"sqlite:///{folder}/bo_tuner_studies/studies.db"
        elsewhere = run("watch", STUDY, "--once", "--storage", database, cwd=other)
        with terminal("watch", STUDY, cwd=folder) as opened:
            opened.wait_for("running  ")
            opened.type(b"\x03")
            left = opened.wait(timeout_s=60)
            has_cursor, text = opened.has_cursor, opened.text
        with watching(program, folder) as piped:
            assert piped.stderr is not None
            first = piped.stderr.readline()
            tune.kill()
            tune.wait()
            stdout, stderr = piped.communicate(timeout=60)
        assert live_file(folder).exists()
        after = run("watch", STUDY, "--once", cwd=folder)
    return Killed(
        once=once,
        elsewhere=elsewhere,
        left=left,
        has_cursor=has_cursor,
        left_text=text,
        killed=CompletedProcess([], piped.returncode, stdout, first + stderr),
        after=after,
    )


def test_once_prints_how_it_stands_and_ends(killed: Killed) -> None:
    assert (killed.once.returncode, killed.once.stderr) == (0, "")
    assert [line.split()[0] for line in killed.once.stdout.splitlines()] == [
        "running",
        "memory",
        "best",
        "budget",
        "left",
    ]
    assert re.search(r"^running  ─{24}  trial 0 z0_\S+, (starting|warmup 0/\d), \w+$", killed.once.stdout, re.MULTILINE)
    assert "\x1b" not in killed.once.stdout


def test_the_running_trial_is_known_from_another_folder_too(killed: Killed) -> None:
    assert re.search(r"trial 0 z0_\S+, (starting|warmup 0/\d), \w+$", killed.elsewhere.stdout, re.MULTILINE)


def test_ctrl_c_ends_the_view_alone(killed: Killed) -> None:
    assert killed.left == 0
    assert killed.has_cursor
    assert "running  " not in killed.left_text
    assert "Traceback" not in killed.left_text
    assert killed.killed.stderr.startswith(f"{STUDY} is tuned by process ")  # still


def test_a_killed_driver_ends_the_view_and_is_told(killed: Killed) -> None:
    assert killed.killed.returncode == 0
    assert killed.killed.stdout == ""
    why = f"{STUDY} is not tuned now: its last run was interrupted or failed; the same bo-tuner tune goes on\n"
    assert killed.killed.stderr.endswith(why)


def test_what_a_killed_driver_shared_is_not_shown(killed: Killed) -> None:
    assert killed.after.returncode == 0
    assert "running" not in killed.after.stdout
    assert [line.split()[0] for line in killed.after.stdout.splitlines()] == ["best", "budget"]


# -- a study that nobody drives ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [[], ["--once"]])
def test_a_study_that_nobody_drives_is_shown_as_it_stands(
    run: Run, tuned: CompletedProcess[str], study_folder: Path, more: list[str]
) -> None:
    before = (study_folder / "bo_tuner_studies" / "studies.db").read_bytes()
    ended = run("watch", "shared", *more, cwd=study_folder)
    assert ended.returncode == 0
    assert ended.stderr == "shared is not tuned now: the budget is used up (3 trials)\n"
    assert len(re.findall(r"^ *\d . +z\d_\S+ +(?:complete|pruned)", ended.stdout, re.MULTILINE)) == 3
    assert re.search(r"^budget   ━{24}  3 of 3 trials$", ended.stdout, re.MULTILINE)
    assert (study_folder / "bo_tuner_studies" / "studies.db").read_bytes() == before


def test_help_names_the_command_and_its_options(run: Run, tmp_path: Path) -> None:
    assert re.search(r"^  watch ", run("--help", cwd=tmp_path).stdout, re.MULTILINE)
    shown = run("watch", "--help", cwd=tmp_path).stdout
    for option in ("--once", "--storage", "--debug"):
        assert re.search(rf"^  {option} ", shown, re.MULTILINE)
