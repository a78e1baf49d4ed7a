"""Transformers models as chains of layers compute what the whole models compute, padding, masks and ties included."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bo_tuner.objectives.training.job import split
from bo_tuner.objectives.training.job.errors import JobError
from bo_tuner.objectives.training.job.split import as_stack
from bo_tuner.objectives.training.job.structure import structure_of

Strong = Callable[..., nn.Module]
N_SAMPLES, N_TOKENS, N_LABELS, VOCABULARY = 4, 12, 5, 50
HEADS = [
    "BertForMaskedLM",
    "BertForPreTraining",
    "BertForSequenceClassification",
    "BertForTokenClassification",
    "BertForQuestionAnswering",
    "DistilBertForMaskedLM",
    "DistilBertForSequenceClassification",
    "DistilBertForTokenClassification",
    "DistilBertForQuestionAnswering",
    "GPT2LMHeadModel",
    "GPT2ForTokenClassification",
    "GPT2ForQuestionAnswering",
]
TYPED = [name for name in HEADS if not name.startswith("DistilBert")]
LOSS, GRADIENT = 1e-6, 1e-5
"""Relative: how closely the parts agree with the whole."""


def made(strong: Strong, name: str, **changes: Any) -> nn.Module:
    # Span heads take two labels; GPT-2's token head has a dropout of its own.
    own = {} if name.endswith("QuestionAnswering") else {"num_labels": N_LABELS}
    if name == "GPT2ForTokenClassification":
        own["classifier_dropout"] = 0.0  # type: ignore[assignment]
    return strong(name, **own, **changes).train()


def batch_for(name: str, *, types: bool = False) -> dict[str, Tensor]:
    """Four samples: whole, two padded at the end, one at the start, which a decoder sees too."""
    generator = torch.Generator().manual_seed(3)

    def integers(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator)

    tokens = integers(VOCABULARY - 2, N_SAMPLES, N_TOKENS) + 2
    mask = (torch.arange(N_TOKENS) < torch.tensor([[12], [9], [4], [7]])).long()
    mask[3] = mask[3].flip(0)
    batch = {"input_ids": tokens, "attention_mask": mask}
    if types:
        batch["token_type_ids"] = integers(2, N_SAMPLES, N_TOKENS)
    if name.endswith("SequenceClassification"):
        return {**batch, "labels": integers(N_LABELS, N_SAMPLES)}
    if name.endswith("TokenClassification"):
        return {**batch, "labels": integers(N_LABELS, N_SAMPLES, N_TOKENS).masked_fill(mask == 0, -100)}
    if name.endswith("QuestionAnswering"):
        return {**batch, "start_positions": integers(4, N_SAMPLES), "end_positions": integers(4, N_SAMPLES)}
    batch["labels"] = tokens.masked_fill(mask == 0, -100)
    return {**batch, "next_sentence_label": integers(2, N_SAMPLES)} if name == "BertForPreTraining" else batch


def of_whole(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    return differentiated(model, lambda: model(**batch).loss)


def of_parts(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    stack = as_stack(model)
    return differentiated(model, lambda: stack(*stack.pair(batch)))


def differentiated(model: nn.Module, compute: Callable[[], Tensor]) -> tuple[float, dict[str, Tensor]]:
    """Loss, and the gradient of every weight by its name in the model."""
    model.zero_grad(set_to_none=True)
    loss = compute()
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("mask", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("name", "types"), [*((name, False) for name in HEADS), *((name, True) for name in TYPED)], ids=str
)
def test_parts_and_whole_agree_in_loss_and_gradients(name: str, types: bool, mask: str, strong: Strong) -> None:
    model = made(strong, name, attn_implementation=mask)
    batch = batch_for(name, types=types)
    loss, gradients = of_whole(model, batch)
    parts_loss, parts_gradients = of_parts(model, batch)
    assert parts_loss == pytest.approx(loss, rel=LOSS)
    assert parts_gradients.keys() == gradients.keys() == {name for name, _ in model.named_parameters()}
    for weight, gradient in gradients.items():
        scale = max(float(gradient.abs().max()), 1e-3)
        assert float((parts_gradients[weight] - gradient).abs().max()) <= GRADIENT * scale, weight


@pytest.mark.parametrize("mask", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["BertForMaskedLM", "DistilBertForMaskedLM", "GPT2LMHeadModel"])
def test_a_batch_without_a_mask_is_all_samples_in_full(name: str, mask: str, strong: Strong) -> None:
    model = made(strong, name, attn_implementation=mask)
    batch = batch_for(name)
    del batch["attention_mask"]
    assert of_parts(model, batch)[0] == pytest.approx(of_whole(model, batch)[0], rel=LOSS)


@pytest.mark.parametrize("mask", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["BertForMaskedLM", "DistilBertForMaskedLM", "GPT2LMHeadModel"])
def test_a_mask_that_is_lost_would_be_seen(
    name: str, mask: str, strong: Strong, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The very comparison above, with blocks that are called without a mask, fails by far: it is no test of small numbers."""
    model = made(strong, name, attn_implementation=mask)
    batch = batch_for(name)
    loss, gradients = of_whole(model, batch)
    monkeypatch.setattr(split._PaddingMask, "__call__", lambda self, hidden, padding: None)  # pyright: ignore[reportPrivateUsage]
    parts_loss, parts_gradients = of_parts(model, batch)
    assert abs(parts_loss - loss) > 1000 * LOSS * loss
    worst = max(
        float((parts_gradients[weight] - each).abs().max() / each.abs().max()) for weight, each in gradients.items()
    )
    assert worst > 1000 * GRADIENT


