"""The driver, asked through pynvml of a compiled stand-in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from bo_tuner.errors import ClusterError
from bo_tuner.nvml import has_nvidia_hardware
from bo_tuner.visible import visible_devices

UUIDS = ["GPU-a0aa", "GPU-b1bb", "GPU-b2cc"]
ROOT = Path(__file__).parents[1]


def left_by(value: str, uuids: Sequence[str | None] = UUIDS) -> list[int] | list[str]:
    return list(visible_devices(value, len(uuids), lambda: uuids))  # type: ignore[return-value]  # all of one kind


@pytest.mark.parametrize(
    ("value", "left"),
    [
        ("0,1,2", [0, 1, 2]),
        ("2,0", [2, 0]),
        (" 1 , 2 ", [1, 2]),
        ("+1", [1]),
        ("1gpu2,2ampere", [1, 2]),
        ("0,", [0]),
        ("0,-1,1", [0]),
        ("", []),
        (" ", []),
        ("-1", []),
        ("-1,0", []),
        ("NoDevFiles", []),
        ("GPU-a0aa", [0]),
        ("GPU-a", [0]),
        ("GPU-b2,GPU-b1", [2, 1]),
        ("MIG-a0-1", ["MIG-a0-1"]),
        ("MIG-GPU-a0aa/1/0,MIG-GPU-a0aa/2/0", ["MIG-GPU-a0aa/1/0", "MIG-GPU-a0aa/2/0"]),
    ],
)
def test_visible_devices_are_those_that_torch_takes(
    monkeypatch: pytest.MonkeyPatch, value: str, left: list[int] | list[str]
) -> None:
    assert left_by(value) == left
    if value != " ":  # a blank is -1 for torch too, which it drops later
        import torch

        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        named = torch.cuda._parse_visible_devices()  # pyright: ignore[reportPrivateUsage]  # what torch goes by
        if value.startswith("GPU-"):
            named = torch.cuda._transform_uuid_to_ordinals(named, UUIDS)  # type: ignore[arg-type]  # pyright: ignore[reportPrivateUsage, reportArgumentType]
        assert named == left


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("0,3,1", "there is no GPU 3, only GPU 0 to 2"),
        ("7", "there is no GPU 7, only GPU 0 to 2"),
        ("cuda", "'cuda' is no index"),
        ("0,cuda,1", "'cuda' is no index"),
        ("1,,2", "'' is no index"),
        ("0,GPU-b1", "'GPU-b1' is no index"),
        ("GPU-b1,0", "'0' does not begin with GPU- as the first does"),
        ("GPU-b1, GPU-a", "' GPU-a' does not begin with GPU- as the first does"),
        ("MIG-a,GPU-a", "'GPU-a' does not begin with MIG- as the first does"),
        ("GPU-b,GPU-a", "'GPU-b' is the beginning of several"),
        ("GPU-z", "'GPU-z' is none of them"),
        ("1,1", "GPU 1 is named twice, for which CUDA shows none at all"),
        ("GPU-a,GPU-a0", "GPU 0 is named twice, for which CUDA shows none at all"),
        ("MIG-a,MIG-a", "'MIG-a' is named twice, for which CUDA shows none at all"),
    ],
)
def test_what_cuda_would_cut_short_in_silence_is_refused(value: str, why: str) -> None:
    with pytest.raises(ClusterError) as caught:
        left_by(value)
    assert str(caught.value) == (
        "CUDA_VISIBLE_DEVICES must name GPUs of this machine, each once, by index or by UUID; "
        f"got {value!r}, and {why}: correct it, or use --device cpu"
    )


def test_a_uuid_that_may_be_that_of_a_silent_gpu_is_told_so() -> None:
    assert left_by("GPU-a", ["GPU-a0aa", None]) == [0]
    with pytest.raises(ClusterError, match=r"'GPU-b' is none of them \(GPU 1 does not answer\)"):
        left_by("GPU-b", ["GPU-a0aa", None])


def test_nvidia_hardware_is_found_where_no_driver_runs(tmp_path: Path) -> None:
    def plug_in(slot: str, vendor: str, kind: str) -> None:
        (tmp_path / slot).mkdir()
        (tmp_path / slot / "vendor").write_text(f"{vendor}\n", encoding="ascii")
        (tmp_path / slot / "class").write_text(f"{kind}\n", encoding="ascii")

    plug_in("0000:00:01.0", "0x8086", "0x030000")
    plug_in("0000:00:02.0", "0x10de", "0x040300")  # the sound of a graphics card
    assert not has_nvidia_hardware(tmp_path)
    plug_in("0000:00:03.0", "0x10de", "0x030200")
    assert has_nvidia_hardware(tmp_path)


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
    told.append(nvml.device(0).used_bytes())  # still open
print(json.dumps([*told, Cluster.detect(device="cuda").to_dict()]))
"""


def read(folder: Path, tmp_path: Path, *lines: str) -> list[Any]:
    """What is read of the devices in a process that finds the driver in `folder`."""
    script = tmp_path / "script"
    script.write_text("\n".join(lines), encoding="utf-8")
    found = {"PYTHONPATH": str(ROOT), "LD_LIBRARY_PATH": str(folder), "NVML_SCRIPT": str(script)}
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


