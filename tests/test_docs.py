"""Every command line of README.md and the manual is run as it stands, page by page, in a folder of its own.

A block that cannot be run here has a comment before it that says why: `<!-- not run: REASON -->`. A command that serves until it is
stopped has `<!-- until Ctrl-C: TEXT -->`, with the text that it prints once it serves.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

from bo_tuner.cli.main import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MOST_NOT_RUN = 6
BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]*) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
SPAN = re.compile(r"`(bo-tuner [^`\n]+)`")
NAMED = re.compile(r"# (\S+\.py)\n")
LONGEST_S = 600.0
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]  # it is a group


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block of a page."""

    page: str
    language: str
    text: str
    kind: str
    """`not run`, `until Ctrl-C`, or nothing."""
    word: str
    """What the mark says after its colon."""

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"


def blocks(page: Path) -> list[Block]:
    found: list[Block] = []
    for match in BLOCK.finditer(page.read_text(encoding="utf-8")):
        kind, _, word = (match["mark"] or "").partition(": ")
        found.append(Block(page.name, match["language"], match["text"], kind, word))
    return found


ALL = [block for page in PAGES for block in blocks(page)]


def environment() -> dict[str, str]:
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "120"}


def run(script: str, folder: Path) -> None:
    ended = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        check=False,
    )
    assert ended.returncode == 0, f"{script}\n{ended.stdout[-2000:]}\n{ended.stderr[-3000:]}"


def run_until_ctrl_c(script: str, folder: Path, shown: str) -> None:
    output = folder / "output"
    with (
        output.open("w") as file,
        subprocess.Popen(
            ["bash", "-c", f"exec {script}"], cwd=folder, env=environment(), stdout=file, stderr=file
        ) as it,
    ):
        deadline = time.monotonic() + LONGEST_S
        while shown not in output.read_text() and it.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        it.send_signal(signal.SIGINT)
    assert shown in output.read_text(), output.read_text()
    assert it.returncode in (0, 130)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_of_the_page_runs(page: Path, tmp_path: Path) -> None:
    for block in blocks(page):
        named = NAMED.match(block.text)
        if block.kind == "not run" or block.language not in ("bash", "python"):
            continue
        if block.kind == "until Ctrl-C":
            run_until_ctrl_c(block.text.strip(), tmp_path, block.word)
        elif block.language == "bash":
            run(block.text, tmp_path)
        elif named:
            (tmp_path / named[1]).write_text(block.text, encoding="utf-8")
        else:
            (tmp_path / "unnamed.py").write_text(block.text, encoding="utf-8")
            run("python unnamed.py", tmp_path)


def test_blocks_that_are_not_run_are_few_and_say_why() -> None:
    not_run = [block for block in ALL if block.kind == "not run"]
    assert 0 < len(not_run) <= MOST_NOT_RUN, "\n".join(map(str, not_run))
    assert all(len(block.word.split()) >= 2 for block in not_run)
    assert {block.kind for block in ALL} <= {"", "not run", "until Ctrl-C"}


def test_commands_stand_in_blocks_that_are_run() -> None:
    assert {block.language for block in ALL} <= {"bash", "python", "text"}
    for page in PAGES:
        assert page.read_text(encoding="utf-8").count("```") == 2 * len(blocks(page)), (
            f"{page.name}: a fence is not read"
        )
    shown = [line for block in ALL if block.language == "text" for line in block.text.splitlines()]
    assert not [line for line in shown if re.match(r"[$#] |(bo-tuner|make|python3?|pip) ", line)]


def test_every_named_file_is_used_on_its_page() -> None:
    for page in PAGES:
        here = blocks(page)
        for block in here:
            named = NAMED.match(block.text) if block.language == "python" else None
            if named:
                stem = named[1].removesuffix(".py")
                users = [other for other in here if other is not block and re.search(rf"\b{stem}\b", other.text)]
                assert users, f"{page.name}: nothing uses {named[1]}"


def mentioned() -> list[str]:
    """Commands of ours that the pages speak of, or show and do not run."""
    spans = [span for page in PAGES for span in SPAN.findall(BLOCK.sub("", page.read_text(encoding="utf-8")))]
    lines = [line for block in ALL if block.kind == "not run" for line in block.text.splitlines()]
    return sorted({*spans, *(line for line in lines if line.startswith("bo-tuner "))})


@pytest.mark.parametrize("line", mentioned())
def test_a_command_that_is_mentioned_exists_with_its_options(line: str) -> None:
    name, *words = shlex.split(line)[1:]
    if name == "--version":
        return
    assert name in COMMANDS
    options = {spelling for param in COMMANDS[name].params for spelling in param.opts} | {"--help"}
    assert {word.partition("=")[0] for word in words if word.startswith("--")} <= options


def test_every_target_of_make_that_is_shown_exists() -> None:
    shown = {line.split()[1] for block in ALL for line in block.text.splitlines() if line.startswith("make ")}
    shown |= {span for page in PAGES for span in re.findall(r"`make ([\w-]+)`", page.read_text(encoding="utf-8"))}
    assert {"quickstart", "test", "docs"} <= shown
    for target in shown:
        subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, check=True)


def test_every_extra_that_is_shown_is_declared() -> None:
    import tomllib

    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    shown = {
        extra for page in PAGES for extra in re.findall(r"(?:bo_tuner|\.)\[(\w+)\]", page.read_text(encoding="utf-8"))
    }
    assert shown == {"postgresql"} <= declared.keys()
