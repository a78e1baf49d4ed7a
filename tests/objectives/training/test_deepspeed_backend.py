"""The DeepSpeed config of a candidate, and what DeepSpeed is asked to run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from bo_tuner.cluster import DeviceKind
from bo_tuner.config import TrainConfig
from bo_tuner.objectives.training import DeepSpeedBackEnd, deepspeed_config
from bo_tuner.workload import ModelSpec, Precision, Workload

WORKLOAD = Workload(model=ModelSpec.resolve("bert-tiny"), n_parameters=4_416_698, seq_len=128)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_the_batch_identity_holds(zero_stage: int) -> None:
    config = TrainConfig.from_params({"zero_stage": zero_stage, "micro_batch_size": 6, "grad_accum_steps": 4})
    settings = deepspeed_config(config, WORKLOAD, n_ranks=8)
    assert settings["train_micro_batch_size_per_gpu"] == 6
    assert settings["gradient_accumulation_steps"] == 4
    assert settings["train_batch_size"] == 6 * 4 * 8
    assert settings["zero_optimization"]["stage"] == zero_stage


def test_buckets_are_cut_to_the_model_and_never_over_the_default() -> None:
    config = TrainConfig(zero_stage=2)
    assert deepspeed_config(config, WORKLOAD, n_ranks=2)["zero_optimization"]["reduce_bucket_size"] == 4_416_698
    large = replace(WORKLOAD, n_parameters=7_000_000_000)
    assert deepspeed_config(config, large, n_ranks=2)["zero_optimization"]["reduce_bucket_size"] == 500_000_000


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_the_bucket_of_an_odd_model_is_even_since_deepspeed_refuses_others(zero_stage: int) -> None:
    odd = replace(WORKLOAD, n_parameters=4_416_699)
    zero = deepspeed_config(TrainConfig.from_params({"zero_stage": zero_stage}), odd, n_ranks=2)["zero_optimization"]
    assert zero["allgather_bucket_size"] == zero["reduce_bucket_size"] == 4_416_700


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_precision_switches_exactly_one_section_on(precision: Precision) -> None:
    settings = deepspeed_config(TrainConfig(), replace(WORKLOAD, precision=precision), n_ranks=2)
    enabled = [name for name in ("fp16", "bf16") if settings.get(name, {}).get("enabled")]
    assert enabled == ([] if precision == "fp32" else [precision])


def test_adam_is_not_adamw() -> None:
    adam = deepspeed_config(TrainConfig(), replace(WORKLOAD, optimizer="adam"), n_ranks=2)["optimizer"]
    adamw = deepspeed_config(TrainConfig(), WORKLOAD, n_ranks=2)["optimizer"]
    assert adam["type"] == "Adam" and adam["params"]["adam_w_mode"] is False
    assert adamw["type"] == "AdamW" and "adam_w_mode" not in adamw["params"]


@pytest.mark.parametrize(("name", "decouples"), [("adamw", True), ("adam", False)])
def test_on_gpus_deepspeed_makes_torchs_fused_optimizer_of_the_config(name: str, decouples: bool) -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine

    workload = replace(WORKLOAD, optimizer=name)
    params = deepspeed_config(TrainConfig(), workload, n_ranks=2, device="cuda")["optimizer"]["params"]
    params.pop("adam_w_mode", None)  # as DeepSpeed does before
    choose: Any = DeepSpeedEngine.get_optimizer_configuration
    make, more = choose(None, params, decouples)  # an engine is asked for nothing here
    weights = torch.nn.Parameter(torch.zeros(3))
    made = make([weights], **params, **more)
    assert type(made) is (torch.optim.AdamW if decouples else torch.optim.Adam)
    assert made.defaults["fused"] is True
    assert not deepspeed_config(TrainConfig(), workload, n_ranks=2)["optimizer"]["params"].get("fused")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_deepspeeds_own_adam_is_what_it_takes_where_nothing_is_said(device: DeviceKind) -> None:
    settings = deepspeed_config(TrainConfig(), replace(WORKLOAD, optimizer="fused_adam"), n_ranks=2, device=device)
    assert settings["optimizer"] == {"type": "AdamW", "params": {"lr": 1e-4}}


def test_pipelines_run_under_zero_0_and_1_only() -> None:
    legal = [
        stage
        for stage in range(4)
        if DeepSpeedBackEnd().legal(TrainConfig.from_params({"zero_stage": stage, "pipeline_depth": 2}))
    ]
    assert legal == [0, 1]
    assert all(
        DeepSpeedBackEnd().legal(TrainConfig.from_params({"zero_stage": stage, "recompute": True}))
        for stage in range(4)
    )


@pytest.mark.parametrize(
    "params",
    [
        {"tensor_parallel": 2},
        {"offload": "optimizer"},
        {"pipeline_schedule": "2bw"},
        {"a_switch_of_a_table": "on"},
    ],
)
def test_what_it_does_not_run_yet_is_not_legal(params: dict[str, object]) -> None:
    assert DeepSpeedBackEnd().legal(TrainConfig(zero_stage=3))
    assert not DeepSpeedBackEnd().legal(TrainConfig.from_params(params))