DETECT = """
import json, sys, warnings
from bo_tuner.cluster import Cluster
from bo_tuner.errors import ClusterError
from bo_tuner.nvml import Nvml
said = []
try:
    found = Cluster.detect(device=sys.argv[1], n_ranks=1 if sys.argv[1] == "cpu" else None, tell=said.append)
    told = {"label": found.label, "memory_bytes": found.memory_bytes, "name": found.device_name, "said": said}
    if found.device == "cuda":
        with Nvml() as nvml:
            told["indices"] = [device.index for device in nvml.visible()]
            told["power"] = [device.power_w() for device in nvml.visible()]
except ClusterError as error:
    told = {"error": type(error).__name__, "text": str(error)}
print(json.dumps(told))
"""


@pytest.fixture
def detect(driver_folder: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """`detect(*lines, visible=..., device=...)`: what a process finds whose driver has that script."""

    def found(*lines: str, visible: str | None = None, device: str = "auto", **variables: str) -> dict[str, Any]:
        script = tmp_path / "script"
        script.write_text("\n".join(lines), encoding="utf-8")
        environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        environment |= {"PYTHONPATH": str(ROOT), "LD_LIBRARY_PATH": str(driver_folder), "NVML_SCRIPT": str(script)}
        environment |= variables | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
        command = [sys.executable, "-c", DETECT, device]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
        told: dict[str, Any] = json.loads(ended.stdout)
        return told

    return found


def test_a_visible_gpu_that_is_lost_is_named_and_no_study_runs_on_the_cpu_instead(
    detect: Callable[..., dict[str, Any]],
) -> None:
    told = detect("devices 3", "lost 1 15")
    assert told == {
        "error": "DriverError",
        "text": "every visible GPU must answer, and one does not (GPU 1: GPU is lost): leave it out (CUDA_VISIBLE_DEVICES names "
        "those to use), mend it (nvidia-smi tells more), or use --device cpu",
    }
    assert detect("devices 3", "lost 1 15", device="cpu")["label"] == "1cpu"


@pytest.mark.parametrize(("visible", "indices"), [("2,0", [2, 0]), ("GPU-c,GPU-a", [2, 0])])
def test_a_lost_gpu_that_is_not_visible_harms_nobody(
    detect: Callable[..., dict[str, Any]], visible: str, indices: list[int]
) -> None:
    told = detect("devices 3", "lost 1 15", visible=visible)
    assert (told["label"], told["indices"]) == ("2cuda", indices)


def test_a_driver_of_another_version_than_its_library_is_an_error(detect: Callable[..., dict[str, Any]]) -> None:
    told = detect(NVML_SICK="18")
    assert told["error"] == "DriverError"
    assert told["text"].startswith("the GPU driver does not answer (RM has detected an NVML/RM version mismatch.)")
    assert "--device cpu" in told["text"]


def test_a_library_without_driver_and_gpu_means_cpu(detect: Callable[..., dict[str, Any]]) -> None:
    assert detect("devices 0", visible="0")["label"].endswith("cpu")
    if not has_nvidia_hardware():
        assert detect(NVML_SICK="9")["label"].endswith("cpu")


@pytest.mark.parametrize("visible", ["", "-1"])
def test_gpus_that_the_user_hides_leave_the_cpu_and_that_is_said(
    detect: Callable[..., dict[str, Any]], visible: str
) -> None:
    told = detect(visible=visible)
    assert told["label"].endswith("cpu")
    assert told["said"] == ["CUDA_VISIBLE_DEVICES hides the 2 GPUs of this machine: it is taken as without one"]
    assert detect(visible=visible, device="cuda")["error"] == "ClusterError"


@pytest.mark.parametrize("visible", ["7", "1,1", "MIG-a0-1", "GPU-z"])
def test_a_value_that_names_what_is_not_here_does_not_mean_cpu(
    detect: Callable[..., dict[str, Any]], visible: str
) -> None:
    told = detect(visible=visible)
    assert told["error"] == "ClusterError"
    assert f"got {visible!r}, and " in told["text"]


@pytest.mark.parametrize("visible", ["MIG-b1-1", None])
def test_an_instance_of_a_divided_gpu_is_a_device_with_its_own_memory(
    detect: Callable[..., dict[str, Any]], visible: str | None
) -> None:
    """By its UUID, or as the only one that is there, as in a container that was given one."""
    told = detect(*([] if visible else ["devices 1"]), f"mig {1 if visible else 0} 1 5000", visible=visible)
    assert (told["label"], told["memory_bytes"], told["name"]) == (
        "1cuda",
        5000 * 2**20,
        "Tesla V100-SXM2-16GB MIG 1g.5gb",
    )
    assert told["indices"] == [1 if visible else 0]
    assert told["power"] == [None]


@pytest.mark.parametrize("visible", ["0", "MIG-a0-1,MIG-a0-2"])
def test_several_instances_are_refused_with_their_names(detect: Callable[..., dict[str, Any]], visible: str) -> None:
    told = detect("mig 0 2 5000", visible=visible)
    assert told == {
        "error": "ClusterError",
        "text": "of divided GPUs (MIG) one instance must be visible: CUDA shows a process no more than one, and NCCL, through which ranks "
        "exchange, takes ranks on instances of a GPU for ranks on the same GPU, and refuses them; there are MIG-a0-1, MIG-a0-2: name "
        "one in CUDA_VISIBLE_DEVICES, or use --device cpu",
    }


def test_a_divided_gpu_without_an_instance_is_refused_with_the_way_out(detect: Callable[..., dict[str, Any]]) -> None:
    told = detect("mig 1 0 0")
    assert told["text"].startswith("GPU 1 is in MIG mode and has no instance: make one")
