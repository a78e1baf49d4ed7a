"""Locks and shared memory of processes that are gone are told from those in use; nothing is removed."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from bo_tuner.doctor.finding import Status
from bo_tuner.doctor.leftovers import extension_folders, extension_locks, in_use, shared_segments


def a_lock(folder: Path) -> Path:
    (folder / "py311_cpu" / "op").mkdir(parents=True)
    lock = folder / "py311_cpu" / "op" / "lock"
    lock.touch()
    return lock


def test_a_lock_that_nobody_holds_is_told_with_a_command_that_removes_it(tmp_path: Path) -> None:
    lock = a_lock(tmp_path / "with space")
    found = extension_locks([tmp_path])
    assert found.status is Status.WARN
    assert found.details["locks"] == [str(lock)]
    assert lock.exists()
    subprocess.run(shlex.split(found.mend), check=True)
    assert extension_locks([tmp_path]).status is Status.OK


def test_the_lock_of_a_build_that_runs_is_left_alone(tmp_path: Path) -> None:
    lock = a_lock(tmp_path)
    with lock.open():  # as torch holds it
        assert extension_locks([tmp_path]).status is Status.OK
    assert extension_locks([tmp_path]).status is Status.WARN


def test_folders_without_locks_or_none_at_all_are_fine(tmp_path: Path) -> None:
    (tmp_path / "op").mkdir()
    (tmp_path / "op" / "op.so").touch()
    assert extension_locks([tmp_path, tmp_path / "not there"]).status is Status.OK


def test_the_folders_are_those_that_torch_and_we_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from torch.utils.cpp_extension import get_default_build_root

    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert extension_folders() == [Path(get_default_build_root()), tmp_path / "bo_tuner" / "extensions"]
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/elsewhere")
    assert extension_folders()[0] == Path("/elsewhere")


def a_segment(folder: Path, *, uid: int | None = None) -> Path:
    segment = folder / f"deepspeed_allreduce_buffer_{os.getuid() if uid is None else uid}_127.0.0.1_29500_0"
    segment.write_bytes(b"x" * 4096)
    return segment


def test_shared_memory_that_no_process_uses_is_told_with_its_size_and_a_command(tmp_path: Path) -> None:
    segment = a_segment(tmp_path)
    found = shared_segments(folder=tmp_path)
    assert found.status is Status.WARN
    assert (found.details["segments"], found.details["used_bytes"]) == ([str(segment)], 4096)
    assert found.mend == f"rm {segment}"
    assert segment.exists()


def test_shared_memory_that_is_mapped_is_in_use_after_its_file_was_closed(tmp_path: Path) -> None:
    import torch

    segment = a_segment(tmp_path)
    mapped = torch.from_file(str(segment), shared=True, size=4096, dtype=torch.uint8)  # keeps the mapping alone
    assert shared_segments(folder=tmp_path).status is Status.OK
    del mapped
    assert shared_segments(folder=tmp_path).status is Status.WARN


def test_shared_memory_of_others_is_not_ours_to_judge(tmp_path: Path) -> None:
    a_segment(tmp_path, uid=os.getuid() + 1)
    (tmp_path / "something_else").touch()
    assert shared_segments(folder=tmp_path).status is Status.OK


def test_segments_of_nccl_are_told_too_where_they_are_ours_and_nobody_has_them_open(tmp_path: Path) -> None:
    segment = tmp_path / "nccl-XvU3aB"
    segment.write_bytes(b"x" * 2**20)
    with segment.open():
        assert shared_segments(folder=tmp_path).status is Status.OK
    found = shared_segments(folder=tmp_path)
    assert (found.status, found.found) == (Status.WARN, "1 segment of NCCL, 1 MiB, that no process uses")
    assert found.mend == f"rm {segment}"
    a_segment(tmp_path)
    assert shared_segments(folder=tmp_path).found.startswith("2 segments of DeepSpeed and NCCL, ")
    assert shared_segments(folder=tmp_path, uid=os.getuid() + 1).status is Status.OK


def test_files_that_another_process_has_open_are_in_use(tmp_path: Path) -> None:
    (tmp_path / "held").touch()
    (tmp_path / "free").touch()
    with (
        (tmp_path / "held").open() as file,
        subprocess.Popen(["sleep", "60"], stdin=file) as process,
    ):
        file.close()
        assert in_use([tmp_path / "held", tmp_path / "free"]) == {tmp_path / "held"}
        process.kill()
