"""A rank target for tests: builds the model as a trial does, and reports what its weights look like."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from bo_tuner.objectives.launch.channel import Channel
from bo_tuner.objectives.training import job


def report(channel: Channel, rank: int, spec_file: Path) -> None:
    """Send the spread of every parameter, gathered whole, and whether input and output embedding are one."""
    import deepspeed

    spec: dict[str, Any] = json.loads(spec_file.read_text(encoding="utf-8"))
    device = torch.device("cpu")
    job.join_group(device, init_method=f"file://{spec['rendezvous']}", rank=rank, world_size=2)
    model: Any = job.place_model(spec["job"], spec["ds_config"], device=device)
    spreads: dict[str, float] = {}
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            spreads[name] = float(parameter.detach().float().std(correction=0))
    channel.send(
        {
            "spreads": spreads,
            "is_tied": model.get_input_embeddings().weight is model.get_output_embeddings().weight,
            "n_local": sum(getattr(p, "ds_tensor", p).numel() for p in model.parameters()),
        }
    )
