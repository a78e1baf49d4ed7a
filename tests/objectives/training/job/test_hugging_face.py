"""What is known of a transformers model, wherever it stands in what the user hands over, and samples made up for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bo_tuner.objectives.training.job.hugging_face import (
    SyntheticData,
    architecture_of,
    build_structure,
    keep_no_caches,
)
from bo_tuner.objectives.training.job.recompute import recompute, recomputed_layers
from bo_tuner.objectives.training.job.structure import digest
from bo_tuner.workload import ModelSpec

Strong = Callable[..., nn.Module]


class AdaptedForCausalLM(nn.Module):
    """As adapters of the peft library are: named as a head is, answering for the model inside, frozen but for an addition."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.base_model = inner.requires_grad_(False)
        self.addition = nn.Parameter(torch.zeros(3))
        self.config = inner.config

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model, name)


def test_the_architecture_of_a_model_builds_the_like_of_it(strong: Strong) -> None:
    model = strong("GPT2LMHeadModel")
    found = architecture_of(model)
    assert (found["architectures"], found["model_type"]) == (["GPT2LMHeadModel"], "gpt2")
    assert digest(build_structure(found)) == digest(model)


def test_it_is_that_of_the_model_inside_an_adapter_and_of_the_class_that_a_users_own_derives_from(
    strong: Strong,
) -> None:
    model = strong("GPT2LMHeadModel")
    wanted = architecture_of(model)
    assert architecture_of(AdaptedForCausalLM(model)) == wanted
    model.__class__ = type("TheirsForCausalLM", (type(model),), {})
    assert architecture_of(model) == wanted


def test_recomputed_layers_do_not_change_it(strong: Strong) -> None:
    model = strong("BertForSequenceClassification")
    wanted = architecture_of(model)
    recompute([model, *recomputed_layers(model)])
    assert architecture_of(model) == wanted != {}


def test_a_model_that_gives_no_loss_or_is_none_of_theirs_has_no_architecture(strong: Strong) -> None:
    assert architecture_of(strong("BertModel")) == {}
    assert architecture_of(nn.Linear(2, 2)) == {}


def test_no_model_keeps_keys_and_values_wherever_it_stands(strong: Strong) -> None:
    inner = strong("GPT2LMHeadModel")
    keep_no_caches(nn.ModuleDict({"deep": nn.ModuleList([AdaptedForCausalLM(inner)])}))
    assert inner.config.use_cache is False  # type: ignore[union-attr]  # a transformers config


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("BertForMaskedLM", {"labels": (8,)}),
        ("BertForPreTraining", {"labels": (8,), "next_sentence_label": ()}),
        ("DistilBertForSequenceClassification", {"labels": ()}),
        ("GPT2ForTokenClassification", {"labels": (8,)}),
        ("BertForQuestionAnswering", {"start_positions": (), "end_positions": ()}),
    ],
)
def test_samples_are_as_the_model_takes_them_and_the_same_for_one_seed(
    name: str, labels: dict[str, tuple[int, ...]], strong: Strong
) -> None:
    model = strong(name)
    samples, again, others = (SyntheticData(architecture_of(model), seq_len=8, seed=seed) for seed in (1, 1, 2))
    sample = samples[0]
    shapes = {column: tuple(value.shape) for column, value in sample.items()}
    assert shapes == {"input_ids": (8,), "attention_mask": (8,), **labels}
    assert all(torch.equal(sample[column], again[0][column]) for column in sample)
    assert not torch.equal(sample["input_ids"], others[0]["input_ids"])
    loss = model(**{column: torch.stack([samples[0][column], samples[1][column]]) for column in sample}).loss
    assert torch.isfinite(loss)


@pytest.mark.parametrize("name", ["bert-tiny", "gpt2"])
def test_a_preset_and_its_samples_are_made_without_the_network(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Whatever the user's HF_HUB_OFFLINE says, which is for code of the user's."""

    def refuse(*_: object) -> None:
        raise AssertionError("the network was asked")

    architecture = ModelSpec.resolve(name).architecture
    monkeypatch.setattr("socket.getaddrinfo", refuse)
    monkeypatch.setattr("socket.socket.connect", refuse)
    assert list(build_structure(architecture).parameters())
    assert len(SyntheticData(architecture, seq_len=8, n_samples=2)) == 2
