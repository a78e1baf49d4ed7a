"""What the process does that looks at a model and its data before the first trial; `facts` tells what it finds."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bo_tuner.errors import ConfigError
from bo_tuner.objectives.launch.channel import Channel
from bo_tuner.workload import ModelSpec, ModelStructure, check_seq_len

__all__ = ["look"]

_N_TRIED = 8
"""Micro-batches of the user's data that are looked at: as many as the shortest trial needs, and one more."""
_LONGEST_LOOK_S = 5.0
"""If they come slowly, fewer."""


def look(channel: Channel, rank: int, spec: Path) -> None:
    """Build the model that `spec` tells, look at its data, measure its layers, and send what was found, or one line with whose fault
    it is; then, where that is wanted, trace it and send the profile in a message of its own: it may cost the process its life.

    Args:
        channel: To the supervisor.
        rank: Always 0.
        spec: What `facts.model_facts` wrote.
    """
    request = json.loads(spec.read_text(encoding="utf-8"))
    try:
        with _blamed_on(request["model_is"]):
            facts, model, batch = _facts(channel, request)
            channel.send(facts)
    except _BlamedError as error:
        channel.send({"error": str(error)})
        return
    if request["traces"]:
        channel.send(_profile(model, batch, request, facts["structure"]["whole_because"]))


class _BlamedError(Exception):
    """Text that says whose fault it is."""


@contextlib.contextmanager
def _blamed_on(culprit: str) -> Iterator[None]:
    """Whatever is raised inside, by the user's code or about it, is told as the fault of `culprit`."""
    from bo_tuner.objectives.training.job import JobError
    from bo_tuner.objectives.training.job.functions import one_line

    try:
        yield
    except (JobError, ConfigError) as error:
        raise _BlamedError(f"{culprit}: {error}") from error
    except _BlamedError:
        raise
    except (Exception, SystemExit) as error:
        raise _BlamedError(f"{culprit} must not raise, and raises {type(error).__name__}: {one_line(error)}") from error


def _facts(channel: Channel, request: Mapping[str, Any]) -> tuple[dict[str, Any], Any, Any]:
    """What is told, the model, and its first micro-batch."""
    from deepspeed.accelerator import get_accelerator

    from bo_tuner.objectives.training import job as training_job
    from bo_tuner.objectives.training.job.data import n_tokens
    from bo_tuner.objectives.training.job.hugging_face import architecture_of
    from bo_tuner.objectives.training.job.structure import digest, structure_of
    from bo_tuner.objectives.training.sources import write_object

    job: dict[str, Any] = request["job"]
    source = job["model"]
    is_new = source.get("function") and source.get("structure")  # the ranks are to find the structure that we write now
    model = training_job.load_model({**source, "structure": None} if is_new else source)
    if is_new:
        model = structure_of(model)
        write_object(model, Path(request["structure"]), f"the model of {source['function']}")
    is_from_code = source.get("structure") is not None
    architecture = architecture_of(model) if is_from_code else source["architecture"]
    if job["data"] is None and not architecture:
        raise training_job.JobError(
            f"{type(model).__name__} is none of transformers' models with a loss, so samples for it cannot be made up: give --data"
        )
    trainable = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise training_job.JobError(
            f"{type(model).__name__} must have a parameter to train, and has none that requires a gradient"
        )
    spec = ModelSpec(name="the model", architecture=architecture)
    asked: int | None = request["seq_len"]
    if asked is not None:
        check_seq_len(spec, asked)
    # The user's function decides where nothing is known of its samples.
    usual = spec.made_up_seq_len(request["device"]) if job["data"] is None else spec.usual_seq_len
    offered = asked if asked is not None else usual if architecture else None
    job = {**job, "model": {**source, "architecture": architecture}, "seq_len": offered}
    batch, n_samples = _first_batch(channel, job, model, request)
    if job["data"] is not None and asked is None:
        with _blamed_on(request["data_is"]):
            check_seq_len(spec, n_tokens(batch))
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    n_trainable = sum(trainable) if sum(trainable) < n_parameters else None
    facts = {
        "n_parameters": n_parameters,
        "structure": asdict(_structure(model, batch, request, n_trainable)),
        "architecture": architecture if is_from_code else {},
        "digest": digest(model) if is_from_code else "",
        "data_seq_len": None if job["data"] is None else offered,
        "seq_len": asked or (offered if job["data"] is None else n_tokens(batch)),
        "n_samples": n_samples,
        "is_fp16_supported": bool(get_accelerator().is_fp16_supported()),
        "is_bf16_supported": bool(get_accelerator().is_bf16_supported()),
        "versions": _versions(),
    }
    return facts, model, batch


