"""`ModelFacts`: what is known of a model before the first trial, read in a process of its own without its weights."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bo_tuner.errors import ConfigError, LaunchError, ModelError
from bo_tuner.objectives.launch import ForkServer
from bo_tuner.objectives.launch.channel import Channel
from bo_tuner.workload import ModelSpec

__all__ = ["ModelFacts", "model_facts"]

_TARGET = "bo_tuner.objectives.training.facts:report_facts"
_LONGEST_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A model's size, and what its device can do."""

    n_parameters: int
    """Tied ones once."""
    is_fp16_supported: bool
    """By DeepSpeed on this device."""
    is_bf16_supported: bool
    versions: Mapping[str, str]
    """Of python, torch, deepspeed, transformers, and cuda where there is one."""


def model_facts(model: ModelSpec, server: ForkServer) -> ModelFacts:
    """Build `model` on the meta device in a child of `server`.

    Raises:
        ModelError: Its constructor raises, or transformers does not know it.
        LaunchError: The child died without a word.
    """
    spec = server.run_dir / "facts.json"
    spec.write_text(json.dumps({"architecture": dict(model.architecture)}), encoding="utf-8")
    log = server.run_dir / "facts.log"
    group = server.launch(_TARGET, spec=spec, environments=[{}], logs=[log])
    answer: dict[str, Any] | None = None
    deadline = time.monotonic() + _LONGEST_S
    try:
        while answer is None and time.monotonic() < deadline:
            answer = next((message for _, message in group.poll(0.1)), None)
            if answer is None and group.is_gone:
                break
    finally:
        group.kill()
    if answer is None:
        raise LaunchError(f"model {model.name} could not be looked at: {log.read_text()[-500:].strip() or 'no answer'}")
    if "error" in answer:
        raise ModelError(f"model {model.name} must build from its config, and does not: {answer['error']}")
    return ModelFacts(**answer)


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
    try:
        channel.send(_facts(json.loads(spec.read_text(encoding="utf-8"))["architecture"]))
    except Exception as error:  # noqa: BLE001  # a model may raise anything
        text = " ".join(str(error).split())
        channel.send({"error": f"{type(error).__name__}: {text[:500]}"})


def _facts(architecture: Mapping[str, Any]) -> dict[str, Any]:
    import platform

    import deepspeed
    import torch
    import transformers
    from deepspeed.accelerator import get_accelerator

    from bo_tuner.objectives.training.job import build_model

    with torch.device("meta"):
        model = build_model(architecture)
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
        "transformers": transformers.__version__,
    }
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    return {
        "n_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "is_fp16_supported": bool(get_accelerator().is_fp16_supported()),
        "is_bf16_supported": bool(get_accelerator().is_bf16_supported()),
        "versions": versions,
    }
