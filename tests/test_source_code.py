"""Fingerprints of source: what changes them, and how a change is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from bo_tuner.source_code import changes, fingerprint

CODE = '''
def forward(x):
    """Twice."""
    return 2 * x
'''


@pytest.mark.parametrize(
    "same",
    [
        CODE.replace("return", "# said of it\n    return"),
        CODE.replace("Twice.", "Two times."),
        CODE.replace("2 * x", "(2*x)"),
        CODE + "\nif __name__ == '__main__':\n    print(forward(1))\n",
    ],
)
def test_what_changes_nothing_is_no_change(same: str) -> None:
    assert not changes({"a": fingerprint(CODE)}, {"a": fingerprint(same)})


def test_a_python_that_writes_trees_otherwise_knows_the_same_text() -> None:
    text, _, _ = fingerprint(CODE).partition(":")
    assert not changes({"a": fingerprint(CODE)}, {"a": f"{text}:other"})


def test_changes_are_told_by_file_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = {str(tmp_path / "a.py"): fingerprint(CODE), "/far/b.py": fingerprint(CODE)}
    after = {str(tmp_path / "a.py"): fingerprint(CODE.replace("2 *", "3 *")), "main.Net": fingerprint(CODE)}
    assert changes(before, after) == ["a.py changed", "main.Net is new", "/far/b.py is not used any more"]
    assert not changes({}, after), "a study of old kept no code"
