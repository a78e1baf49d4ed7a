"""Trials on GPUs, through the real pynvml and a stand-in driver: the guard, free devices, clocks, power, a driver that goes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
MIB = 2**20


@pytest.fixture(scope="module")
def told(driver_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What came of each scenario of tests/targets/on_gpus.py."""
    targets = ROOT / "tests" / "targets"
    environment = {
        **{name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"},
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, targets))),
        "LD_LIBRARY_PATH": str(driver_folder),
        "NVML_SCRIPT": str(tmp_path_factory.mktemp("script") / "script"),
    }
    ended = subprocess.run(
        [sys.executable, targets / "on_gpus.py"], env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    scenarios: dict[str, Any] = json.loads(ended.stdout)
    return scenarios


def test_a_device_over_the_limit_ends_the_trial_as_guarded_and_is_named(told: dict[str, Any]) -> None:
    result = told["crosses the limit"]
    assert result["outcome"] == "guarded"
    assert result["reason"].endswith(" GiB of GPU 1, over the limit of 12.00 GiB")
    assert result["reason"].startswith("rank 0 used 1"), "CUDA_VISIBLE_DEVICES puts GPU 1 first"
    assert result["peak_memory_bytes"] > result["limit_bytes"]


def test_a_driver_that_goes_while_a_trial_runs_fails_it_with_the_reason(told: dict[str, Any]) -> None:
    result = told["gone mid-trial"]
    assert result["outcome"] == "failed"
    assert result["reason"] == "the GPU driver stopped answering while the trial ran (GPU 1: GPU is lost)"


def test_memory_is_kept_as_allocator_process_and_device_see_it(told: dict[str, Any]) -> None:
    result = told["quiet"]
    assert (result["outcome"], result["reason"]) == ("complete", "")
    measured = result["measurement"]
    assert measured["peak_memory_bytes"] == [MIB, MIB]
    assert measured["process_peak_bytes"] == [700 * MIB, 800 * MIB]
    assert measured["device_peak_bytes"] == [1000 * MIB, 300 * MIB]
    assert result["peak_memory_bytes"] == 1000 * MIB


def test_power_and_energy_are_those_of_all_devices_over_the_measured_steps(told: dict[str, Any]) -> None:
    result = told["quiet"]
    assert result["measurement"]["power_w"] == pytest.approx(200 + 70, rel=0.01)
    n_steps = len(result["measurement"]["step_times_s"][0])
    assert result["measurement"]["energy_j"] == pytest.approx(270 * 0.05 * n_steps, rel=0.05)


def test_throttled_clocks_are_named_and_the_power_cap_is_not_one_of_them(told: dict[str, Any]) -> None:
    hot = told["hot"]
    assert hot["outcome"] == "complete"
    assert hot["measurement"]["throttling"] == ["software thermal slowdown", "hardware thermal slowdown"]
    assert hot["reason"] == "clocks were held down: software thermal slowdown, hardware thermal slowdown"
    at_cap = told["at the power cap"]
    assert (at_cap["measurement"]["throttling"], at_cap["reason"]) == ([], "")


def test_what_a_driver_does_not_tell_is_said_once_and_harms_no_trial(told: dict[str, Any]) -> None:
    result = told["tells nothing"]
    assert (result["outcome"], result["reason"]) == ("complete", "")
    for name in ("process_peak_bytes", "device_peak_bytes", "power_w", "energy_j"):
        assert result["measurement"][name] is None, name
    assert len(told["warnings"]) == 1
    for gap in ("memory in use", "processes", "why clocks are low", "power"):
        assert gap in told["warnings"][0]


def test_devices_are_read_in_the_order_of_cuda_visible_devices(told: dict[str, Any]) -> None:
    assert told["free"] == {"indices": [0, 1], "held": [300 * MIB, 300 * MIB]}
    assert told["visible order"]["indices"] == [1, 0]


@pytest.mark.parametrize("scenario", ["stranger", "stranger later"])
def test_somebody_else_on_a_gpu_is_named_and_ends_the_study(told: dict[str, Any], scenario: str) -> None:
    refusal = told[scenario]
    assert (refusal["error"], refusal["index"]) == ("DeviceBusyError", 1)
    assert refusal["pids"] == [os.getpid()]
    assert f"process {os.getpid()} (" in refusal["text"]
    assert "--allow-shared-gpu" in refusal["text"]


def test_somebody_else_is_let_in_when_that_is_allowed_and_counts_as_there_before(told: dict[str, Any]) -> None:
    assert told["stranger is let in"]["held"] == [300 * MIB, 3300 * MIB]


@pytest.mark.parametrize("scenario", ["we ourselves", "a desktop"])
def test_this_process_and_those_that_only_draw_are_no_strangers(told: dict[str, Any], scenario: str) -> None:
    assert told[scenario]["held"] == [3300 * MIB, 300 * MIB]


def test_of_those_whom_a_container_hides_the_bytes_are_told(told: dict[str, Any]) -> None:
    refusal = told["hidden"]
    assert (refusal["error"], refusal["index"], refusal["pids"]) == ("DeviceBusyError", 1, [])
    assert "processes that cannot be seen from here hold 4.00 GiB" in refusal["text"]


def test_without_room_under_the_limit_no_trial_is_blamed(told: dict[str, Any]) -> None:
    assert told["no room"]["error"] == "DeviceBusyError"
    assert "GPU 1 holds 12.70 GiB before a trial begins, and the limit is 12.00 GiB" in told["no room"]["text"]


def test_memory_that_does_not_come_back_is_told_with_who_holds_it(told: dict[str, Any]) -> None:
    refusal = told["not back"]
    assert (refusal["error"], refusal["index"], refusal["used_bytes"]) == ("DeviceBusyError", 0, 3072 * MIB)
    assert "must be back at the 300 MiB it held before the first trial, and holds 3.00 GiB after 1 s" in refusal["text"]
    assert "(this one) holds 2.00 GiB, process 999999 (not seen from here) holds 512 MiB" in refusal["text"]


def test_memory_that_comes_back_is_waited_for(told: dict[str, Any]) -> None:
    assert told["back in time"] == {"held": [300 * MIB, 300 * MIB]}


@pytest.mark.parametrize(
    ("scenario", "why"), [("driver gone", "GPU is lost"), ("fewer devices", "it shows 1 of 2 GPUs")]
)
def test_no_trial_begins_without_its_driver_and_all_its_devices(told: dict[str, Any], scenario: str, why: str) -> None:
    assert told[scenario]["error"] == "DriverError"
    assert f"must answer before a trial begins, and does not ({why})" in told[scenario]["text"]
