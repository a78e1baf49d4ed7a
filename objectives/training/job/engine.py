"""DeepSpeed's engine on one rank: the model placed, the engine built, one optimizer step run and timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .data import Watched, moved
from .errors import JobError
from .functions import call_offering, find_function, load_file, load_function, load_object, one_line
from .hugging_face import build_structure, keep_no_caches
from .layers import loss_of, module_of
from .pipeline import pipeline_module, stage_of
from .recompute import recompute, recomputed_layers
from .split import as_stack
from .structure import initialiser, place

__all__ = ["StepTimes", "build_engine", "join_group", "load_model", "place_model", "run_forward", "run_step"]


def join_group(device: torch.device, *, init_method: str | None = None, rank: int = -1, world_size: int = -1) -> None:
    """Join the process group that DeepSpeed will use: gloo on a CPU, NCCL on GPUs.

    Args:
        device: Where this rank computes.
        init_method: As in torch.distributed; None reads the launcher's environment variables.
        rank: Of this process, where `init_method` needs it.
        world_size: Likewise.
    """
    import deepspeed

    backend = "nccl" if device.type == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size)
    deepspeed.init_distributed(dist_backend=backend)


def load_model(source: Mapping[str, Any]) -> nn.Module:
    """A job's model, without weights where it was taken without them.

    Args:
        source: One of `structure` (a pickled structure; `function` tells the file that its classes are in), `function` (called;
            its weights are kept), `architecture` (a Hugging Face `config.json` as a mapping).

    Raises:
        JobError: The user's function cannot be used.
        Exception: Whatever the model's own constructor raises.
    """
    function = source.get("function")
    if source.get("structure") is not None:
        if function:
            load_file(find_function(function)[0])
        model: nn.Module = load_object(source["structure"])
        return model
    if function:
        return module_of(call_offering(load_function(function), "the model function"), "the model function")
    return build_structure(source["architecture"])


def place_model(job: Mapping[str, Any], ds_config: Mapping[str, Any], *, device: torch.device) -> nn.Module:
    """The model as this rank holds it at first: whole, sharded from the start under ZeRO 3, or one stage of a pipeline.

    The process group must exist.

    Args:
        job: What is trained: `model` as in `load_model`, `recompute`, and `stages`, the bounds of pipeline stages or None.
        ds_config: A complete DeepSpeed config.
        device: Where this rank computes.
    """
    model = load_model(job["model"])
    keep_no_caches(model)
    initialise = initialiser(model)
    stages = job.get("stages")
    if stages:
        model = as_stack(model)
    if job.get("recompute"):
        recompute(recomputed_layers(model))
    if stages:
        n_replicas = torch.distributed.get_world_size() // (len(stages) - 1)
        stage = stage_of(torch.distributed.get_rank(), n_replicas=n_replicas)
        return pipeline_module(
            model,  # type: ignore[arg-type]  # a stack
            stages,
            stage=stage,
            device=device,
            initialise=initialise,
            shapes_differ=job.get("data") is not None,  # who can tell of a user's data
        )
    shards = ds_config.get("zero_optimization", {}).get("stage") == 3
    place(model, device=device, initialise=initialise, shard=_sharder(ds_config) if shards else None)
    return model


def _sharder(ds_config: Mapping[str, Any]) -> Callable[[list[nn.Parameter]], None]:
    """Cuts parameters into the ranks' shares as soon as they have values, those of rank 0."""
    import deepspeed

    halves = (("bf16", torch.bfloat16), ("fp16", torch.float16))
    half = next((dtype for name, dtype in halves if ds_config.get(name, {}).get("enabled")), None)

    def shard(parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            if half is not None and parameter.is_floating_point():
                parameter.data = parameter.data.to(half)
        deepspeed.zero.Init(module=nn.ParameterList(parameters), config_dict_or_path=dict(ds_config))

    return shard


def build_engine(model: nn.Module, ds_config: Mapping[str, Any], *, optimizer: str | None = None) -> Any:
    """The model under DeepSpeed, ready for `run_step`; the process group must exist.

    Args:
        model: From `place_model`.
        ds_config: A complete DeepSpeed config.
        optimizer: The user's function that makes one, as a reference; None for that of `ds_config`.

    Raises:
        JobError: The user's function does not give an optimizer.
        Exception: What DeepSpeed raises when it refuses the config.
    """
    import deepspeed

    model.train()
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    own = _optimizer_maker(optimizer) if optimizer else None
    engine = deepspeed.initialize(model=model, model_parameters=trainable, optimizer=own, config=dict(ds_config))[0]
    if isinstance(model, deepspeed.PipelineModule):
        engine.set_batch_fn(model.pair)
    return engine


def _optimizer_maker(reference: str) -> Callable[[Any], torch.optim.Optimizer]:
    function = load_function(reference)
    what = f"the optimizer function {Path(reference).name.removesuffix('.pkl')}"

    def make(parameters: Any) -> torch.optim.Optimizer:
        try:
            made = function(parameters)
        except Exception as error:
            raise JobError(
                f"{what} must take the parameters, and raises {type(error).__name__}: {one_line(error)}"
            ) from error
        if not isinstance(made, torch.optim.Optimizer):
            raise JobError(
                f"{what} must take the parameters and return a torch optimizer; "
                f"it returned {'nothing' if made is None else type(made).__name__}"
            )
        return made

    return make


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One optimizer step, in seconds of this rank's clock."""

    total_s: float
    """End to end: loading, copying, forward, backward, update, until the device is done."""
    engine_s: float
    """Forward + backward + step alone."""
    loss: float
    """Mean over the micro-batches."""


def run_step(engine: Any, data: Watched, *, grad_accum_steps: int) -> StepTimes:
    """One optimizer step of `grad_accum_steps` micro-batches, timed until the device is done.

    Args:
        engine: From `build_engine`.
        data: Micro-batches on the host.
        grad_accum_steps: Of the engine's config.

    Raises:
        JobError: Forward gives no loss that can be trained with.
    """
    from deepspeed.runtime.pipe.engine import PipelineEngine

    if isinstance(engine, PipelineEngine):
        return _run_pipeline_step(engine, data)
    device: torch.device = engine.device
    clock = _GpuClock() if device.type == "cuda" else _HostClock()
    losses: list[Tensor] = []
    started = time.perf_counter()
    for _ in range(grad_accum_steps):
        batch = moved(next(data), device)
        with clock:
            loss = loss_of(run_forward(engine, batch))
            engine.backward(loss)
            engine.step()
        losses.append(loss.detach())
        del loss, batch
    mean_loss = float(torch.stack(losses).float().mean())
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    total_s = time.perf_counter() - started
    return StepTimes(total_s=total_s, engine_s=clock.total_s(), loss=mean_loss)


def run_forward(engine: Any, batch: Any) -> Any:
    """Call a model, or an engine around it, with a micro-batch: a mapping by name, a tuple one by one."""
    if isinstance(batch, Mapping):
        return engine(**batch)
    return engine(*batch) if isinstance(batch, tuple) else engine(batch)


def _run_pipeline_step(engine: Any, data: Watched) -> StepTimes:
    """DeepSpeed runs the schedule of all micro-batches; what the data took is told apart by the host's clock."""
    waited_before_s = data.waited_s
    started = time.perf_counter()
    loss = float(engine.train_batch(data_iter=data))
    if engine.device.type == "cuda":
        torch.cuda.synchronize(engine.device)
    total_s = time.perf_counter() - started
    return StepTimes(total_s=total_s, engine_s=total_s - (data.waited_s - waited_before_s), loss=loss)


class _HostClock:
    """Adds up the time of `with` blocks by the host's clock: right where the call returns when the work is done."""

    def __init__(self) -> None:
        self._total_s = 0.0
        self._started = 0.0

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._total_s += time.perf_counter() - self._started

    def total_s(self) -> float:
        return self._total_s


class _GpuClock:
    """Adds up the time of `with` blocks on the device's own stream, without holding it up."""

    def __init__(self) -> None:
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __enter__(self) -> None:
        span = (_gpu_event(), _gpu_event())
        span[0].record()
        self._spans.append(span)

    def __exit__(self, *_: object) -> None:
        self._spans[-1][1].record()

    def total_s(self) -> float:
        """Seconds; the device must be synchronised."""
        spans_ms: list[float] = [begin.elapsed_time(end) for begin, end in self._spans]
        return sum(spans_ms) / 1000


def _gpu_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
