"""`tune` in a real terminal: the live view while it runs, and what it leaves there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.cli.conftest import Terminal

HIDE_CURSOR = b"\x1b[?25l"


@dataclass
class Ended:
    """A `tune` that came to its end in a terminal."""

    arguments: list[str]
    code: int
    screens: list[str]
    text: str
    raw: bytes
    has_cursor: bool


def ended(terminal: Terminal, arguments: list[str]) -> Ended:
    code = terminal.wait()
    return Ended(arguments, code, terminal.screens, terminal.text, terminal.raw, terminal.has_cursor)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("terminal")


@pytest.fixture(scope="module")
def arguments(small: list[str]) -> list[str]:
    return ["tune", "bert-tiny", *small, "--budget", "3 trials, 1h", "--study", "seen"]


@pytest.fixture(scope="module")
def interrupted(terminal: Callable[..., AbstractContextManager[Terminal]], arguments: list[str], folder: Path) -> Ended:
    """Ctrl-C, pressed during the second trial."""
    with terminal(*arguments, cwd=folder) as opened:
        opened.wait_for("  trial 1 z")
        opened.wait_for("left     2 trials")  # the frame is drawn to its end
        opened.type(b"\x03")
        return ended(opened, arguments)


@pytest.fixture(scope="module")
def finished(
    terminal: Callable[..., AbstractContextManager[Terminal]],
    interrupted: Ended,
    arguments: list[str],
    folder: Path,
) -> Ended:
    """The same command again, to its end."""
    with terminal(*arguments, cwd=folder) as opened:
        return ended(opened, arguments)


def rows(text: str) -> list[str]:
    """Numbers of the trials in the tables of a screen, with the mark of the best."""
    return [
        " ".join(match) for match in re.findall(r"^ *(\d+) (\*| )  z\d_\S+ +(?:complete|pruned)", text, re.MULTILINE)
    ]


def has_screen(screens: list[str], *lines: str) -> bool:
    """One screen had all of these lines."""
    return any(all(re.search(line, screen, re.MULTILINE) for line in lines) for screen in screens)


def test_while_it_runs_the_terminal_shows_trial_step_memory_best_and_budget(interrupted: Ended) -> None:
    assert has_screen(
        interrupted.screens,
        r"^running  ━+─+  trial 0 z0_gas1_mbs1, (warmup|measure) \d+/\d+, \d+s$",
        r"^memory   [━─]{16}  \d+ MiB of [\d.]+ GiB, \d+%$",
        r"^best     nothing has completed yet$",
        r"^budget   [━─]{16}  0 of 3 trials, \w+ of 1h00m$",
        r"^left     3 trials, 5\dm\d\ds, \w+ spent$",
    ), interrupted.screens[-2]
    assert has_screen(
        interrupted.screens,
        r"^  0 \*  z0_gas1_mbs1 +complete +[\d.]+ +\d+ MiB( .*)?$",  # a stalled step is told behind it
        r"^running  [━─]{16}  trial 1 z\d_\w+, ",
        r"^best     trial 0 z0_gas1_mbs1, [\d.]+/s \+-[\d.]+ %, \d+ MiB$",
        r"^left     2 trials, 5\dm\d\ds \(about \w+\), \w+ spent$",
    ), interrupted.screens[-2]


def test_ctrl_c_leaves_the_finished_trial_the_cursor_and_the_command_that_goes_on(interrupted: Ended) -> None:
    assert interrupted.code == 130
    assert HIDE_CURSOR in interrupted.raw
    assert interrupted.has_cursor
    assert rows(interrupted.text) == ["0 *"]
    assert "running" not in interrupted.text
    after = interrupted.text.partition("To go on:\n")[2]
    assert shlex.split(after.replace("\n", "")) == ["bo-tuner", *interrupted.arguments]  # it is longer than a line


def test_a_finished_run_leaves_its_trials_the_cursor_and_the_table(finished: Ended) -> None:
    assert finished.code == 0
    assert HIDE_CURSOR in finished.raw
    assert finished.has_cursor
    assert "running" not in finished.text
    live, _, table = finished.text.partition("\nseen\n")
    left = [row.split()[0] for row in rows(live)]
    # The first, of the earlier run, only where it is the best; and what was ended early may run again at the end.
    assert [number for number in left if number in ("1", "2")] == ["1", "2"] and len(left) == len(set(left))
    assert sum("*" in row for row in rows(live)) == 1
    assert re.search(r"^budget   ━{16}  [3-5] of 3 trials, .* of 1h00m$", live, re.MULTILINE)
    assert "best: z" in table
    assert finished.text.splitlines()[-1] == "stopped: the budget is used up"
