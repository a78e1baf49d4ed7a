"""GPUs and their driver: asked through pynvml of a compiled stand-in, and judged."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bo_tuner.doctor.finding import Status
from bo_tuner.doctor.gpus import Driver, Gpu, gpu_findings, sick_driver, torch_build

ROOT = Path(__file__).parents[2]
IDLE = Gpu(index=0, name="Tesla V100-SXM2-16GB", memory_bytes=2**34, used_bytes=300 * 2**20, pids=(), is_visible=True)
BUSY = replace(IDLE, index=1, used_bytes=12 * 2**30, pids=(4242,))
DRIVER = Driver(version="550.54.15", cuda=(12, 4), gpus=(IDLE, BUSY), visible=(0, 1))


def read(folder: Path | None, **variables: str) -> str:
    """What `read_driver` says in a process that finds libraries in `folder`."""
    program = "from bo_tuner.doctor.gpus import *\nprint(read_driver())"
    search = {"LD_LIBRARY_PATH": str(folder)} if folder else {}
    told = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT), **search, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    return (told.stdout or told.stderr).strip().splitlines()[-1]


def test_the_driver_is_read_as_it_is(driver_folder: Path) -> None:
    assert read(driver_folder) == str(DRIVER)


def test_what_cuda_visible_devices_hides_is_known(driver_folder: Path) -> None:
    hidden = replace(DRIVER, gpus=(replace(IDLE, is_visible=False), BUSY), visible=(1,))
    assert read(driver_folder, CUDA_VISIBLE_DEVICES="GPU-b1") == str(hidden)


def test_a_driver_that_does_not_answer_is_an_error_in_one_line(driver_folder: Path) -> None:
    told = read(driver_folder, NVML_SICK="18")
    assert told.endswith("the driver does not answer (RM has detected an NVML/RM version mismatch.)")


def test_a_lost_gpu_is_told_with_the_others_and_left_out_of_a_variable_that_names_them(
    driver_folder: Path, tmp_path: Path
) -> None:
    script = tmp_path / "script"
    script.write_text("lost 0 15\n", encoding="utf-8")
    lost = Gpu(index=0, is_visible=True, silent_because="GPU 0: GPU is lost")
    idle = replace(IDLE, index=1)
    both = replace(DRIVER, gpus=(lost, idle), visible=())
    assert read(driver_folder, NVML_SCRIPT=str(script)) == str(both)
    hidden = replace(DRIVER, gpus=(replace(lost, is_visible=False), idle), visible=(1,))
    assert read(driver_folder, NVML_SCRIPT=str(script), CUDA_VISIBLE_DEVICES="1") == str(hidden)
    _, found, other = gpu_findings(both, must_be_there=False)
    assert (found.status, found.found) == (Status.WARN, "GPU 0: GPU is lost")
    assert "CUDA_VISIBLE_DEVICES" in found.mend
    assert other.status is Status.OK


def test_without_the_library_there_is_no_driver(tmp_path: Path) -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a driver")
    assert read(tmp_path) == "None"


def test_idle_gpus_are_fine_and_busy_ones_are_told_with_who_uses_them() -> None:
    driver, idle, busy = gpu_findings(DRIVER, must_be_there=False)
    assert (driver.status, driver.found) == (Status.OK, "550.54.15, runs CUDA up to 12.4")
    assert (idle.status, idle.found) == (Status.OK, "Tesla V100-SXM2-16GB, 16.00 GiB")
    assert busy.status is Status.WARN
    assert busy.found.endswith("12.00 GiB of it used by process 4242")
    assert "CUDA_VISIBLE_DEVICES" in busy.mend


def test_a_busy_gpu_that_is_hidden_disturbs_nobody() -> None:
    *_, busy = gpu_findings(replace(DRIVER, gpus=(replace(BUSY, is_visible=False),)), must_be_there=False)
    assert (busy.status, "hidden" in busy.found) == (Status.OK, True)


def test_users_of_a_gpu_that_a_container_hides_are_said_to_be_unseen() -> None:
    *_, busy = gpu_findings(replace(DRIVER, gpus=(replace(BUSY, pids=()),)), must_be_there=False)
    assert "cannot be seen" in busy.found


@pytest.mark.parametrize("driver", [None, replace(DRIVER, gpus=())])
def test_no_gpu_is_a_problem_only_where_one_must_be_there(driver: Driver | None) -> None:
    assert [finding.status for finding in gpu_findings(driver, must_be_there=False)] == [Status.OK]
    (finding,) = gpu_findings(driver, must_be_there=True)
    assert finding.status is Status.FAIL
    assert "--device cpu" in finding.mend


def test_a_sick_driver_ends_what_is_not_meant_for_the_cpu() -> None:
    assert sick_driver("does not answer", wants_gpu=False).status is Status.WARN
    assert sick_driver("does not answer", wants_gpu=True).status is Status.FAIL


@pytest.mark.parametrize(
    ("driver", "cuda", "wants_gpu", "status"),
    [
        (None, None, True, Status.OK),
        (None, "13.0", True, Status.OK),
        (DRIVER, "12.4", True, Status.OK),
        (DRIVER, "12.9", True, Status.OK),  # within a major version
        (DRIVER, "11.8", True, Status.OK),
        (DRIVER, "13.0", True, Status.FAIL),
        (DRIVER, None, True, Status.FAIL),
        (DRIVER, None, False, Status.OK),
    ],
)
def test_torch_must_be_built_for_a_cuda_that_the_driver_runs(
    driver: Driver | None, cuda: str | None, wants_gpu: bool, status: Status
) -> None:
    found = torch_build(driver, version="2.13.0", cuda=cuda, wants_gpu=wants_gpu)
    assert found.status is status, found.found
    assert (found.mend != "") == (status is Status.FAIL)
    assert status is Status.OK or "CUDA 12.4 or older" in found.mend
