"""`plan`: what to expect of every config of a model on a cluster, before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from bo_tuner.cluster import Cluster, MemoryLimit
from bo_tuner.dimension import Dimension
from bo_tuner.errors import ConfigError, ModelError
from bo_tuner.hardware import hardware_of
from bo_tuner.models.choices import Problem
from bo_tuner.models.planner import Plan
from bo_tuner.models.planner import plan as plan_problem
from bo_tuner.models.software import deepspeed_with
from bo_tuner.objectives.training.dimensions import dimensions_of
from bo_tuner.profile import ModelProfile
from bo_tuner.schedules import SCHEDULES, check_schedule
from bo_tuner.workload import ModelSpec, Precision, Workload, check_choice, check_seq_len

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["plan"]

_USUAL_SAMPLES = 16
"""Of a device in an optimizer step, where nobody says how many."""


def plan(
    model: str | Path | PretrainedConfig | ModelSpec | ModelProfile,
    *,
    global_batch: int | None = None,
    cluster: str | Cluster | None = None,
    seq_len: int | None = None,
    data: str | None = None,
    precision: str = "auto",
    schedules: Sequence[str] | None = None,
    allow_2bw: bool = False,
    max_tensor: int = 1,
    dimensions: Sequence[Dimension | str] = (),
    memory_limit: str | float | MemoryLimit | None = None,
    memory_reserve: str | None = None,
) -> Plan:
    """Predict speed and memory of every config that makes steps of `global_batch` samples, and rank them; nothing is measured.

    The model is traced on shapes alone, the devices' rates come from their data sheets: neither has to be here.

    Example:
        >>> found = plan("gpt-2.2b", cluster="8x8xV100-16GB", global_batch=512, seq_len=512)  # doctest: +SKIP
        >>> found.best(1)[0].config.name  # doctest: +SKIP

    Args:
        model: As in `tune`, but for torch modules; or a profile.
        global_batch: Samples of an optimizer step; None for 16 a device. With `allow_2bw` the largest at which training with gradients one
            step old is safe.
        cluster: As in "8x8xV100-16GB" (nodes x devices x name; "@25Gb/s" behind it tells a node's network); None for this machine.
        seq_len: Tokens per sample; None for the model's longest, at most 2048, or for those of `data`.
        data: `FILE.py:FUNCTION`, as in `tune`, for models that no samples can be made up for.
        precision: `auto`, `fp32`, `bf16` or `fp16`; `auto` is what the devices usually train in.
        schedules: Of pipelines, by name; None for `1f1b`, and `2bw` where that is allowed.
        allow_2bw: Schedules that change training may be planned, as `2bw` (PipeDream-2BW), whose gradients are one step old.
        max_tensor: Largest degree of tensor parallelism; the back end that trains has none yet.
        dimensions: What else to try, as in `tune`; a plan tells their values apart by their terms of time and memory.
        memory_limit: Per device, as a fraction of it or as bytes ("3GiB"); None for 0.92.
        memory_reserve: Instead: bytes of each device that stay free ("2GiB").

    Raises:
        ConfigError: An argument cannot be used, or no config makes such a step; among them ModelError and ClusterError.
    """
    check_choice("--precision", precision, ("auto", *get_args(Precision)))
    for option, number in (("--global-batch", global_batch), ("--max-tensor", max_tensor)):
        if number is not None and number < 1:
            raise ConfigError(f"{option} must be at least 1; got {number}")
    used_schedules = _schedules(schedules, allow_2bw=allow_2bw)
    if cluster is None:
        cluster = Cluster.detect()
    elif isinstance(cluster, str):
        cluster = Cluster.described(cluster)
    limit_bytes = MemoryLimit.of(memory_limit=memory_limit, memory_reserve=memory_reserve).bytes_on(cluster)
    if isinstance(model, ModelProfile):
        hardware = hardware_of(cluster, _precision_of(model, cluster))
        profile = model
    else:
        used = cluster.usual_precision if precision == "auto" else precision
        hardware = hardware_of(cluster, used)
        profile = _profile(model, cluster, seq_len=seq_len, data=data, precision=used)  # type: ignore[arg-type]  # checked
    return plan_problem(
        Problem(
            profile=profile,
            hardware=hardware,
            software=deepspeed_with("adamw", cluster.device),
            n_ranks=cluster.n_ranks,
        ),
        global_batch=_USUAL_SAMPLES * cluster.n_ranks if global_batch is None else global_batch,
        limit_bytes=limit_bytes,
        schedules=used_schedules,
        tensor_degrees=range(1, max_tensor + 1),
        dimensions=dimensions_of(dimensions),
    )


def _schedules(given: Sequence[str] | None, *, allow_2bw: bool) -> Sequence[str]:
    """Those to plan.

    Raises:
        ConfigError: One is none, or changes training and is not allowed.
    """
    if given is None:
        return ("1f1b", "2bw") if allow_2bw else ("1f1b",)
    for name in given:
        check_schedule(name, "--schedules")
        changes = SCHEDULES[name].changes_training
        if changes and not allow_2bw:
            raise ConfigError(f"--allow-2bw must be given for {name}, which changes training: {changes}")
    return given


def _precision_of(profile: ModelProfile, cluster: Cluster) -> str:
    """What such elements are, on such devices."""
    if profile.element_bytes == 4:
        return "fp32"
    return cluster.usual_precision if cluster.usual_precision != "fp32" else "bf16"


def _profile(
    model: str | Path | PretrainedConfig | ModelSpec,
    cluster: Cluster,
    *,
    seq_len: int | None,
    data: str | None,
    precision: Precision,
) -> ModelProfile:
    from bo_tuner.objectives.training.profiles import workload_profile
    from bo_tuner.objectives.training.sources import model_spec, named

    spec = model_spec(model)
    if spec.source == "object":
        raise ModelError(
            "a plan needs a model that it can build: a preset, a config, or FILE.py:FUNCTION; got a torch module"
        )
    if spec.source == "function" and seq_len is None and data is None:
        raise ConfigError(f"--seq-len must be given for a model from a function without --data; got {spec.name}")
    length = spec.usual_seq_len if seq_len is None else seq_len
    check_seq_len(spec, length)
    workload = Workload(
        model=spec,
        n_parameters=0,  # nobody asks
        seq_len=length,
        precision=precision,
        data=None if data is None else named("--data", data, Path()),
        data_seq_len=seq_len if spec.source == "function" else length,
    )
    return workload_profile(workload, device=cluster.device)