def _versions() -> dict[str, str]:
    import platform

    import deepspeed
    import torch
    import transformers

    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
        "transformers": transformers.__version__,
    }
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    return versions


def _first_batch(
    channel: Channel, job: Mapping[str, Any], model: Any, request: Mapping[str, Any]
) -> tuple[Any, int | None]:
    """The first micro-batch, of one sample, and how many samples the user's data set has, where it tells; some more are looked at."""
    from bo_tuner.objectives.training.job import Watched, micro_batches
    from bo_tuner.objectives.training.job.data import n_samples
    from bo_tuner.objectives.training.job.layers import LayerStack

    culprit, longest_wait_s = request["data_is"], request["longest_wait_s"]

    def tell_late() -> None:
        channel.send(
            {"error": f"{culprit}: a micro-batch must come within {longest_wait_s:g} s (--data-timeout), and none did"}
        )

    sizes: list[int | None] = []
    batches = micro_batches(job, micro_batch_size=1, on_made=lambda made: sizes.append(n_samples(made)))
    data = Watched(batches, longest_s=longest_wait_s, on_late=tell_late)
    if job["data"] is None:
        return next(data), None
    with _blamed_on(culprit):
        first = next(data)
        if isinstance(model, LayerStack):
            model.pair(first)
        until = time.monotonic() + _LONGEST_LOOK_S
        for _ in range(_N_TRIED - 1):
            if time.monotonic() > until:
                break
            next(data)
    return first, sizes[0]


def _structure(model: Any, batch: Any, request: Mapping[str, Any], n_trainable: int | None) -> ModelStructure:
    """How the model can be cut and recomputed, and the reasons where it cannot."""
    import torch

    from bo_tuner.objectives.training.chain import LayerError
    from bo_tuner.objectives.training.job import JobError
    from bo_tuner.objectives.training.job.data import moved
    from bo_tuner.objectives.training.job.layers import LayerStack
    from bo_tuner.objectives.training.job.recompute import recomputed_layers
    from bo_tuner.objectives.training.job.split import as_stack
    from bo_tuner.objectives.training.job.structure import initialiser
    from bo_tuner.objectives.training.layer_costs import layer_parameters, layer_times

    plain_because = whole_because = ""
    costs: list[float] = []
    unit = ""
    try:
        recomputed_layers(model)
    except JobError as error:
        plain_because = str(error)
    try:
        stack = as_stack(model)
        costs, unit = [float(count) for count in layer_parameters(stack)], "parameters"
        device = torch.device(request["device"])
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[request["precision"]]
        is_timed = request["balance"] == "time"
        times = layer_times(
            stack,
            moved(batch, device),
            device=device,
            dtype=dtype,
            initialise=initialiser(model),
            n_repeats=3 if is_timed else 0,
        )
        if is_timed:
            costs, unit = times, "seconds"
    except torch.OutOfMemoryError:
        pass  # one layer of one sample; their parameters will have to do
    except JobError as error:
        if isinstance(error, LayerError) and isinstance(model, LayerStack):
            raise  # without the cuts it would fail all the same
        costs, unit, whole_because = [], "", str(error)
    return ModelStructure(
        n_trainable=n_trainable,
        layer_costs=tuple(costs),
        cost_unit=unit,
        whole_because=whole_because,
        plain_because=plain_because,
    )


def _profile(model: Any, batch: Any, request: Mapping[str, Any], whole_because: str) -> dict[str, Any]:
    """The profile as plain data, or the reason why there is none."""
    from bo_tuner.objectives.training.profiles import profile_of

    try:
        with _blamed_on(request["name"]):
            found = profile_of(
                model,
                batch,
                name=request["name"],
                precision=request["precision"],
                device=request["device"],
                whole_because=whole_because,
            )
    except _BlamedError as error:
        return {"error": str(error)}
    return found.to_dict()
