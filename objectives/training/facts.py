"""`ModelFacts`: what is known of a model before the first trial, found in a process of its own."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from bo_tuner.errors import ConfigError, LaunchError, ModelError
from bo_tuner.objectives.launch import ForkServer
from bo_tuner.objectives.launch.channel import Channel
from bo_tuner.objectives.training.failures import ending_of
from bo_tuner.objectives.training.sources import MODEL_FILE, JobSources
from bo_tuner.workload import ModelSpec, ModelStructure, Workload, check_seq_len

__all__ = ["Balance", "ModelFacts", "model_facts"]

Balance = Literal["time", "parameters"]

_TARGET = "bo_tuner.objectives.training.facts:report_facts"
_LONGEST_S = 600.0
_N_TRIED = 8
"""Micro-batches of the user's data that are looked at: as many as the shortest trial needs, and one more."""
_LONGEST_LOOK_S = 5.0
"""If they come slowly, fewer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A model's size and structure, and what its device can do."""

    n_parameters: int
    """Tied ones once."""
    structure: ModelStructure
    architecture: Mapping[str, Any]
    """A Hugging Face config, also of such a model from code; empty for others."""
    digest: str
    """Of the parameters of a model from code."""
    seq_len: int
    """Tokens of a sample, as asked for, or of the user's samples."""
    data_seq_len: int | None
    """Tokens that the user's data is asked for; None where there is none, or it decides."""
    is_fp16_supported: bool
    """By DeepSpeed on this device."""
    is_bf16_supported: bool
    versions: Mapping[str, str]
    """Of python, torch, deepspeed, transformers, and cuda where there is one."""


def model_facts(
    workload: Workload,
    server: ForkServer,
    sources: JobSources | None = None,
    *,
    device: str = "cpu",
    balance: Balance = "time",
    seq_len: int | None = None,
    longest_wait_s: float = 120.0,
) -> ModelFacts:
    """Build the model of `workload` in a child of `server`, look at the user's data, and measure the layers.

    The structure of a model that a function makes is written into the server's folder.

    Args:
        workload: As far as it is known.
        server: Started or not.
        sources: Where model and data come from; None follows from `workload`.
        device: Where layers are measured.
        balance: What layers are weighed by.
        seq_len: Tokens of a sample; None takes those of the user's data, or as many as is usual for a model from code. Of a
            Hugging Face config with synthetic samples, `workload` tells them.
        longest_wait_s: Seconds that the user's data may take to give a micro-batch.

    Raises:
        ModelError: The model cannot be built or used, or the data cannot; the text says why.
        LaunchError: The child died without a word.
    """
    sources = sources or JobSources.of(workload, server.run_dir)
    model = workload.model
    who = f"MODEL {model.function}" if model.function else f"model {model.name}"
    is_length_known = model.source == "config" and workload.data is None
    request = {
        "job": {**asdict(sources), "seq_len": workload.seq_len, "seed": 0},
        "model_is": who,
        "data_is": f"--data {workload.data}",
        "seq_len": workload.seq_len if is_length_known else seq_len,
        "precision": workload.precision,
        "device": device,
        "balance": balance,
        "longest_wait_s": longest_wait_s,
        "structure": str(server.run_dir / MODEL_FILE),
    }
    spec = server.run_dir / "facts.json"
    spec.write_text(json.dumps(request), encoding="utf-8")
    log = server.run_dir / "facts.log"
    log.unlink(missing_ok=True)
    group = server.launch(_TARGET, spec=spec, environments=[{"LOCAL_RANK": "0"}], logs=[log])
    answer: dict[str, Any] | None = None
    patience_s = _LONGEST_S + longest_wait_s
    deadline = time.monotonic() + patience_s
    try:
        while answer is None and time.monotonic() < deadline:
            answer = next((message for _, message in group.poll(0.1)), None)
            if answer is None and group.is_gone:
                break
        is_late = not group.is_gone
    finally:
        group.kill()
    if answer is None:
        code = group.exit_codes[0]
        how = f"gave no answer for {patience_s:.0f} s" if is_late else ending_of(code)
        raise LaunchError(f"{who} must be built, and the process that does it {how}{_last_words(log)}")
    if "error" in answer:
        raise ModelError(answer["error"])
    return ModelFacts(**{**answer, "structure": ModelStructure.from_dict(answer["structure"])})


