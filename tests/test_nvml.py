"""The driver, asked through pynvml of a compiled stand-in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bo_tuner.nvml import visible_indices

UUIDS = ["GPU-a0aa", "GPU-b1bb", "GPU-b2cc"]


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        ("0,1,2", [0, 1, 2]),
        ("2,0", [2, 0]),
        (" 1 , 2 ", [1, 2]),
        ("", []),
        (" ", []),
        ("GPU-a0aa", [0]),
        ("GPU-a", [0]),
        ("GPU-b2,GPU-b1", [2, 1]),
        ("GPU-b1,0", [1, 0]),
    ],
)
def test_visible_devices_are_taken_by_index_or_start_of_uuid_in_the_order_given(
    visible: str, indices: list[int]
) -> None:
    assert visible_indices(visible, UUIDS) == indices


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        ("0,-1,1", [0]),
        ("-1,0", []),
        ("0,3,1", [0]),
        ("1,,2", [1]),
        ("1,GPU-z,2", [1]),
        ("2,GPU-b,0", [2]),  # two devices start so
        ("0,cuda,1", [0]),
    ],
)
def test_visible_devices_end_at_the_first_entry_that_names_no_single_device(visible: str, indices: list[int]) -> None:
    assert visible_indices(visible, UUIDS) == indices


READ = """
import json
from bo_tuner.cluster import Cluster
from bo_tuner.nvml import Nvml
with Nvml() as nvml:
    told = [
        {
            "name": device.name, "total": device.total_bytes, "used": device.used_bytes(),
            "processes": [[process.pid, process.used_bytes, process.is_compute] for process in device.processes()],
            "reasons": device.clock_reasons(), "power": device.power_w(), "has_energy": device.energy_j() is not None,
            "tells_power": device.tells_power(),
        }
        for device in nvml.visible()
    ]
    with Nvml():
        pass
    told.append(nvml.devices[0].used_bytes())  # still open
print(json.dumps([*told, Cluster.detect(device="cuda").to_dict()]))
"""


def read(folder: Path, tmp_path: Path, *lines: str) -> list[Any]:
    """What is read of the devices in a process that finds the driver in `folder`."""
    script = tmp_path / "script"
    script.write_text("\n".join(lines), encoding="utf-8")
    root = Path(__file__).parents[1]
    found = {"PYTHONPATH": str(root), "LD_LIBRARY_PATH": str(folder), "NVML_SCRIPT": str(script)}
    environment = {**os.environ, **found, "CUDA_VISIBLE_DEVICES": "2,0"}
    told = subprocess.run([sys.executable, "-c", READ], env=environment, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    read: list[Any] = json.loads(told.stdout)
    return read


@pytest.mark.parametrize("age", ["today", "old"])
def test_devices_are_read_alike_from_drivers_of_today_and_from_old_ones(
    driver_folder: Path, old_driver_folder: Path, tmp_path: Path, age: str
) -> None:
    lines = ("devices 3", "used 2 5000", "process 2 4242 4000", "process 2 4243 -1", "drawing 2 77 500", "reasons 2 68")
    folder = driver_folder if age == "today" else old_driver_folder
    two, zero, used, cluster = read(folder, tmp_path, *lines)
    assert two == {
        "name": "Tesla V100-SXM2-16GB",
        "total": 2**34,
        "used": 5000 * 2**20,
        "processes": [[4242, 4000 * 2**20, True], [4243, None, True], [77, 500 * 2**20, False]],
        "reasons": 68,
        "power": 70.0,
        "has_energy": age == "today",
        "tells_power": True,
    }
    assert (zero["processes"], zero["reasons"]) == ([], 0)
    assert used == 300 * 2**20
    assert (cluster["n_ranks"], cluster["memory_bytes"], cluster["usual_precision"]) == (2, 2**34, "fp16")
