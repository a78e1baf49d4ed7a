"""Stages of DeepSpeed's PipelineModule, in real ranks: they learn exactly what the whole model learns."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from bo_tuner.objectives.training.job.data import micro_batches
from bo_tuner.objectives.training.job.hugging_face import architecture_of
from bo_tuner.objectives.training.job.layers import layer_stack, loss_of
from bo_tuner.objectives.training.job.pipeline import data_parallel_rank, stage_of
from bo_tuner.objectives.training.job.split import as_stack

if TYPE_CHECKING:
    from tests.objectives.training.job.conftest import Ranks

Small = Callable[[str], Callable[..., Any]]
Strong = Callable[..., nn.Module]
N_STEPS = 2


@dataclass(frozen=True)
class Case:
    """One way to cut a model of four layers, and to train it."""

    model: str
    n_ranks: int
    stages: tuple[int, ...]
    zero_stage: int = 0
    grad_accum_steps: int = 1
    recompute: bool = False
    mask: str = "sdpa"
    data: str | None = "ragged"
    """A function of small_data.py; None for samples made up by the job itself."""

    @property
    def depth(self) -> int:
        return len(self.stages) - 1


CASES = {
    "bert, two stages, accumulated": Case("BertForMaskedLM", 2, (0, 2, 4), grad_accum_steps=3, data=None),
    "gpt2, two stages, sharded": Case("GPT2LMHeadModel", 2, (0, 1, 4), zero_stage=1, mask="eager"),
    "gpt2, four stages": Case("GPT2LMHeadModel", 4, (0, 1, 2, 3, 4), grad_accum_steps=3),
    "bert, two replicas, sharded": Case("BertForMaskedLM", 4, (0, 3, 4), zero_stage=1, grad_accum_steps=2, data=None),
    "gpt2, two replicas, recomputed": Case("GPT2LMHeadModel", 4, (0, 2, 4), recompute=True, mask="eager"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_stages_learn_what_the_whole_model_learns(case: Case, ranks: Ranks, strong: Strong, small: Small) -> None:
    model = strong(case.model, attn_implementation=case.mask)
    found = ranks.train(
        model,
        data=case.data,
        n_ranks=case.n_ranks,
        n_steps=N_STEPS,
        zero_stage=case.zero_stage,
        grad_accum_steps=case.grad_accum_steps,
        stages=case.stages,
        recompute=case.recompute,
    )
    before = by_layer(model)
    data = small(case.data) if case.data is not None else functools.partial(made_up, model, case.n_ranks // case.depth)
    losses, after = trained_whole(model, data, n_replicas=case.n_ranks // case.depth, accum=case.grad_accum_steps)
    check_stages(found, case.stages, before, losses, after)
    check_tied(found, "0.parts", "3.head")
    moved = max(float((after[name] - before[name]).abs().max()) for name in after if name.startswith("0.parts"))
    assert moved > 1e-2, "the tied weight must have learned enough to tell"


def test_a_list_of_layers_with_functions_a_tied_module_and_a_loss_with_weights_is_cut_too(
    ranks: Ranks, small: Small
) -> None:
    from deepspeed.pipe import TiedLayerSpec

    class Weighed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
            return ((self.scale * outputs - labels) ** 2).mean()

    layers = [
        TiedLayerSpec("square", nn.Linear, 4, 4, tied_weight_attr=["weight", "bias"]),
        lambda hidden: hidden.tanh(),
        TiedLayerSpec("square", nn.Linear, 4, 4, tied_weight_attr=["weight", "bias"]),
        nn.Linear(4, 1),
    ]
    stack = layer_stack(layers, Weighed())
    found = ranks.train(stack, data="vectors", stages=(0, 2, 4), n_steps=N_STEPS)
    before = by_layer(stack)
    losses, after = trained_whole(stack, small("vectors"), n_replicas=1, accum=1)
    check_stages(found, (0, 2, 4), before, losses, after)
    assert found[1]["after"].keys() == {"2.weight", "2.bias", "3.weight", "3.bias", "loss.scale"}
    for name in ("weight", "bias"):
        assert torch.equal(found[0]["after"][f"0.{name}"], found[1]["after"][f"2.{name}"])


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_in_16_bit_the_copies_of_a_tied_weight_stay_one(zero_stage: int, ranks: Ranks, strong: Strong) -> None:
    found = ranks.train(
        strong("GPT2LMHeadModel"),
        n_ranks=2,
        n_steps=3,
        zero_stage=zero_stage,
        grad_accum_steps=2,
        stages=(0, 2, 4),
        precision="bf16",
        optimizer=None,
    )
    assert all(torch.isfinite(torch.tensor(report["losses"])).all() for report in found)
    check_tied(found, "0.parts", "3.head")
    tied = "0.parts.tokens.weight"
    assert not torch.equal(found[0]["after"][tied], found[0]["before"][tied])


def test_replicas_and_stages_are_numbered_as_deepspeed_numbers_them() -> None:
    from deepspeed.runtime.pipe.topology import PipeDataParallelTopology

    topology = PipeDataParallelTopology(num_pp=3, num_dp=2)
    for rank in range(6):
        place = topology.get_coord(rank)
        assert (stage_of(rank, n_replicas=2), data_parallel_rank(rank, n_replicas=2)) == (place.pipe, place.data)


def by_layer(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the weights by their place in the chain of layers, and those of the loss."""
    stack = as_stack(model)
    parts: dict[str, nn.Module] = {f"{number}": layer for number, layer in enumerate(stack.layers)}
    if isinstance(stack.loss, nn.Module):
        parts["loss"] = stack.loss
    return {
        f"{place}.{name}": parameter.detach().clone()
        for place, part in parts.items()
        for name, parameter in part.named_parameters(remove_duplicate=False)
    }