def _last_words(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"; it last printed: {last[:300]}" if last else ""


def check_precision(precision: str, facts: ModelFacts, *, device: str) -> None:
    """Refuse a precision that DeepSpeed would refuse in every trial.

    Raises:
        ConfigError: The device cannot do it.
    """
    supported = {"fp32": True, "fp16": facts.is_fp16_supported, "bf16": facts.is_bf16_supported}
    if not supported[precision]:
        others = " or ".join(name for name, is_there in supported.items() if is_there)
        raise ConfigError(
            f"--precision must be one that DeepSpeed supports on this {device}; got {precision}: use {others}"
        )


def report_facts(channel: Channel, rank: int, spec: Path) -> None:
    """What the child does."""
    request = json.loads(spec.read_text(encoding="utf-8"))
    try:
        with _blamed_on(request["model_is"]):
            channel.send(_facts(channel, request))
    except _BlamedError as error:
        channel.send({"error": str(error)})


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


def _facts(channel: Channel, request: Mapping[str, Any]) -> dict[str, Any]:
    import platform

    import deepspeed
    import torch
    import transformers
    from deepspeed.accelerator import get_accelerator

    from bo_tuner.objectives.training import job as training_job
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
    offered = asked if asked is not None else spec.usual_seq_len if architecture else None
    job = {**job, "model": {**source, "architecture": architecture}, "seq_len": offered}
    batch = _first_batch(channel, job, model, request)
    if job["data"] is not None and asked is None:
        with _blamed_on(request["data_is"]):
            check_seq_len(spec, _tokens(batch))
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
        "transformers": transformers.__version__,
    }
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    n_trainable = sum(trainable) if sum(trainable) < n_parameters else None
    return {
        "n_parameters": n_parameters,
        "structure": asdict(_structure(model, batch, request, n_trainable)),
        "architecture": architecture if is_from_code else {},
        "digest": digest(model) if is_from_code else "",
        "data_seq_len": None if job["data"] is None else offered,
        "seq_len": asked or (offered if job["data"] is None else _tokens(batch)),
        "is_fp16_supported": bool(get_accelerator().is_fp16_supported()),
        "is_bf16_supported": bool(get_accelerator().is_bf16_supported()),
        "versions": versions,
    }


def _first_batch(channel: Channel, job: Mapping[str, Any], model: Any, request: Mapping[str, Any]) -> Any:
    """The first micro-batch, of one sample; of the user's data some more are looked at."""
    from bo_tuner.objectives.training.job import Watched, micro_batches
    from bo_tuner.objectives.training.job.layers import LayerStack

    culprit, longest_wait_s = request["data_is"], request["longest_wait_s"]

    def tell_late() -> None:
        channel.send(
            {"error": f"{culprit}: a micro-batch must come within {longest_wait_s:g} s (--data-timeout), and none did"}
        )

    data = Watched(micro_batches(job, micro_batch_size=1), longest_s=longest_wait_s, on_late=tell_late)
    if job["data"] is None:
        return next(data)
    with _blamed_on(culprit):
        first = next(data)
        if isinstance(model, LayerStack):
            model.pair(first)
        until = time.monotonic() + _LONGEST_LOOK_S
        for _ in range(_N_TRIED - 1):
            if time.monotonic() > until:
                break
            next(data)
    return first


def _tokens(batch: Any) -> int:
    """Tokens of a sample, as far as its shape tells: the second dimension of the first tensor of whole numbers, else 1."""
    import torch

    values = (
        list(batch.values()) if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else [batch]
    )
    if values and isinstance(values[0], tuple | list):
        values = list(values[0])
    first = next((value for value in values if isinstance(value, torch.Tensor)), None)
    is_tokens = first is not None and first.dim() >= 2 and not first.is_floating_point()
    return int(first.shape[1]) if is_tokens and first is not None else 1


def _structure(model: Any, batch: Any, request: Mapping[str, Any], n_trainable: int | None) -> ModelStructure:
    """How the model can be cut and recomputed, and the reasons where it cannot."""
    import torch

    from bo_tuner.objectives.training.job import JobError
    from bo_tuner.objectives.training.job.data import moved
    from bo_tuner.objectives.training.job.layers import LayerStack
    from bo_tuner.objectives.training.job.recompute import recomputed_layers
    from bo_tuner.objectives.training.job.split import as_stack
    from bo_tuner.objectives.training.job.structure import initialiser
    from bo_tuner.objectives.training.layer_costs import LayerError, layer_parameters, layer_times

    plain_because = whole_because = ""
    costs: list[float] = []
    unit = ""
    try:
        recomputed_layers(model)
    except JobError as error:
        plain_because = str(error)
    try:
        if n_trainable is not None:
            raise JobError("some of its weights are frozen, and a gradient must flow through every cut of a pipeline")
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
