"""DeepSpeed as the back end: what it can run, and the config that makes it run a `TrainConfig`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bo_tuner.cluster import DeviceKind
from bo_tuner.config import TrainConfig
from bo_tuner.dimension import Dimension
from bo_tuner.schedules import SCHEDULES
from bo_tuner.workload import OPTIMIZERS, Workload

__all__ = ["DeepSpeedBackEnd", "deepspeed_config"]

_DEFAULT_BUCKET = 500_000_000
"""Elements; DeepSpeed's own default for its reduce and all-gather buckets."""
_LEAST_BUCKET = 1_000_000
_LEARNING_RATE = 1e-4
_NEVER = 2**31 - 1


class DeepSpeedBackEnd:
    """What DeepSpeed can run for us today: data parallelism with ZeRO 0 to 3, and pipelines with ZeRO 0 and 1. Of a table's own
    dimensions it knows nothing; of a user's what they change.

    ZeRO 2 and 3 would reduce or gather in every micro-batch of a pipeline; DeepSpeed refuses them.
    """

    def __init__(self, dimensions: Sequence[Dimension] = ()) -> None:
        """Know the user's `dimensions`."""
        self._names = {dimension.name for dimension in dimensions}

    def legal(self, config: TrainConfig) -> bool:
        """DeepSpeed runs `config`."""
        return (
            (config.pipeline_depth == 1 or config.zero_stage <= 1)
            and config.tensor_parallel == 1
            and "deepspeed" in SCHEDULES[config.pipeline_schedule].back_ends
            and config.offload == "none"
            and self._names.issuperset(name for name, _ in config.extra)
        )


def deepspeed_config(
    config: TrainConfig,
    workload: Workload,
    *,
    n_ranks: int,
    device: DeviceKind = "cpu",
    dimensions: Sequence[Dimension] = (),
) -> dict[str, Any]:
    """The complete DeepSpeed config of one candidate.

    Buckets, by default 5e8 elements, are cut to the model's size, since DeepSpeed allocates them whole.

    Args:
        config: What to run.
        workload: What is trained.
        n_ranks: World size.
        device: What ranks train on.
        dimensions: The user's own; they change it last, one after the other.

    Raises:
        ConfigError: One of them cannot.
    """
    even = workload.n_parameters + workload.n_parameters % 2  # ZeRO 1 and 2 refuse an odd bucket
    bucket = min(_DEFAULT_BUCKET, max(even, _LEAST_BUCKET))
    zero: dict[str, Any] = {"stage": config.zero_stage}
    if config.zero_stage in (1, 2):
        zero |= {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    elif config.zero_stage == 3:
        zero |= {"reduce_bucket_size": bucket, "stage3_prefetch_bucket_size": bucket // 10}
    settings: dict[str, Any] = {
        "train_batch_size": config.global_batch(n_ranks),
        "train_micro_batch_size_per_gpu": config.micro_batch_size,
        "gradient_accumulation_steps": config.grad_accum_steps,
        "zero_optimization": zero,
        **_optimizer(workload.optimizer, device),
        "zero_allow_untested_optimizer": True,
        "steps_per_print": _NEVER,
        "wall_clock_breakdown": False,
    }
    if workload.precision != "fp32":
        settings[workload.precision] = {"enabled": True}
    extra = dict(config.extra)
    for dimension in dimensions:
        settings = dimension.applied(settings, extra[dimension.name])
    return settings


def _optimizer(name: str, device: DeviceKind) -> dict[str, Any]:
    """Nothing for a user's own, which DeepSpeed is handed as an object."""
    if name not in OPTIMIZERS:
        return {}
    params: dict[str, Any] = {"lr": _LEARNING_RATE}
    if name != "fused_adam":  # what DeepSpeed takes where nothing is said
        params["torch_adam"] = True
        if device == "cuda":
            params["fused"] = True  # DeepSpeed hands it on to torch: one kernel, and nothing to compile
    if name == "adam":
        params["adam_w_mode"] = False
    return {"optimizer": {"type": "Adam" if name == "adam" else "AdamW", "params": params}}
