"""Variables that training processes run with: the same in trials and in the exported launch script."""

from __future__ import annotations

import os
from collections.abc import Mapping

from bo_tuner.cluster import Cluster

__all__ = ["changed_variables", "rank_environment", "recorded_environment"]

_USERS = (
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
)
_USERS_BEGIN = ("NCCL_", "TORCH_NCCL_", "GLOO_", "OMP_", "KMP_", "GOMP_", "MKL_")
"""They change how fast ranks are, or what they hold: a job without them is not the one that was measured."""


def recorded_environment(cluster: Cluster, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What the user has set of the allocator, of NCCL and gloo, and of threads; of threads on GPUs always something.

    Args:
        cluster: What is trained on.
        environment: Of the process that starts the study.
    """
    found = {name: value for name, value in environment.items() if name in _USERS or name.startswith(_USERS_BEGIN)}
    if cluster.device == "cuda":
        # torch alone would have every rank take all cores, and torchrun one.
        n_cores = len(os.sched_getaffinity(0))
        found.setdefault("OMP_NUM_THREADS", str(max(n_cores // cluster.n_ranks, 1)))
    return dict(sorted(found.items()))


def rank_environment(cluster: Cluster, recorded: Mapping[str, str] | None) -> dict[str, str]:
    """All variables that a training process needs on `cluster`.

    Args:
        cluster: On what.
        recorded: From `recorded_environment`, when the study began; None for a study that is older. What ranks need has precedence.
    """
    if cluster.device == "cuda":
        return {
            **(recorded or {}),
            "DS_ACCELERATOR": "cuda",
            # NVML, which the devices were chosen by, counts in this order.
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        }
    return {
        **(recorded or {}),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": str(cluster.threads_per_rank),
        "GLOO_SOCKET_IFNAME": "lo",
        # Left alone, glibc raises the size from which it maps memory and so keeps freed tensors of up to 32 MiB in a heap
        # that fragments: what a rank held came to depend on the order of its requests, not on its micro-batch. Mapped
        # tensors go back at once, and huge pages make up for the mapping.
        "GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=1048576:glibc.malloc.hugetlb=1",
    }


def changed_variables(before: Mapping[str, str] | None, now: Mapping[str, str]) -> str:
    """What of a study's recorded environment is different now, in words; empty where nothing is, or nobody knows."""
    if before is None:
        return ""
    return ", ".join(
        f"{name} is {now.get(name, 'not set')}, and was {before.get(name, 'not set')}"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    )
