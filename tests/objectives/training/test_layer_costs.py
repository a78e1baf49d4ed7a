"""What the layers of a chain cost, measured one at a time on the structure alone."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bo_tuner.objectives.training.job.errors import JobError
from bo_tuner.objectives.training.job.hugging_face import SyntheticData, build_structure
from bo_tuner.objectives.training.job.layers import LayerStack, layer_stack
from bo_tuner.objectives.training.job.split import as_stack
from bo_tuner.objectives.training.job.structure import initialiser, structure_of
from bo_tuner.objectives.training.layer_costs import layer_parameters, layer_times
from bo_tuner.workload import ModelSpec

CPU = torch.device("cpu")
WIDTH = 16


class Working(nn.Module):
    """A layer that does its work so many times, and is counted."""

    calls: list[int] = []  # noqa: RUF012  # shared on purpose: layers are copied to be measured

    def __init__(self, n_times: int = 1, number: int = 0, *, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.n_times = n_times
        self.layer_idx = number

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls.append(self.layer_idx)
        for _ in range(self.n_times):
            hidden = torch.tanh(self.linear(hidden))
        return hidden


def mean_square(outputs: Tensor, labels: Tensor) -> Tensor:
    return ((outputs - labels) ** 2).mean()


def times_of(
    stack: LayerStack, batch: Any = None, *, n_repeats: int = 3, dtype: torch.dtype = torch.float32
) -> list[float]:
    given = (torch.randn(2, WIDTH), torch.randn(2, WIDTH)) if batch is None else batch
    return layer_times(stack, given, device=CPU, dtype=dtype, initialise=initialiser(stack), n_repeats=n_repeats)


def stack_of(*layers: Any, loss: Callable[[Any, Any], Any] = mean_square) -> LayerStack:
    found = structure_of(layer_stack(layers, loss))
    assert isinstance(found, LayerStack)
    return found


# -- times ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["bert-tiny", "distilbert-base-uncased", "gpt2"])
def test_every_layer_of_a_preset_has_its_time_the_ends_included(preset: str) -> None:
    architecture = {
        **ModelSpec.resolve(preset).architecture,
        "vocab_size": 3000,
        "n_embd": 32,
        "n_head": 2,
        "n_layer": 3,
        "dim": 32,
        "n_heads": 2,
        "n_layers": 3,
        "hidden_dim": 64,
        "bos_token_id": 1,
        "eos_token_id": 1,
    }
    stack = as_stack(build_structure(architecture))
    before = copy.deepcopy(stack)
    sample = SyntheticData(architecture, seq_len=32)[0]
    times = times_of(stack, {name: column.unsqueeze(0) for name, column in sample.items()})
    assert len(times) == len(stack.layers)
    assert all(0 < seconds < 5 for seconds in times)
    assert len(set(times[1:-1])) == 1, "alike blocks cost alike"
    assert times[0] != times[1] != times[-1]
    check_same(stack, before)


def check_same(stack: nn.Module, before: nn.Module) -> None:
    """Still without weights, the same buffers, classes and modes."""
    assert all(parameter.is_meta for parameter in stack.parameters())
    for (name, one), (other_name, other) in zip(stack.named_buffers(), before.named_buffers(), strict=True):
        assert name == other_name and torch.equal(one, other)
    assert [type(module) for module in stack.modules()] == [type(module) for module in before.modules()]
    assert [module.training for module in stack.modules()] == [module.training for module in before.modules()]
    assert not any(parameter.grad is not None for parameter in stack.parameters())


def test_layers_that_are_alike_are_measured_once_and_others_each() -> None:
    Working.calls.clear()
    stack = stack_of(*(Working(number=number) for number in range(6)), Working(2, 6), Working(2, 7), nn.Tanh())
    times = times_of(stack, n_repeats=3)
    assert [Working.calls.count(number) for number in range(8)] == [4, 0, 0, 0, 0, 0, 4, 0]
    assert len(set(times[:6])) == 1 and times[6] == times[7] and len(times) == 9


def test_the_last_layer_is_measured_with_the_loss_though_others_are_like_it() -> None:
    Working.calls.clear()
    lossy: list[int] = []

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        lossy.append(1)
        return mean_square(outputs, labels)

    times_of(stack_of(Working(), Working(), Working(), loss=loss), n_repeats=2)
    assert len(Working.calls) == 2 * 3
    assert len(lossy) == 3


@pytest.mark.parametrize("place", [0, 2, 3])
def test_a_layer_that_does_more_work_costs_more(place: int) -> None:
    times = times_of(stack_of(*(Working(50 if number == place else 1) for number in range(4))))
    others = [seconds for number, seconds in enumerate(times) if number != place]
    assert times[place] > 5 * max(others)


def test_functions_of_equal_shapes_are_not_taken_for_alike() -> None:
    """Else the second would be thought to give what the first gives, and the third layer would not fit."""

    def scaled(hidden: Tensor, by: int) -> Tensor:
        return torch.cat([hidden] * by, dim=1)

    layers = [
        nn.Linear(WIDTH, WIDTH),
        lambda hidden: hidden + 1,
        lambda hidden: hidden[:, :4],
        functools.partial(scaled, by=1),
        functools.partial(scaled, by=2),
        nn.Linear(8, WIDTH),
    ]
    assert len(times_of(stack_of(*layers))) == 6


def test_without_repeats_the_layers_are_only_checked() -> None:
    Working.calls.clear()
    assert times_of(stack_of(Working(), nn.Tanh()), n_repeats=0) == [float("inf")] * 2
    assert len(Working.calls) == 1


def test_a_loss_with_weights_and_half_precision_are_measured_too() -> None:
    class Weighed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
            assert outputs.dtype is self.linear.weight.dtype is torch.bfloat16
            return mean_square(self.linear(outputs), labels)

    stack = stack_of(nn.Linear(WIDTH, WIDTH), Working(), loss=Weighed())
    assert len(times_of(stack, dtype=torch.bfloat16)) == 2
    assert all(parameter.is_meta and parameter.dtype is torch.float32 for parameter in stack.parameters())


# -- what cannot be cut --------------------------------------------------------------------------------------------


class Giving(nn.Module):
    """A layer that gives something else than a tensor."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.make = make

    def forward(self, hidden: Any) -> Any:
        return self.make(self.linear(hidden if isinstance(hidden, Tensor) else hidden[0]))


