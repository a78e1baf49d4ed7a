"""What each layer of a chain costs, measured one layer at a time: no more than one has weights at any moment."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from torch import nn

from bo_tuner.objectives.training.chain import (
    check_gradients,
    check_outputs,
    check_tensors,
    fresh,
    kind_of,
    shapes_of,
    tensors_of,
    told,
)
from bo_tuner.objectives.training.job.data import describe
from bo_tuner.objectives.training.job.layers import LayerStack, loss_of
from bo_tuner.objectives.training.job.structure import Initialise, place

__all__ = ["layer_parameters", "layer_times"]

_LONGEST_S = 1.5
"""A layer that takes longer is repeated no more."""


def layer_parameters(stack: LayerStack) -> list[int]:
    """Parameters of each layer; tied ones count wherever they are used, those of the loss with the last layer."""
    counts = [sum(parameter.numel() for parameter in layer.parameters()) for layer in stack.layers]
    if isinstance(stack.loss, nn.Module):
        counts[-1] += sum(parameter.numel() for parameter in stack.loss.parameters())
    return counts


def layer_times(
    stack: LayerStack,
    batch: Any,
    *,
    device: torch.device,
    dtype: torch.dtype,
    initialise: Initialise,
    n_repeats: int = 3,
) -> list[float]:
    """Seconds of forward and backward of each layer; layers that are alike are measured once.

    Args:
        stack: Without weights; left as it is.
        batch: One micro-batch on `device`.
        device: Where to measure.
        dtype: Of weights and activations.
        initialise: Gives layers their weights.
        n_repeats: Timed passes after one to warm up; 0 only checks that the layers fit together.

    Raises:
        JobError: What a layer gives cannot pass from stage to stage; a LayerError where one fails.
    """
    inputs, labels = stack.pair(batch)
    for part, what in ((inputs, "inputs"), (labels, "labels")):
        check_tensors(part, f"its data give {what} that are")
    times: list[float] = []
    known: dict[Any, tuple[float, Any]] = {}
    for number, original in enumerate(stack.layers):
        is_last = number == len(stack.layers) - 1
        name = f"layer {number} ({type(original).__name__})"
        key = (kind_of(original), shapes_of(inputs), is_last)
        if key not in known:
            layer, loss = copy.deepcopy((original, stack.loss))
            placed = nn.ModuleList([layer, *([loss] if isinstance(loss, nn.Module) and is_last else [])])
            place(placed, device=device, initialise=initialise)
            placed.to(dtype).train()
            # The first layer's inputs come from the data, and no stage waits for their gradient.
            known[key] = _timed(layer, inputs, (loss, labels) if is_last else None, name, dtype, n_repeats, number > 0)
            del layer, loss, placed
        seconds, outputs = known[key]
        times.append(seconds)
        inputs = outputs
    return times


def _timed(
    layer: nn.Module,
    inputs: Any,
    end: tuple[Any, Any] | None,
    name: str,
    dtype: torch.dtype,
    n_repeats: int,
    needs_gradients: bool,
) -> tuple[float, Any]:
    """Best time of a few repeats, after one to warm up, and the output."""
    best = float("inf")
    outputs: Any = None
    began = time.perf_counter()
    for repeat in range(1 + n_repeats):
        given = fresh(inputs, dtype)
        started = time.perf_counter()
        with told(f"{name} must take {describe(given)}"):
            outputs = layer(given)
        if end is None:
            check_outputs(outputs, name)
            ends = [tensor for tensor in tensors_of(outputs) if tensor.is_floating_point()]
            torch.autograd.backward(ends, [torch.ones_like(tensor) for tensor in ends])
        else:
            with told(f"the loss must take {describe(outputs)} and {describe(end[1])}"):
                loss = end[0](outputs, end[1])
            torch.autograd.backward(loss_of(loss))
        check_gradients(given if needs_gradients else (), name)
        _synchronise(given)
        if repeat:
            best = min(best, time.perf_counter() - started)
            if time.perf_counter() - began > _LONGEST_S:
                break
    return best, _detached(outputs)


def _synchronise(value: Any) -> None:
    if any(tensor.is_cuda for tensor in tensors_of(value)):
        torch.cuda.synchronize()


def _detached(value: Any) -> Any:
    return tuple(part.detach() for part in value) if isinstance(value, tuple) else value.detach()
