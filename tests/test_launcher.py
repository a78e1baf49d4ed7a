from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bo_tuner.doctor import Status
from bo_tuner.doctor.launcher import started_by
from bo_tuner.errors import ConfigError
from bo_tuner.launcher import launched, refuse_launchers

SALLOC = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NPROCS": "4"}


@pytest.mark.parametrize(
    ("variables", "by", "rank"),
    [
        ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}, "torchrun or deepspeed", 1),
        ({**SALLOC, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"}, "srun", 3),
        ({**SALLOC, "SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}, "srun", 0),  # before Slurm told the tasks of a step
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}, "mpirun", 2),
        ({"PMI_RANK": "0", "PMI_SIZE": "4"}, "mpirun", 0),
    ],
)
def test_one_of_several_processes_is_refused_with_the_way_to_do_it(
    variables: dict[str, str], by: str, rank: int
) -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_launchers(variables)
    text = str(caught.value)
    assert f"this is process {rank + 1} of 4 that {by} started: " in text
    assert "once" in text and "--ranks N" in text


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"WORLD_SIZE": "1"},
        {"WORLD_SIZE": "8"},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"RANK": "0", "WORLD_SIZE": ""},
        SALLOC,
        {**SALLOC, "SLURM_PROCID": "0"},  # a batch script
        {**SALLOC, "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967291"},  # the same, of a Slurm that counts it as a step
        {**SALLOC, "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290"},  # a shell that salloc opens on a node
        {**SALLOC, "SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
    ],
)
def test_a_process_that_is_alone_is_not_refused_whatever_its_job_asked_for(variables: dict[str, str]) -> None:
    assert launched(variables) is None
    refuse_launchers(variables)


def test_the_command_refuses_in_one_line_and_writes_nothing(tmp_path: Path) -> None:
    ended = subprocess.run(
        [Path(sys.executable).with_name("bo-tuner"), "tune", "bert-tiny", "--device", "cpu"],
        cwd=tmp_path,
        env={**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("error: a study must be started by one process")
    assert ended.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_doctor_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "SLURM_STEP_ID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert started_by().status is Status.OK
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert (started_by().status, started_by().found) == (Status.FAIL, "torchrun or deepspeed, as 2 of 2")