@pytest.mark.parametrize("mask", ["sdpa", "eager"])
def test_what_comes_later_does_not_change_what_a_decoder_says_of_earlier_tokens(mask: str, strong: Strong) -> None:
    stack = as_stack(made(strong, "GPT2LMHeadModel", attn_implementation=mask)).eval()
    batch = batch_for("GPT2LMHeadModel")
    del batch["attention_mask"]
    changed = {**batch, "input_ids": batch["input_ids"].clone()}
    changed["input_ids"][:, -1] = 3

    def hidden(of: Mapping[str, Tensor]) -> Tensor:
        passed, _ = stack.pair(of)
        for layer in stack.layers:
            passed = layer(passed)
        found: Tensor = passed[0]
        return found.detach()

    one, other = hidden(batch), hidden(changed)
    torch.testing.assert_close(one[:, :-1], other[:, :-1], rtol=1e-5, atol=1e-5)
    assert float((one[:, -1] - other[:, -1]).abs().max()) > 0.1


@pytest.mark.parametrize("name", HEADS)
def test_the_parts_are_the_models_own_weights_each_once(name: str, strong: Strong) -> None:
    model = made(strong, name)
    stack = as_stack(model)
    assert {id(parameter) for parameter in stack.parameters()} == {id(parameter) for parameter in model.parameters()}
    assert sum(p.numel() for p in stack.parameters()) == sum(p.numel() for p in model.parameters())
    assert {id(buffer) for buffer in stack.buffers()} == {id(buffer) for buffer in model.buffers()}
    assert len(stack.layers) == 4, "embedding, two blocks, head"
    assert stack.recomputable() == [1, 2]


@pytest.mark.parametrize("name", ["BertForMaskedLM", "DistilBertForMaskedLM", "GPT2LMHeadModel"])
def test_a_tied_weight_stands_in_the_first_and_the_last_layer(name: str, strong: Strong) -> None:
    structure = structure_of(made(strong, name))
    stack = as_stack(structure)
    first, last = ({id(parameter) for parameter in stack.layers[end].parameters()} for end in (0, -1))
    assert first & last == {id(structure.get_input_embeddings().weight)}  # type: ignore[operator]
    untied = as_stack(made(strong, name, tie_word_embeddings=False))
    assert not {id(p) for p in untied.layers[0].parameters()} & {id(p) for p in untied.layers[-1].parameters()}


