"""`ModelFacts`: what is known of a model before the first trial, found in a process of its own."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from bo_tuner.errors import ConfigError, LaunchError, ModelError
from bo_tuner.objectives.launch import ForkServer, last_words
from bo_tuner.objectives.training.failures import ending_of
from bo_tuner.objectives.training.sources import MODEL_FILE, JobSources
from bo_tuner.profile import ModelProfile
from bo_tuner.workload import ModelStructure, Workload

__all__ = ["Balance", "ModelFacts", "model_facts"]

Balance = Literal["time", "parameters"]

_TARGET = "bo_tuner.objectives.training.look:look"
_LONGEST_S = 600.0


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
    profile: ModelProfile | None
    """What it costs, on samples like the first; None where none was asked for, or it cannot be traced without weights."""
    unprofiled_because: str
    """Why not; empty where there is a profile, or none was asked for."""


def model_facts(
    workload: Workload,
    server: ForkServer,
    sources: JobSources | None = None,
    *,
    device: str = "cpu",
    balance: Balance = "time",
    seq_len: int | None = None,
    longest_wait_s: float = 120.0,
    traces: bool = False,
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
        traces: The model's profile is wanted, too: its forward is run on shapes alone, which takes seconds.

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
        "name": workload.model.name,
        "precision": workload.precision,
        "device": device,
        "balance": balance,
        "longest_wait_s": longest_wait_s,
        "traces": traces,
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
        raise LaunchError(f"{who} must be built, and the process that does it {how}{last_words(log)}")
    if "error" in answer:
        raise ModelError(answer["error"])
    profile = answer["profile"] and ModelProfile.from_dict(answer["profile"])
    return ModelFacts(**{**answer, "structure": ModelStructure.from_dict(answer["structure"]), "profile": profile})


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
