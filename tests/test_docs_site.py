"""The manual as a site: it builds without a warning, loads nothing from elsewhere, and says what the code says."""

from __future__ import annotations

import ast
import html
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from bo_tuner.cli.main import app
from bo_tuner.outcome import Outcome

ROOT = Path(__file__).parent.parent
TROUBLE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
GROUP: Any = typer.main.get_command(app)
COMMANDS: dict[str, Any] = GROUP.commands


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [Path(sys.executable).with_name("mkdocs"), "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    return folder


def test_it_builds_with_every_page_in_the_navigation(site: Path) -> None:
    built = {page.stem for page in site.glob("*.html")} - {"404"}
    assert built == {page.stem for page in (ROOT / "docs").glob("*.md")}  # strict: one outside the navigation fails


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for page in site.glob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert re.findall(r'(?:src|<link[^>]*href)="(?:https?:)?//', text) == []
    for style in site.rglob("*.css"):
        assert re.findall(r"(?:url\(|@import )['\"]?(?:https?:)?//", style.read_text(encoding="utf-8")) == []


def test_nothing_but_the_manual_is_published(site: Path) -> None:
    assert not list(site.rglob("*.py"))


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_the_reference_has_every_option_of_the_help(site: Path, name: str) -> None:
    told = subprocess.run(
        [sys.executable, "-m", "bo_tuner", name, "--help"],
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=True,
    )
    page = html.unescape((site / "cli.html").read_text(encoding="utf-8"))
    section = re.search(rf'<h2 id="{name}">.*?(?=<h2 |</article>)', page, re.DOTALL)
    assert section, f"no section for {name}"
    offered = set(re.findall(r"^  (--[\w-]+)", told.stdout, re.MULTILINE)) - {"--help"}
    assert offered == set(re.findall(r"<code>(--[\w-]+)</code>", section[0]))


def test_every_outcome_is_explained() -> None:
    for outcome in Outcome:
        assert f"\n### {outcome.value}\n" in TROUBLE


def quoted() -> list[str]:
    """Error texts of the page: headings in code, and what stands in quotes and code."""
    return sorted({*re.findall(r"^### `(.+)`$", TROUBLE, re.MULTILINE), *re.findall(r'(?<=[\s(])"`([^`]+)`"', TROUBLE)})


def texts_of(file: Path) -> Iterator[str]:
    """Every text in a source file, with an ellipsis for each value that is put into it."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)  # type: ignore[misc]  # str
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


SOURCES = [
    text
    for top in ("bo_tuner", "objectives", "storage")
    for file in (ROOT / top).rglob("*.py")
    for text in texts_of(file)
]


@pytest.mark.parametrize("text", quoted())
def test_a_quoted_error_occurs_in_the_code(text: str) -> None:
    parts = [part.strip(" :;,") for part in " ".join(text.split()).split("…")]
    literal = [part for part in parts if part]
    assert sum(map(len, literal)) >= 4, "too little of the text is left to look for"
    pattern = re.compile(".*".join(map(re.escape, literal)), re.DOTALL)
    assert any(pattern.search(source) for source in SOURCES)
