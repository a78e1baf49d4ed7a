"""The real command in a folder of its own, and one finished study that the tests of this folder read."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest


@pytest.fixture(scope="session")
def program() -> str:
    """The installed command."""
    return str(Path(sys.executable).with_name("bo-tuner"))


@pytest.fixture(scope="session")
def run(program: str) -> Callable[..., CompletedProcess[str]]:
    """`run(*arguments, cwd=...)` runs the command to its end."""

    def run(*arguments: str, cwd: Path, timeout_s: float = 120.0) -> CompletedProcess[str]:
        return subprocess.run(
            [program, *arguments],
            cwd=cwd,
            env={**os.environ, "COLUMNS": "100"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    return run


@pytest.fixture(scope="session")
def small() -> list[str]:
    """Options that make a trial of bert-tiny take about a second."""
    return ["--device", "cpu", "--ranks", "2", "--seq-len", "16", "--max-global-batch", "8"]


@pytest.fixture(scope="session")
def tune_command(small: list[str]) -> list[str]:
    """The arguments that made the shared study."""
    return ["tune", "bert-tiny", *small, "--budget", "3 trials", "--study", "shared"]


@pytest.fixture(scope="session")
def study_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Working folder of the shared study; tests only read it, and copy it to change it."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="session")
def tuned(
    run: Callable[..., CompletedProcess[str]], tune_command: list[str], study_folder: Path
) -> CompletedProcess[str]:
    """The run that made the study `shared` in `study_folder`, and the folder `job` beside it."""
    ended = run(*tune_command, "--json", "--out", "job", cwd=study_folder)
    assert ended.returncode == 0, ended.stderr
    return ended
