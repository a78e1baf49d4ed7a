"""Whether torch can use the GPUs that the driver shows, tried in a process of its own: what is broken there is no model's fault."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bo_tuner.cluster import Cluster
from bo_tuner.errors import CudaError
from bo_tuner.text import count

__all__ = ["CudaTrouble", "check_can_build", "check_cuda", "cuda_trouble"]

_LONGEST_S = 180.0
"""To import torch and to start CUDA on eight GPUs, from a slow disk."""
_PROBE = """
import json
told = {}
try:
    import torch
    told |= {"version": torch.__version__, "cuda": torch.version.cuda}
    if torch.version.cuda is not None:
        torch.cuda.init()
        told["n_devices"] = torch.cuda.device_count()
        for index in range(told["n_devices"]):
            told["device"] = index
            torch.ones(2, device=f"cuda:{index}").sum().item()
except BaseException as error:
    told["error"] = f"{type(error).__name__}: {error}"
print(json.dumps(told))
"""
_BUILD_PROBE = """
import json
told = {}
try:
    from deepspeed.git_version_info import installed_ops
    if not installed_ops.get("fused_adam"):
        from deepspeed.ops.op_builder.builder import assert_no_cuda_mismatch
        assert_no_cuda_mismatch("fused_adam")
except BaseException as error:
    told["error"] = f"{type(error).__name__}: {error}"
print(json.dumps(told))
"""
"""DeepSpeed's own questions before it compiles an op."""
_CAUSES = (
    (r"driver on your system is too old", "update the driver, or install a torch that is built for an older CUDA"),
    (
        r"\b802\b|system not yet initialized",
        "start the fabric manager, in the driver's version (systemctl start nvidia-fabricmanager), as NVSwitch needs it",
    ),
    (
        r"\b80[34]\b|unsupported display driver|forward compatibility",
        "the CUDA libraries do not fit the driver: reboot after an update of it, or take cuda-compat out of LD_LIBRARY_PATH",
    ),
    (
        r"no kernel image|not compatible with the current PyTorch",
        "install a torch that is built for the compute capability of this GPU",
    ),
    (r"busy or unavailable", "end the process that holds it, or allow several: nvidia-smi -c DEFAULT"),
    (r"out of memory", "end the processes that fill it; nvidia-smi lists them"),
    (
        r"no NVIDIA driver|no CUDA-capable device|\b100\b",
        "the driver's CUDA library must be there too: in a container NVIDIA_DRIVER_CAPABILITIES=compute,utility",
    ),
    (r"\b999\b|unknown error", "load the kernel module (modprobe nvidia-uvm), or reboot"),
)
"""What CUDA and torch say, and what mends it. Numbers: CUDA Runtime API, cudaError."""
_OTHERWISE = "nvidia-smi and the text tell more"


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaTrouble:
    """Why torch cannot use the GPUs."""

    found: str
    mend: str


def check_cuda(cluster: Cluster) -> None:
    """Make sure that ranks can compute on `cluster`; nothing is done for CPU ranks.

    Raises:
        CudaError: They cannot; the text says what is broken and what mends it.
    """
    trouble = cuda_trouble(cluster) if cluster.device == "cuda" else None
    if trouble is not None:
        raise CudaError(
            f"torch must be able to use the GPUs of this machine, and {trouble.found}: {trouble.mend}, or use --device cpu"
        )


def cuda_trouble(cluster: Cluster) -> CudaTrouble | None:
    """Start CUDA in a child and compute a sum on each device; None where that works."""
    told = _told(_PROBE)
    return told if isinstance(told, CudaTrouble) else _judged(told, n_ranks=cluster.n_ranks)


def check_can_build(optimizer: str, cluster: Cluster) -> None:
    """Make sure that DeepSpeed's FusedAdam, where it is the optimizer, can be compiled for GPUs. DeepSpeed has one for CPUs too.

    Raises:
        CudaError: It cannot; the text says why, and the way out.
    """
    if optimizer != "fused_adam" or cluster.device != "cuda":
        return
    told = _told(_BUILD_PROBE)
    found = told.found if isinstance(told, CudaTrouble) else " ".join(str(told.get("error", "")).split())
    if found:
        raise CudaError(
            f"--optimizer fused_adam must be compiled at its first use, and cannot be ({found[:300]}): install the CUDA toolkit in the "
            "version of torch's CUDA (CUDA_HOME names it), or use --optimizer adamw, torch's fused one, which needs none"
        )


def _told(probe: str) -> dict[str, Any] | CudaTrouble:
    """What a program that runs in a child tells in its last line."""
    try:
        ended = subprocess.run(
            [sys.executable, "-c", probe],
            env={**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LONGEST_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return CudaTrouble(found=f"CUDA does not start within {_LONGEST_S:.0f} s", mend=_OTHERWISE)
    try:
        told: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = next(iter(reversed(ended.stderr.split("\n")[:-1])), "nothing")
        return CudaTrouble(
            found=f"the process that tried it ended with exit code {ended.returncode} and said {last}", mend=_OTHERWISE
        )
    return told


def _judged(told: Mapping[str, Any], *, n_ranks: int) -> CudaTrouble | None:
    if "version" in told and told["cuda"] is None:
        return CudaTrouble(found=f"torch {told['version']} is a CPU build", mend="install the CUDA build of torch")
    if "error" in told:
        text = " ".join(str(told["error"]).split())
        cause = next((mend for pattern, mend in _CAUSES if re.search(pattern, text, re.IGNORECASE)), _OTHERWISE)
        where = f" on CUDA's device {told['device']}" if "device" in told else ""
        return CudaTrouble(found=f"CUDA does not start{where} ({text[:300]})", mend=cause)
    if told["n_devices"] < n_ranks:
        return CudaTrouble(
            found=f"CUDA shows {count(told['n_devices'], 'GPU')} where the driver shows {n_ranks}",
            mend="CUDA_VISIBLE_DEVICES and the container's devices must be the same for both",
        )
    return None
