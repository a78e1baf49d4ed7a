"""A broken CUDA stack is told as that: the real probe in a real process, with this torch and with stand-ins for it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bo_tuner.cluster import Cluster
from bo_tuner.cuda import CudaTrouble, check_can_build, check_cuda, cuda_trouble
from bo_tuner.errors import CudaError

TWO = Cluster(device="cuda", n_ranks=2, device_name="Tesla V100-SXM2-16GB", memory_bytes=2**34)

TORCH = """
class version:
    cuda = "12.4"
__version__ = "2.9.0"
class cuda:
    def init():
        {init}
    def device_count():
        return {n_devices}
class ones:
    def __init__(self, size, device):
        {compute}
    def sum(self):
        return self
    def item(self):
        return 2
"""


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., CudaTrouble | None]:
    """`probed(init=..., compute=..., n_devices=...)`: what is found with a torch that does so."""

    def found(*, init: str = "pass", compute: str = "pass", n_devices: int = 2) -> CudaTrouble | None:
        (tmp_path / "torch.py").write_text(
            TORCH.format(init=init, compute=compute, n_devices=n_devices), encoding="utf-8"
        )
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return cuda_trouble(TWO)

    return found


def test_devices_that_compute_are_no_trouble(probed: Callable[..., CudaTrouble | None]) -> None:
    assert probed() is None


@pytest.mark.parametrize(
    ("words", "mend"),
    [
        ("The NVIDIA driver on your system is too old (found version 11040).", "update the driver"),
        ("Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized", "nvidia-fabricmanager"),
        ("Error 803: system has unsupported display driver / cuda driver combination", "cuda-compat"),
        ("Error 804: forward compatibility was attempted on non supported HW", "cuda-compat"),
        ("CUDA unknown error - this may be due to an incorrectly set up environment", "nvidia-uvm"),
        ("Found no NVIDIA driver on your system.", "NVIDIA_DRIVER_CAPABILITIES"),
        ("something new", "nvidia-smi"),
    ],
)
def test_what_keeps_cuda_from_starting_is_told_with_its_mend(
    probed: Callable[..., CudaTrouble | None], words: str, mend: str
) -> None:
    trouble = probed(init=f"raise RuntimeError({words!r})")
    assert trouble is not None
    assert trouble.found == f"CUDA does not start (RuntimeError: {words})"
    assert mend in trouble.mend


def test_a_torch_that_is_not_built_for_one_of_the_gpus_is_told(probed: Callable[..., CudaTrouble | None]) -> None:
    words = "CUDA error: no kernel image is available for execution on the device"
    trouble = probed(compute=f"if device == 'cuda:1': raise RuntimeError({words!r})")
    assert trouble is not None
    assert trouble.found.startswith("CUDA does not start on CUDA's device 1 (RuntimeError: CUDA error: no kernel image")
    assert "compute capability" in trouble.mend


def test_fewer_devices_than_the_driver_shows_are_told(probed: Callable[..., CudaTrouble | None]) -> None:
    trouble = probed(n_devices=1)
    assert trouble is not None
    assert trouble.found == "CUDA shows 1 GPU where the driver shows 2"


def test_a_probe_that_dies_is_told_with_what_it_said(probed: Callable[..., CudaTrouble | None]) -> None:
    trouble = probed(init="import os, sys; print('bad library', file=sys.stderr, flush=True); os._exit(3)")
    assert trouble is not None
    assert trouble.found == "the process that tried it ended with exit code 3 and said bad library"


def test_cpu_ranks_need_no_cuda() -> None:
    check_cuda(Cluster(device="cpu", n_ranks=1, device_name="a thought", memory_bytes=2**30))


def test_a_cpu_build_of_torch_beside_gpus_ends_tune_before_anything_is_written(
    driver_folder: Path, tmp_path: Path
) -> None:
    if torch.version.cuda is not None:
        pytest.skip("this torch is built for CUDA")
    script = tmp_path / "script"
    script.write_text("devices 2\n", encoding="utf-8")
    folder = tmp_path / "here"
    folder.mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    ended = subprocess.run(
        [Path(sys.executable).with_name("bo-tuner"), "tune", "bert-tiny"],
        cwd=folder,
        env={**environment, "LD_LIBRARY_PATH": str(driver_folder), "NVML_SCRIPT": str(script)},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (1, ""), ended.stderr
    assert ended.stderr == (
        f"error: torch must be able to use the GPUs of this machine, and torch {torch.__version__} is a CPU build: install the "
        "CUDA build of torch, or use --device cpu\n"
    )
    assert list(folder.iterdir()) == []


def test_fused_adam_without_a_cuda_toolkit_is_refused_before_any_trial_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By DeepSpeed's own questions, in a real process."""
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(CudaError) as caught:
        check_can_build("fused_adam", TWO)
    text = str(caught.value)
    assert text.startswith(
        "--optimizer fused_adam must be compiled at its first use, and cannot be (MissingCUDAException: "
    )
    assert text.endswith("or use --optimizer adamw, torch's fused one, which needs none")
    check_can_build("adamw", TWO)
    check_can_build("fused_adam", replace(TWO, device="cpu"))
