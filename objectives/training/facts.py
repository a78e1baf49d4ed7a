"""`ModelFacts`: what is known of a model before the first trial, found in a process of its own."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from bo_tuner.errors import ConfigError, LaunchError, ModelError
from bo_tuner.objectives.launch import ForkServer, RankGroup, last_words
from bo_tuner.objectives.training.failures import ending_of
from bo_tuner.objectives.training.sources import MODEL_FILE, JobSources
from bo_tuner.profile import ModelProfile
from bo_tuner.workload import ModelStructure, Workload

__all__ = ["Balance", "ModelFacts", "model_facts"]

Balance = Literal["time", "parameters"]

_TARGET = "bo_tuner.objectives.training.look:look"
_LONGEST_S = 600.0
_LONGEST_TRACE_S = 60.0
"""A model of a billion parameters takes seconds, since layers that are alike are traced no more than twice."""


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
    n_samples: int | None
    """Of the user's data set; None where it has no length."""
    is_fp16_supported: bool
    """By DeepSpeed on this device."""
    is_bf16_supported: bool
    versions: Mapping[str, str]
    """Of python, torch, deepspeed, transformers, and cuda where there is one."""
    profile: ModelProfile | None = None
    """What it costs, on samples like the first; None where none was asked for, or it cannot be traced without weights."""
    unprofiled_because: str = ""
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
    longest_trace_s: float = _LONGEST_TRACE_S,
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
        traces: The model's profile is wanted, too: its forward is run on shapes alone, which takes seconds. Whatever happens then
            leaves the facts as they are.
        longest_trace_s: That is given up on after this.

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
    try:
        answer = _answer(group, _LONGEST_S + longest_wait_s, f"{who} must be built, and the process that does it", log)
        if "error" in answer:
            raise ModelError(answer["error"])
        facts = ModelFacts(**{**answer, "structure": ModelStructure.from_dict(answer["structure"])})
        if not traces:
            return facts
        try:
            traced = _answer(group, longest_trace_s, f"the process that traces {workload.model.name}", log)
        except LaunchError as error:
            traced = {"error": str(error)}
    finally:
        group.kill()
    if "error" in traced:
        return replace(facts, unprofiled_because=traced["error"])
    return replace(facts, profile=ModelProfile.from_dict(traced))


def _answer(group: RankGroup, longest_s: float, who: str, log: Path) -> dict[str, Any]:
    """The next message of the process.

    Raises:
        LaunchError: None came in time, or the process ended without; the text begins with `who`.
    """
    deadline = time.monotonic() + longest_s
    while time.monotonic() < deadline:
        was_gone = group.is_gone  # what it said before it ended may wait to be read
        for _, message in group.poll(0.1):
            return message
        if was_gone:
            raise LaunchError(f"{who} {ending_of(group.exit_codes[0])}{last_words(log)}")
    raise LaunchError(f"{who} gave no answer for {longest_s:.0f} s{last_words(log)}")


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
