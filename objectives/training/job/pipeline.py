"""A layer stack as the stages of DeepSpeed's PipelineModule."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .layers import LayerStack, loss_of
from .structure import Initialise, place

__all__ = ["data_parallel_rank", "pipeline_module", "stage_of"]


def data_parallel_rank(rank: int, *, n_replicas: int) -> int:
    """Which replica a rank belongs to: DeepSpeed numbers ranks stage by stage."""
    return rank % n_replicas


def stage_of(rank: int, *, n_replicas: int) -> int:
    """Which pipeline stage a rank holds."""
    return rank // n_replicas


class _Stage(nn.Module):
    """The layers of one stage, one after the other."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, inputs: Any) -> Any:
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs


class _TiedWeight(nn.Module):
    """Shows DeepSpeed a weight that other stages hold too; passes everything on."""

    def __init__(self, weight: nn.Parameter | None) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, inputs: Any) -> Any:
        return inputs


def pipeline_module(
    stack: LayerStack,
    bounds: Sequence[int],
    *,
    stage: int,
    device: torch.device,
    initialise: Initialise,
    shapes_differ: bool = False,
) -> nn.Module:
    """This rank's stage of `stack` inside a PipelineModule, with `stack.pair` as its own. Only layers of this stage get weights.

    DeepSpeed's own partition counts layers or parameters; ours is given, so every stage is made one layer of a PipelineModule,
    behind one that shows each weight tied across stages: DeepSpeed sums the gradients of those.

    Args:
        stack: The whole model, without weights.
        bounds: Stage s holds layers bounds[s] to bounds[s + 1] - 1.
        stage: This rank's.
        device: Where it computes.
        initialise: Gives modules their first weights.
        shapes_differ: One micro-batch may be longer than another; then stages tell each other the shape of every one. Otherwise
            DeepSpeed takes all for as long as the first, and trains with remains of earlier ones where they are shorter.
    """
    from deepspeed.pipe import PipelineModule, TiedLayerSpec

    stages = [_Stage(stack.layers[begin:end]) for begin, end in itertools.pairwise(bounds)]  # type: ignore[arg-type]  # a slice is a ModuleList
    if isinstance(stack.loss, nn.Module):
        stages[-1].add_module("loss", stack.loss)
    shared = _shared_weights(stages)
    own = stages[stage]
    place(own, device=device, initialise=initialise)
    weights = _named_tied(own)
    layers: list[Any] = []
    for number, other in enumerate(stages):
        for key, holders in shared.items():
            tied = weights[holders[stage]] if stage in holders else None
            layers.append(
                TiedLayerSpec(key, _TiedWeight, tied, tied_weight_attr="weight") if number in holders else nn.Identity()
            )
        layers.append(other if number == stage else nn.Identity())
    module: nn.Module = PipelineModule(
        layers,
        num_stages=len(stages),
        loss_fn=_checked(stack.loss),
        partition_method="uniform",
        dynamic_shape=shapes_differ,
    )
    module.pair = stack.pair  # type: ignore[assignment]  # a method, not a part
    return module


def _named_tied(stage: nn.Module) -> dict[str, nn.Parameter]:
    return dict(stage.named_parameters(remove_duplicate=False))


def _shared_weights(stages: Sequence[nn.Module]) -> dict[str, dict[int, str]]:
    """Weights held by several stages: key -> stage -> its name there. Keys sort alike in every rank."""
    holders: dict[int, dict[int, str]] = {}
    for number, stage in enumerate(stages):
        for name, parameter in stage.named_parameters(remove_duplicate=False):
            holders.setdefault(id(parameter), {}).setdefault(number, name)
    shared = [found for found in holders.values() if len(found) > 1]
    return {f"tied{number}": found for number, found in enumerate(shared)}


def _checked(loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Tensor]:
    def compute(outputs: Any, labels: Any) -> Tensor:
        return loss_of(loss(outputs, labels))

    return compute