MOVES = "and only a tensor or a tuple of tensors passes from stage to stage"


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda hidden: [hidden], f"layer 1 (Giving) gives a list, {MOVES}"),
        (lambda hidden: {"hidden": hidden}, f"layer 1 (Giving) gives a dict, {MOVES}"),
        (lambda hidden: None, f"layer 1 (Giving) gives a NoneType, {MOVES}"),
        (lambda hidden: (), f"layer 1 (Giving) gives a tuple of nothing, {MOVES}"),
        (lambda hidden: (hidden, None), f"layer 1 (Giving) gives a tuple of Tensor, NoneType, {MOVES}"),
        (
            lambda hidden: hidden.detach(),
            "layer 1 (Giving) gives a floating-point tensor that no gradient flows through",
        ),
        (
            lambda hidden: (hidden, torch.ones(2)),
            "layer 1 (Giving) gives a floating-point tensor that no gradient flows through",
        ),
        (
            lambda hidden: (hidden, hidden * 2),
            "layer 2 (Giving) makes no use of a tensor that it is given, so that no gradient goes back",
        ),
    ],
)
def test_what_cannot_pass_from_stage_to_stage_is_told_by_the_layers_place(make: Any, text: str) -> None:
    stack = stack_of(Working(), Giving(make), Giving(lambda hidden: hidden), Working())
    with pytest.raises(JobError) as caught:
        times_of(stack)
    assert str(caught.value) == text


def test_tuples_with_numbers_that_need_no_gradient_pass() -> None:
    layers = [
        Giving(lambda hidden: (hidden, torch.arange(3))),
        lambda pair: (pair[0] * pair[1].sum(), pair[1] > 1),
        lambda pair: pair[0] + pair[1].sum(),
    ]
    assert len(times_of(stack_of(*layers))) == 3


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        (({"a": torch.ones(2, WIDTH)}, torch.ones(2, WIDTH)), f"its data give inputs that are a dict, {MOVES}"),
        ((torch.ones(2, WIDTH), {"a": torch.ones(2)}), f"its data give labels that are a dict, {MOVES}"),
    ],
)
def test_data_that_cannot_go_into_a_pipeline_are_told(batch: Any, text: str) -> None:
    with pytest.raises(JobError) as caught:
        times_of(stack_of(Working(), Working()), batch)
    assert str(caught.value) == text


# -- parameters ----------------------------------------------------------------------------------------------------


def test_parameters_are_counted_layer_by_layer_with_those_of_the_loss_in_the_last() -> None:
    loss = nn.Linear(4, 1)
    stack = layer_stack([nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4, bias=False)], loss)
    assert layer_parameters(stack) == [16, 0, 16 + 5]


def test_a_tied_weight_counts_in_both_layers_that_hold_it() -> None:
    stack = as_stack(build_structure(ModelSpec.resolve("bert-tiny").architecture))
    first, *_, last = layer_parameters(stack)
    table = 30522 * 128
    assert first == table + 512 * 128 + 2 * 128 + 2 * 128
    assert last == table + 30522 + 128 * 128 + 128 + 2 * 128
