"""Compiled ops: built in private, kept for the next run, never locked."""

from __future__ import annotations

from pathlib import Path

import pytest

from bo_tuner.objectives.training import extensions


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def build(run_dir: Path) -> Path:
    run_dir.mkdir()
    folder = extensions.private_copy(run_dir)
    (folder / "op").mkdir(exist_ok=True)
    (folder / "op" / "op.so").write_bytes(b"compiled")
    return folder


def test_the_first_run_starts_empty_and_private(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    folder = extensions.private_copy(tmp_path / "run")
    assert list(folder.iterdir()) == []
    assert folder.stat().st_mode & 0o777 == 0o700
    assert not extensions.is_cached()


def test_what_one_run_built_the_next_one_finds(tmp_path: Path) -> None:
    extensions.keep(build(tmp_path / "first"))
    assert extensions.is_cached()
    (tmp_path / "second").mkdir()
    folder = extensions.private_copy(tmp_path / "second")
    assert (folder / "op" / "op.so").read_bytes() == b"compiled"


def test_an_op_that_a_trial_built_joins_those_of_other_runs(tmp_path: Path) -> None:
    first, second = (build(tmp_path / name) for name in ("first", "second"))
    extensions.keep(first)
    for folder, name in ((first, "mine"), (second, "yours")):
        (folder / name).mkdir()
        (folder / name / f"{name}.so").touch()
        extensions.keep(folder)
    (tmp_path / "third").mkdir()
    folder = extensions.private_copy(tmp_path / "third")
    assert {path.name for path in folder.iterdir()} == {"op", "mine", "yours"}


def test_an_op_whose_build_was_killed_is_not_kept(tmp_path: Path) -> None:
    folder = build(tmp_path / "run")
    (folder / "op" / "lock").touch()
    extensions.keep(folder)
    assert not extensions.is_cached()


def test_the_users_own_ops_are_used_and_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own"
    for name in ("op", "flash", "half"):
        (own / name).mkdir(parents=True)
        (own / name / f"{name}.so").write_bytes(b"the user's")
    (own / "half" / "lock").touch()
    extensions.keep(build(tmp_path / "first"))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(own))
    (tmp_path / "second").mkdir()
    folder = extensions.private_copy(tmp_path / "second")
    assert {path.name for path in folder.iterdir()} == {"op", "flash"}
    assert (folder / "op" / "op.so").read_bytes() == b"compiled"
    (folder / "flash" / "flash.so").write_bytes(b"built anew")
    assert (own / "flash" / "flash.so").read_bytes() == b"the user's"


def test_what_a_run_builds_afresh_replaces_the_cache_whole_and_only_then(tmp_path: Path) -> None:
    extensions.keep(build(tmp_path / "first"))
    (tmp_path / "second").mkdir()
    second = extensions.private_copy(tmp_path / "second")
    (second / "op" / "op.so").write_bytes(b"compiled by a newer compiler")
    (tmp_path / "third").mkdir()
    assert (extensions.private_copy(tmp_path / "third") / "op" / "op.so").read_bytes() == b"compiled"
    extensions.keep(second)
    (tmp_path / "fourth").mkdir()
    kept = extensions.private_copy(tmp_path / "fourth") / "op" / "op.so"
    assert kept.read_bytes() == b"compiled by a newer compiler"
    assert len(list((tmp_path / "cache" / "bo_tuner" / "extensions").iterdir())) == 1


def test_a_run_that_built_nothing_leaves_the_cache_alone(tmp_path: Path) -> None:
    extensions.keep(build(tmp_path / "first"))
    (cached,) = (tmp_path / "cache" / "bo_tuner" / "extensions").iterdir()
    before = cached.stat().st_ino
    (tmp_path / "second").mkdir()
    extensions.keep(extensions.private_copy(tmp_path / "second"))
    assert cached.stat().st_ino == before


def test_a_folder_without_ops_is_not_kept(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    extensions.keep(extensions.private_copy(tmp_path / "run"))
    assert not extensions.is_cached()


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    extensions.keep(build(tmp_path / "run"))
    assert not extensions.is_cached()


def test_locks_are_removed(tmp_path: Path) -> None:
    folder = build(tmp_path / "run")
    (folder / "op" / "lock").touch()
    extensions.remove_locks(folder)
    assert not (folder / "op" / "lock").exists()
    assert (folder / "op" / "op.so").exists()
