"""What each layer of a chain costs, measured one layer at a time: no more than one has weights at any moment."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from bo_tuner.objectives.training.job.data import describe
from bo_tuner.objectives.training.job.errors import JobError
from bo_tuner.objectives.training.job.functions import one_line
from bo_tuner.objectives.training.job.layers import LayerStack, loss_of
from bo_tuner.objectives.training.job.structure import Initialise, digest, place

__all__ = ["LayerError", "layer_parameters", "layer_times"]

_LONGEST_S = 1.5
"""A layer that takes longer is repeated no more."""


class LayerError(JobError):
    """A layer, or the loss, fails on what comes to it."""


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
        _check_tensors(part, f"its data give {what} that are")
    times: list[float] = []
    known: dict[Any, tuple[float, Any]] = {}
    for number, original in enumerate(stack.layers):
        is_last = number == len(stack.layers) - 1
        name = f"layer {number} ({type(original).__name__})"
        key = (_kind(original), _shapes(inputs), is_last)
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


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    """Equal for layers that do the same work: the same classes, parameters and settings. A number that only counts layers is none."""
    settings: list[Any] = [digest(layer)]
    for module in layer.modules():
        settings.append(type(module))
        for name, value in sorted(vars(module).items()):
            counts = type(value) is int and name.endswith(("idx", "index", "id", "number"))
            if isinstance(value, bool | int | float | str) and not counts:
                settings.append((name, value))
            elif callable(value) and not isinstance(value, type):
                settings.append((name, id(value)))
    return tuple(settings)


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
        given = _fresh(inputs, dtype)
        started = time.perf_counter()
        with _told(f"{name} must take {describe(given)}"):
            outputs = layer(given)
        if end is None:
            _check(outputs, name)
            ends = [tensor for tensor in _tensors(outputs) if tensor.is_floating_point()]
            torch.autograd.backward(ends, [torch.ones_like(tensor) for tensor in ends])
        else:
            with _told(f"the loss must take {describe(outputs)} and {describe(end[1])}"):
                loss = end[0](outputs, end[1])
            torch.autograd.backward(loss_of(loss))
        if needs_gradients and any(tensor.is_floating_point() and tensor.grad is None for tensor in _tensors(given)):
            raise JobError(f"{name} makes no use of a tensor that it is given, so that no gradient goes back")
        _synchronise(given)
        if repeat:
            best = min(best, time.perf_counter() - started)
            if time.perf_counter() - began > _LONGEST_S:
                break
    return best, _detached(outputs)


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    try:
        yield
    except (JobError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise LayerError(f"{what}, and raises {type(error).__name__}: {one_line(error)}") from error


def _synchronise(value: Any) -> None:
    if any(tensor.is_cuda for tensor in _tensors(value)):
        torch.cuda.synchronize()


def _check(outputs: Any, name: str) -> None:
    _check_tensors(outputs, f"{name} gives")
    if any(tensor.is_floating_point() and not tensor.requires_grad for tensor in _tensors(outputs)):
        raise JobError(f"{name} gives a floating-point tensor that no gradient flows through")


def _check_tensors(value: Any, who_gives: str) -> None:
    parts = value if isinstance(value, tuple) else (value,)
    if not parts or not all(isinstance(part, Tensor) for part in parts):
        kinds = ", ".join(type(part).__name__ for part in parts)
        described = f"a tuple of {kinds or 'nothing'}" if isinstance(value, tuple) else f"a {kinds}"
        raise JobError(f"{who_gives} {described}, and only a tensor or a tuple of tensors passes from stage to stage")


def _tensors(value: Any) -> Iterator[Tensor]:
    for part in value if isinstance(value, tuple) else (value,):
        if isinstance(part, Tensor):
            yield part


def _fresh(value: Any, dtype: torch.dtype) -> Any:
    """Inputs as another stage would send them: floats in the model's type, with a gradient to be asked for."""
    if isinstance(value, tuple):
        return tuple(_fresh(part, dtype) for part in value)
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().to(dtype).requires_grad_()
    return value


def _detached(value: Any) -> Any:
    return tuple(part.detach() for part in value) if isinstance(value, tuple) else value.detach()


def _shapes(value: Any) -> str:
    return " ".join(f"{tensor.dtype}{tuple(tensor.shape)}" for tensor in _tensors(value))
