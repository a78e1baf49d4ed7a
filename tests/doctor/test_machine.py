"""Cores, memory, open files, shared memory and disk."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from bo_tuner.doctor.finding import Status
from bo_tuner.doctor.machine import cores, disk, memory, open_files, shared_memory

N_CORES = len(os.sched_getaffinity(0))
ENOUGH_RANKS = 10**6
"""No machine has memory for so many."""


def test_cores_without_a_quota_are_fine(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("max 100000\n")
    found = cores(2, cpu_max=tmp_path / "cpu.max")
    assert (found.status, found.details["n_cores"]) == (Status.OK, N_CORES)
    assert cores(2, cpu_max=tmp_path / "no such file").status is Status.OK


def test_a_quota_below_the_cores_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    found = cores(2, cpu_max=tmp_path / "cpu.max")
    assert found.status is Status.WARN
    assert found.details["quota_cores"] == 0.5
    assert "0.5 cores' worth of time" in found.found
    assert "--cpuset-cpus=0-1" in found.mend


def test_memory_for_the_ranks_is_counted() -> None:
    found = memory(1)
    assert 0 < found.details["free_bytes"] <= found.details["usable_bytes"]
    short = memory(ENOUGH_RANKS)
    assert short.status is Status.WARN
    assert "fewer --ranks" in short.mend


@pytest.fixture
def few_open_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("few_open_files")
def test_a_low_limit_of_open_files_is_a_warning_with_the_command() -> None:
    found = open_files()
    assert (found.status, found.details["limit"]) == (Status.WARN, 256)
    assert found.mend.startswith("ulimit -n 1024")


def test_the_usual_limit_of_open_files_will_do() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        assert open_files().status is Status.OK
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_shared_memory_is_held_against_66_mib_a_rank(tmp_path: Path) -> None:
    found = shared_memory(2, "cpu", folder=tmp_path)
    assert (found.status, found.details["needed_bytes"]) == (Status.OK, 2 * 66 * 2**20)


def test_too_little_shared_memory_stops_a_cpu_and_warns_on_gpus(tmp_path: Path) -> None:
    short = shared_memory(ENOUGH_RANKS, "cpu", folder=tmp_path)
    assert short.status is Status.FAIL
    size_gib = -(-2 * ENOUGH_RANKS * 66 * 2**20 // 2**30)
    assert f"remount,size={size_gib}G {tmp_path}" in short.mend
    assert f"--shm-size={size_gib}g" in short.mend
    assert shared_memory(ENOUGH_RANKS, "cuda", folder=tmp_path).status is Status.WARN


def test_no_shared_memory_at_all_is_a_problem(tmp_path: Path) -> None:
    assert shared_memory(2, "cpu", folder=tmp_path / "gone").status is Status.FAIL


def test_the_disk_of_a_folder_that_is_not_there_yet_is_that_of_its_parent(tmp_path: Path) -> None:
    found = disk("studies", tmp_path / "a" / "b", way_out="tune elsewhere")
    assert found.name == "disk: studies"
    assert found.details["path"] == str(tmp_path)
    assert not (tmp_path / "a").exists()


def test_a_file_in_place_of_the_folder_is_a_problem_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = disk("studies", tmp_path / "file", way_out="tune elsewhere")
    assert found.status is Status.FAIL
    assert found.mend.endswith("or tune elsewhere")


@pytest.mark.skipif(not Path("/sys/kernel").exists(), reason="needs a file system that has no room")
def test_a_disk_without_room_is_a_problem() -> None:
    found = disk("studies", Path("/sys/kernel"), way_out="tune elsewhere")  # sysfs: 0 bytes, and root may "write" it
    assert found.status is Status.FAIL
