"""A rank target for tests: trains a few steps exactly as a trial does, and writes down what became of model and loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bo_tuner.objectives.launch.channel import Channel
from bo_tuner.objectives.training import job


def train(channel: Channel, rank: int, spec_file: Path) -> None:
    """Train `n_steps`; the report is a file of torch's beside the spec, named by rank."""
    spec: dict[str, Any] = json.loads(spec_file.read_text(encoding="utf-8"))
    n_ranks: int = spec["n_ranks"]
    job.join_group(
        torch.device("cpu"), init_method=f"file://{spec['rendezvous']}", rank=rank, world_size=spec["n_ranks"]
    )
    the_job, ds_config = spec["job"], spec["ds_config"]
    model = job.place_model(the_job, ds_config, device=torch.device("cpu"))
    config = getattr(model, "config", None)
    report: dict[str, Any] = {
        "ties": ties(model),
        "buffers": {name: buffer.clone() for name, buffer in model.named_buffers()},
        "persistent": sorted(name for name, _ in model.named_buffers() if name in model.state_dict()),
        "trainable": sorted(name for name, parameter in model.named_parameters() if parameter.requires_grad),
        "shapes": {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in model.named_parameters()},
        "use_cache": getattr(config, "use_cache", None),
    }
    engine = job.build_engine(model, ds_config, optimizer=the_job.get("optimizer"))
    report["before"] = weights(model, the_job, rank, n_ranks)
    report["optimizers"] = [type(optimizer).__name__ for optimizer in optimizers(engine)]
    report["n_optimized"] = getattr(optimizers(engine)[-1], "n_given", None)
    data = job.Watched(
        job.micro_batches(
            the_job,
            micro_batch_size=ds_config["train_micro_batch_size_per_gpu"],
            rank=rank,
            world_size=n_ranks,
        )
    )
    accum = ds_config["gradient_accumulation_steps"]
    report["losses"] = [job.run_step(engine, data, grad_accum_steps=accum).loss for _ in range(spec["n_steps"])]
    report["after"] = weights(model, the_job, rank, n_ranks)
    torch.save(report, f"{spec_file}.{rank}")
    channel.send({"done": rank})


def weights(model: nn.Module, the_job: dict[str, Any], rank: int, n_ranks: int) -> dict[str, Tensor]:
    """Every weight, gathered whole, by its name in the model; those of a pipeline by their place in the chain of layers."""
    import deepspeed

    named = dict(model.named_parameters(remove_duplicate=False))
    if the_job.get("stages"):
        named = {}
        stage = next(module for module in model.modules() if type(module).__name__ == "_Stage")
        first = the_job["stages"][rank * (len(the_job["stages"]) - 1) // n_ranks]
        for number, layer in enumerate(stage.layers, first):  # type: ignore[arg-type]  # a ModuleList
            for name, parameter in layer.named_parameters(remove_duplicate=False):
                named[f"{number}.{name}"] = parameter
        named |= {name: parameter for name, parameter in stage.named_parameters() if name.startswith("loss.")}
    found: dict[str, Tensor] = {}
    for name, parameter in named.items():
        with deepspeed.zero.GatheredParameters([parameter]):
            found[name] = parameter.detach().float().clone()
    return found


def ties(model: nn.Module) -> list[list[str]]:
    """Names that share a parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return sorted(sorted(found) for found in names.values() if len(found) > 1)


def optimizers(engine: Any) -> list[Any]:
    """From DeepSpeed's wrapper down to what updates weights."""
    found = [engine.optimizer]
    while getattr(found[-1], "optimizer", None) is not None:
        found.append(found[-1].optimizer)
    return found
