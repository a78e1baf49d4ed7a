"""The DeepSpeed config of a candidate, and what DeepSpeed is asked to run."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bo_tuner.cluster import DeviceKind
from bo_tuner.config import TrainConfig
from bo_tuner.models.software import deepspeed_with
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


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], tuple[str, str]]:
    """`chosen(settings)` asks DeepSpeed's own code which optimizer it makes of a config, and what it wraps it in; no op is built."""
    from deepspeed.ops.adam import fused_adam
    from deepspeed.runtime import engine as engines
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.zero import utils

    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    builder = SimpleNamespace(load=lambda: SimpleNamespace(multi_tensor_adam=None))
    monkeypatch.setattr(fused_adam, "FusedAdamBuilder", lambda: builder)
    monkeypatch.setattr(utils.dist, "get_rank", lambda: 1)  # rank 0 tells what it does
    for name in ("FP16_Optimizer", "FP16_UnfusedOptimizer"):
        monkeypatch.setattr(engines, name, lambda *_, name=name, **__: name)

    def choose(settings: dict[str, Any]) -> tuple[str, str]:
        engine: Any = object.__new__(engines.DeepSpeedEngine)
        torch.nn.Module.__init__(engine)
        given = {"_config": DeepSpeedConfig(settings), "client_optimizer": None, "mpu": None}
        for name, value in {**given, "has_moe_layers": False, "pipeline_parallelism": False}.items():
            setattr(engine, name, value)
        made = engine._configure_basic_optimizer([torch.nn.Parameter(torch.zeros(3))])
        wrapper = engine._do_optimizer_sanity_check(made)
        half = {engines.FP16: torch.float16, engines.DDP_BFLOAT16: torch.bfloat16}.get(wrapper)
        kind = f"{type(made).__module__.partition('.')[0]} {type(made).__name__}"
        return kind, str(wrapper) if half is None else engine._configure_fp16_optimizer(made, half)

    return choose


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "fused_adam"])
def test_deepspeed_chooses_the_optimizer_that_is_named_and_the_wrapper_that_the_memory_model_counts(
    optimizer: str, chosen: Callable[[dict[str, Any]], tuple[str, str]]
) -> None:
    """Under ZeRO 0 in 16 bits only FusedAdam has the fused wrapper, which holds one more copy of the gradients in the step."""
    kind = {"adamw": "torch AdamW", "adam": "torch Adam", "fused_adam": "deepspeed FusedAdam"}[optimizer]
    wrapper = "FP16_Optimizer" if optimizer == "fused_adam" else "FP16_UnfusedOptimizer"
    precisions: tuple[Precision, ...] = ("fp32", "bf16", "fp16")
    for precision, stage in product(precisions, range(4)):
        workload = replace(WORKLOAD, optimizer=optimizer, precision=precision)
        config = TrainConfig.from_params({"zero_stage": stage})
        found = chosen(deepspeed_config(config, workload, n_ranks=1, device="cuda"))
        wrapped = "zero_optimization" if stage else "None" if precision == "fp32" else wrapper
        assert found == (kind, wrapped), (precision, stage)
    one, two = (deepspeed_with(name, "cuda").step_bytes for name in (optimizer, "adamw"))
    assert (one[0] > two[0]) == (optimizer == "fused_adam")
    assert one[1:] == two[1:]


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