def test_splitting_leaves_the_model_as_it_is(strong: Strong) -> None:
    model = made(strong, "BertForPreTraining")
    names = [name for name, _ in model.named_modules()]
    batch = batch_for("BertForPreTraining")
    loss, _ = of_whole(model, batch)
    of_parts(model, batch)
    assert [name for name, _ in model.named_modules()] == names
    assert of_whole(model, batch)[0] == loss


def test_two_micro_batches_in_flight_each_keep_their_own_mask(strong: Strong) -> None:
    """As in a pipeline: the first goes forward, then the second, and the first comes back later."""
    model = made(strong, "GPT2LMHeadModel", attn_implementation="eager")
    stack = as_stack(model)
    batch = batch_for("GPT2LMHeadModel")
    other = {**batch, "attention_mask": batch["attention_mask"].flip(0), "labels": batch["input_ids"]}
    given = [stack.pair(each) for each in (batch, other)]
    passed = [inputs for inputs, _ in given]
    for layer in stack.layers:
        passed = [layer(inputs) for inputs in passed]
    losses = [stack.loss(inputs, labels) for inputs, (_, labels) in zip(passed, given, strict=True)]
    for loss, each in zip(losses, (batch, other), strict=True):
        assert loss.item() == pytest.approx(of_whole(model, each)[0], rel=LOSS)


# -- what cannot be split ------------------------------------------------------------------------------------------


def test_another_family_is_refused_with_those_that_can(strong: Strong) -> None:
    with pytest.raises(JobError) as caught:
        as_stack(nn.Linear(2, 2))
    assert str(caught.value) == (
        "Linear is neither a list of layers nor of a family that can be split (Bert, DistilBert, GPT2)"
    )


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        ("BertForMaskedLM", {"is_decoder": True}, "BertForMaskedLM as a decoder cannot be split"),
        ("GPT2LMHeadModel", {"add_cross_attention": True}, "GPT2LMHeadModel with cross-attention cannot be split"),
        ("GPT2ForSequenceClassification", {"pad_token_id": 0}, "GPT2ForSequenceClassification is neither a list of"),
    ],
)
def test_what_would_compute_something_else_is_refused(
    name: str, changes: dict[str, Any], text: str, strong: Strong
) -> None:
    with pytest.raises(JobError, match=text):
        as_stack(strong(name, **changes))


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        (
            (torch.ones(1), torch.ones(1)),
            "a split transformers model must get batches that are mappings with input_ids",
        ),
        ({"tokens": torch.ones(1)}, "a split transformers model must get batches that are mappings with input_ids"),
        (
            {"input_ids": torch.ones(1), "position_ids": torch.ones(1), "labels": torch.ones(1)},
            (
                "batches of a split transformers model may hold input_ids, attention_mask, token_type_ids and labels; "
                "these hold input_ids, position_ids, labels"
            ),
        ),
        (
            {"input_ids": torch.ones(1)},
            (
                "batches of a split transformers model may hold input_ids, attention_mask, token_type_ids and labels; "
                "these hold input_ids"
            ),
        ),
    ],
)
def test_batches_that_would_be_read_wrongly_are_refused(batch: Any, text: str, strong: Strong) -> None:
    with pytest.raises(JobError) as caught:
        as_stack(made(strong, "BertForMaskedLM")).pair(batch)
    assert str(caught.value) == text


def test_token_types_for_distilbert_are_refused(strong: Strong) -> None:
    with pytest.raises(JobError) as caught:
        of_parts(made(strong, "DistilBertForMaskedLM"), batch_for("DistilBertForMaskedLM", types=True))
    assert str(caught.value) == "DistilBERT takes no token_type_ids"