def made_up(model: nn.Module, n_replicas: int, micro_batch_size: int, rank: int, seed: int) -> Iterator[Any]:
    """Samples as the job makes them up for replica `rank`."""
    job = {"model": {"architecture": architecture_of(model)}, "data": None, "seq_len": 8, "seed": seed}
    return micro_batches(job, micro_batch_size=micro_batch_size, rank=rank, world_size=n_replicas)


def trained_whole(
    model: nn.Module, data: Callable[..., Any], *, n_replicas: int, accum: int
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights when torch alone trains on the samples of all replicas: gradients are the mean over micro-batches."""
    model = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [data(micro_batch_size=2, rank=rank, seed=0) for rank in range(n_replicas)]
    losses: list[float] = []
    for _ in range(N_STEPS):
        optimizer.zero_grad()
        micro_batches = [batch for replica in batches for batch in itertools.islice(replica, accum)]
        parts = [loss_of(called(model, batch)) for batch in micro_batches]
        loss = torch.stack(parts).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, by_layer(model)


def called(model: nn.Module, batch: Any) -> Any:
    return model(**batch) if isinstance(batch, dict) else model(*batch)


def check_stages(
    found: Sequence[dict[str, Any]],
    stages: Sequence[int],
    before: dict[str, Tensor],
    losses: Sequence[float],
    after: dict[str, Tensor],
) -> None:
    """Every rank holds the layers of its stage and no others, began with the caller's weights, and learned as the whole."""
    n_replicas = len(found) // (len(stages) - 1)
    for rank, report in enumerate(found):
        stage = rank // n_replicas
        own = {f"{number}" for number in range(stages[stage], stages[stage + 1])}
        if stage == len(stages) - 2:
            own.add("loss")
        assert report["after"].keys() == {name for name in after if name.partition(".")[0] in own}
        assert report["losses"] == pytest.approx(losses, rel=1e-5)
        for name, weight in report["after"].items():
            assert torch.equal(report["before"][name], before[name]), name
            torch.testing.assert_close(weight, after[name], rtol=1e-5, atol=2e-6, msg=f"{name} of rank {rank}")
    assert any(not torch.allclose(after[name], before[name], atol=1e-3) for name in after)


def check_tied(found: Sequence[dict[str, Any]], *ends: str) -> None:
    """The copies of the tied weight are bitwise the same on all ranks."""
    copies = [
        weight
        for report in found
        for name, weight in report["after"].items()
        if name.startswith(ends)
        and name.endswith(("tokens.weight", "word_embeddings.weight", "decoder.weight", "lm_head.weight"))
    ]
    assert len(copies) >= 2
    assert all(torch.equal(copies[0], other) for other in copies[1:])
