"""Model families and heads train, sharded from the start (ZeRO 3): the hardest case for building and for tied weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bo_tuner.cluster import Cluster
from bo_tuner.config import TrainConfig
from bo_tuner.objectives import ignore_events
from bo_tuner.objectives.launch import ForkServer
from bo_tuner.objectives.training import TrainingObjective, model_facts
from bo_tuner.outcome import Outcome, TrialLimits
from bo_tuner.workload import ModelSpec, Workload

BERT = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 100}
TINY: dict[str, dict[str, Any]] = {
    "sequence classes": {**BERT, "architectures": ["BertForSequenceClassification"], "num_labels": 5},
    "token classes": {**BERT, "architectures": ["BertForTokenClassification"]},
    "spans": {**BERT, "architectures": ["BertForQuestionAnswering"]},
    "pretraining": {**BERT, "architectures": ["BertForPreTraining"]},
    "no architectures named": BERT,
    "distilbert": {
        **ModelSpec.resolve("distilbert-base-uncased").architecture,
        "dim": 32,
        "hidden_dim": 64,
        "n_layers": 1,
        "n_heads": 2,
        "vocab_size": 100,
    },
    "deberta-v2": {
        **ModelSpec.resolve("deberta-v2-xxlarge").architecture,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 100,
    },
    "gpt2": {
        **ModelSpec.resolve("gpt2").architecture,
        "n_embd": 32,
        "n_layer": 1,
        "n_head": 2,
        "vocab_size": 100,
        "bos_token_id": 1,
        "eos_token_id": 1,
    },
    "llama": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 100,
        "max_position_embeddings": 128,
    },
}


@pytest.mark.parametrize("family", TINY)
def test_a_family_trains(family: str, cluster: Cluster, server: ForkServer, tmp_path: Path) -> None:
    model = ModelSpec(name=family, architecture=TINY[family])
    workload = Workload(model=model, n_parameters=0, seq_len=16)
    workload = replace(workload, n_parameters=model_facts(workload, server).n_parameters)
    objective = TrainingObjective(workload, cluster, server, log_dir=tmp_path)
    limits = TrialLimits(memory_bytes=2**32, max_steps=3)
    result = objective(TrainConfig(zero_stage=3, micro_batch_size=2), limits=limits, on_event=ignore_events)
    assert result.outcome is Outcome.COMPLETE, f"{result.reason}\n{result.log_tail}"
    assert result.measurement is not None and result.measurement.is_loss_finite
