"""Lists of layers as users write them for DeepSpeed, and what a forward pass may give as its loss."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bo_tuner.objectives.training.job.errors import JobError
from bo_tuner.objectives.training.job.layers import LayerStack, layer_stack, loss_of, module_of
from bo_tuner.objectives.training.job.split import as_stack

GIVEN = torch.tensor([[1.0, -2.0, 3.0], [0.5, 0.0, -1.0]])
LABELS = torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 2.0]])


def mean_square(outputs: Tensor, labels: Tensor) -> Tensor:
    return ((outputs - labels) ** 2).mean()


def transposed(module: nn.Module, inputs: Tensor) -> Tensor:
    return inputs @ module.weight  # type: ignore[operator]  # a linear layer's


# -- lists of layers -----------------------------------------------------------------------------------------------


def test_modules_and_functions_are_called_one_after_the_other() -> None:
    linear = nn.Linear(3, 3)
    stack = layer_stack([linear, lambda hidden: hidden * 2, torch.tanh, nn.Identity()], mean_square)
    assert len(stack.layers) == 4
    assert stack.layers[0] is linear
    assert torch.equal(stack(GIVEN, LABELS), mean_square(torch.tanh(linear(GIVEN) * 2), LABELS))


def test_layer_specs_are_built() -> None:
    from deepspeed.pipe import LayerSpec

    stack = layer_stack([LayerSpec(nn.Linear, 3, 5, bias=False), LayerSpec(nn.ReLU), nn.Linear(5, 3)], mean_square)
    first = stack.layers[0]
    assert isinstance(first, nn.Linear) and first.bias is None and first.out_features == 5
    expected = stack.layers[2](torch.relu(first(GIVEN)))
    assert torch.equal(stack(GIVEN, LABELS), mean_square(expected, LABELS))


def test_tied_specs_of_one_key_share_a_module_and_use_it_in_their_own_way() -> None:
    from deepspeed.pipe import TiedLayerSpec

    stack = layer_stack(
        [
            TiedLayerSpec("table", nn.Linear, 3, 5, bias=False),
            torch.tanh,
            TiedLayerSpec("table", nn.Linear, 3, 5, bias=False, forward_fn=transposed),
            TiedLayerSpec("other", nn.Linear, 3, 3),
            TiedLayerSpec("other", nn.Linear, 3, 3),
        ],
        mean_square,
    )
    table, other = stack.layers[0], stack.layers[3]
    assert stack.layers[4] is other and table is not other
    hidden = torch.tanh(table(GIVEN)) @ table.get_parameter("weight")
    assert torch.equal(stack(GIVEN, LABELS), mean_square(other(other(hidden)), LABELS))
    assert sum(parameter.numel() for parameter in stack.parameters()) == 15 + 12


def test_a_loss_may_be_a_module_with_weights_that_are_trained() -> None:
    class Weighed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
            return self.scale * mean_square(outputs, labels)

    stack = layer_stack([nn.Linear(3, 3)], Weighed())
    assert [name for name, _ in stack.named_parameters()] == ["layers.0.weight", "layers.0.bias", "loss.scale"]
    stack(GIVEN, LABELS).backward()
    assert all(parameter.grad is not None for parameter in stack.parameters())
    assert stack.recomputable() == [0]


def test_a_list_without_layers_is_refused() -> None:
    with pytest.raises(JobError) as caught:
        layer_stack([], mean_square)
    assert str(caught.value) == "a list of layers must hold at least one layer; it is empty"


def test_what_is_no_layer_is_refused_by_its_place() -> None:
    with pytest.raises(JobError) as caught:
        layer_stack([nn.Identity(), 3], mean_square)
    assert str(caught.value) == "layer 1 must be a module, a function, or DeepSpeed's LayerSpec; it is int"


def test_batches_are_pairs_and_lists_in_them_become_tuples() -> None:
    stack = layer_stack([nn.Identity()], mean_square)
    inputs, labels = stack.pair([[GIVEN, GIVEN], LABELS])
    assert inputs == (GIVEN, GIVEN) and labels is LABELS
    assert stack.pair((GIVEN, [LABELS])) == (GIVEN, (LABELS,))


@pytest.mark.parametrize("batch", [GIVEN, (GIVEN,), {"input_ids": GIVEN, "labels": LABELS}, (GIVEN, LABELS, LABELS)])
def test_batches_that_are_no_pairs_are_refused(batch: Any) -> None:
    with pytest.raises(JobError) as caught:
        layer_stack([nn.Identity()], mean_square).pair(batch)
    assert (
        str(caught.value) == f"batches of a list of layers must be pairs (inputs, labels); got {type(batch).__name__}"
    )


# -- what a model function returns ---------------------------------------------------------------------------------


def test_a_module_is_taken_as_it_is_and_a_pair_becomes_a_stack() -> None:
    model = nn.Linear(3, 3)
    assert module_of(model, "it") is model
    for layers in ([nn.Linear(3, 3), torch.tanh], nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.ModuleList([model])):
        stack = module_of((layers, mean_square), "it")
        assert isinstance(stack, LayerStack) and as_stack(stack) is stack
        assert len(stack.layers) == len(layers)


@pytest.mark.parametrize(
    ("made", "described"),
    [
        (None, "nothing"),
        (nn.Sequential(nn.Linear(1, 1)), "Sequential without a loss"),
        (nn.ModuleList([nn.Linear(1, 1)]), "ModuleList without a loss"),
        ([nn.Linear(1, 1)], "list without a loss"),
        (([nn.Linear(1, 1)], "mse"), "a tuple of list, str"),
        ((nn.Linear(1, 1), mean_square), "a tuple of Linear, function"),
        (3, "int"),
    ],
)
def test_anything_else_is_refused_by_what_it_is(made: Any, described: str) -> None:
    with pytest.raises(JobError) as caught:
        module_of(made, "the model function")
    assert str(caught.value) == (
        "the model function must return a module whose forward gives a loss, or a pair (layers, loss); "
        f"it returned {described}"
    )


# -- the loss in what forward gives --------------------------------------------------------------------------------


def test_a_loss_is_found_in_every_usual_form() -> None:
    loss = (torch.ones(1, requires_grad=True) * 2).sum()
    for output in (loss, SimpleNamespace(loss=loss), {"loss": loss, "logits": 3}, (loss, "logits"), [loss]):
        assert loss_of(output) is loss
    assert loss_of(torch.ones(1, 1, requires_grad=True) * 3).shape == ()


def test_transformers_outputs_give_their_loss_not_their_first_entry() -> None:
    from transformers.modeling_outputs import MaskedLMOutput

    loss = torch.ones((), requires_grad=True) * 2
    assert loss_of(MaskedLMOutput(logits=torch.ones(3, requires_grad=True), loss=loss)) is loss


@pytest.mark.parametrize(
    ("output", "text"),
    [
        ("high", "forward must give a loss (a scalar tensor, .loss, ['loss'], or the first of a tuple); it gave str"),
        (None, "or the first of a tuple); it gave NoneType"),
        ({"logits": torch.ones(1)}, "it gave dict whose loss is NoneType"),
        (SimpleNamespace(loss=0.5), "it gave SimpleNamespace whose loss is float"),
        ((), "it gave tuple"),
        (torch.ones(2, 3, requires_grad=True), "the loss must be a scalar, and has shape (2, 3): take its mean"),
        (
            torch.ones(1),
            "a gradient must flow from the loss, and none does: it is detached, or computed without any weight",
        ),
    ],
)
def test_what_is_no_loss_to_train_with_is_refused(output: Any, text: str) -> None:
    with pytest.raises(JobError) as caught:
        loss_of(output)
    assert str(caught.value).endswith(text)
