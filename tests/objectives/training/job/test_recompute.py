"""Recomputed layers: the same numbers from less memory and a second forward pass, whole and in pipelines."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from bo_tuner.objectives.training.job.errors import JobError
from bo_tuner.objectives.training.job.layers import layer_stack
from bo_tuner.objectives.training.job.recompute import recompute, recomputed_layers
from bo_tuner.objectives.training.job.split import as_stack

if TYPE_CHECKING:
    from tests.objectives.training.job.conftest import Ranks

Strong = Callable[..., nn.Module]
DROPOUT = {
    "BertForMaskedLM": {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.3},
    "GPT2LMHeadModel": {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3},
}
TOKENS = torch.randint(4, 50, (4, 24), generator=torch.Generator().manual_seed(1))
MASK = (torch.arange(24) < torch.tensor([[24], [20], [15], [9]])).long()
BATCH = {"input_ids": TOKENS, "attention_mask": MASK, "labels": TOKENS.masked_fill(MASK == 0, -100)}


def whole_loss(model: nn.Module) -> Tensor:
    found: Tensor = model(**BATCH, use_cache=False).loss  # place_model sees to that
    return found


def parts_loss(model: nn.Module) -> Tensor:
    stack = as_stack(model)
    found: Tensor = stack(*stack.pair(BATCH))
    return found


def differentiated(model: nn.Module, compute: Callable[[nn.Module], Tensor]) -> tuple[float, dict[str, Tensor], int]:
    """Loss, gradients, and bytes that the forward pass keeps for the backward pass, weights left out."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    model.zero_grad()
    torch.manual_seed(7)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = compute(model)
    n_bytes = sum(kept.values())
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}, n_bytes


@pytest.mark.parametrize("compute", [whole_loss, parts_loss])
@pytest.mark.parametrize("name", DROPOUT)
def test_loss_and_gradients_are_bitwise_the_same_with_dropout_and_less_is_kept(
    name: str, compute: Callable[[nn.Module], Tensor], strong: Strong
) -> None:
    plain = strong(name, **DROPOUT[name]).train()
    again = copy.deepcopy(plain)
    recompute(recomputed_layers(again))
    loss, gradients, kept = differentiated(plain, compute)
    other_loss, other_gradients, other_kept = differentiated(again, compute)
    assert other_loss == loss
    assert other_gradients.keys() == gradients.keys()
    for weight, gradient in gradients.items():
        assert torch.equal(other_gradients[weight], gradient), weight
    assert other_kept < 0.5 * kept
    torch.manual_seed(8)
    assert compute(again).item() != loss, "dropout must be at work"


def test_every_block_runs_twice_and_nothing_else_does(strong: Strong) -> None:
    model: Any = strong("GPT2LMHeadModel").train()
    blocks = recomputed_layers(model)
    assert blocks == list(model.transformer.h)
    recompute(blocks)
    calls: list[nn.Module] = []
    for module in (*blocks, model.transformer.wte, model.lm_head):
        module.register_forward_pre_hook(lambda module, given: calls.append(module))
    loss = whole_loss(model)
    assert [calls.count(block) for block in blocks] == [1, 1]
    loss.backward()
    assert [calls.count(block) for block in blocks] == [2, 2]
    assert calls.count(model.transformer.wte) == calls.count(model.lm_head) == 1


def test_without_training_nothing_is_recomputed(strong: Strong) -> None:
    model: Any = strong("GPT2LMHeadModel")
    recompute(recomputed_layers(model))
    calls: list[nn.Module] = []
    model.transformer.h[0].register_forward_pre_hook(lambda module, given: calls.append(module))
    whole_loss(model.eval()).backward()
    with torch.no_grad():
        whole_loss(model.train())
    assert len(calls) == 2


class Block(nn.Module):
    """A layer with an attribute, a method, and an argument that is given by name."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.note = "kept"

    def forward(self, hidden: Tensor, *, scale: float = 1.0) -> Tensor:
        return torch.tanh(self.linear(hidden)) * scale

    def doubled(self) -> int:
        return 2


class Chain(nn.Module):
    """Two lists of repeated layers, one inside the other's, and a list of different ones."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleDict({"inner": nn.ModuleList([Block(), Block()])}) for _ in range(2)])
        self.more = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.others = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.drops = nn.ModuleList([nn.Dropout(), nn.Dropout()])


def test_names_attributes_methods_and_class_of_a_layer_stay() -> None:
    plain, block = Block(), Block()
    hidden = torch.randn(3, 4, requires_grad=True)
    expected = block(hidden, scale=2.0)
    recompute([block])
    assert isinstance(block, Block) and block.note == "kept" and block.doubled() == 2
    assert [name for name, _ in block.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert block.state_dict().keys() == plain.state_dict().keys()
    assert torch.equal(block(hidden, scale=2.0), expected)
    assert type(plain) is Block, "other layers of the class are left alone"


def test_repeated_layers_are_the_outermost_lists_of_one_class_with_weights() -> None:
    model = Chain()
    assert recomputed_layers(model) == [*model.blocks, *model.more]


def test_layers_of_a_stack_are_all_that_have_weights() -> None:
    stack = layer_stack([nn.Linear(4, 4), nn.Tanh(), lambda hidden: hidden, Block()], nn.MSELoss())
    assert recomputed_layers(stack) == [stack.layers[0], stack.layers[3]]


def test_a_layer_that_stands_in_a_chain_twice_is_recomputed_once_a_pass() -> None:
    shared = Block()
    stack = layer_stack([shared, nn.Tanh(), shared], nn.MSELoss())
    plain = copy.deepcopy(stack)
    recompute(recomputed_layers(stack))
    calls: list[nn.Module] = []
    shared.register_forward_pre_hook(lambda module, given: calls.append(module))
    given = torch.randn(3, 4), torch.randn(3, 4)
    loss, expected = stack(*given), plain(*given)
    loss.backward()
    expected.backward()
    assert len(calls) == 4 and loss.item() == expected.item()
    for one, other in zip(stack.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize(
    "model",
    [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.Sequential(nn.Linear(2, 2)), nn.Dropout()],
    ids=["a layer", "different layers", "a list of one", "no weights"],
)
def test_a_model_without_repeated_blocks_says_so(model: nn.Module) -> None:
    with pytest.raises(JobError) as caught:
        recomputed_layers(model)
    assert str(caught.value) == f"{type(model).__name__} has no list of repeated layers to recompute one by one"


class Wrapped(nn.Module):
    """A user's own module around a transformers model, which keeps keys and values where it is not told otherwise."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **batch: Tensor) -> Tensor:
        found: Tensor = self.inner(**batch).loss
        return found


def test_sharded_weights_are_gathered_again_and_learn_the_same(ranks: Ranks, strong: Strong) -> None:
    model = Wrapped(strong("GPT2LMHeadModel"))
    plain, again = (ranks.train(model, zero_stage=3, recompute=choice) for choice in (False, True))
    assert again[0]["losses"] == pytest.approx(plain[0]["losses"], rel=1e-6)
    for name, weight in plain[0]["after"].items():
        torch.testing.assert_close(again[0]["after"][name], weight, rtol=1e-5, atol=1e-6)
        if "wte" in name:
            assert not torch.allclose(weight, plain[0]["before"][name], atol=1e-3)
