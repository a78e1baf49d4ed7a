"""What passes from layer to layer of a chain, what must not, and which layers are alike."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from bo_tuner.objectives.training.job.errors import JobError
from bo_tuner.objectives.training.job.functions import one_line
from bo_tuner.objectives.training.job.structure import digest

__all__ = [
    "LayerError",
    "check_gradients",
    "check_outputs",
    "check_tensors",
    "fresh",
    "kind_of",
    "shapes_of",
    "tensors_of",
    "told",
]


class LayerError(JobError):
    """A layer, or the loss, fails on what comes to it."""


def kind_of(layer: nn.Module) -> tuple[Any, ...]:
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


@contextlib.contextmanager
def told(what: str) -> Iterator[None]:
    """Whatever a layer raises inside, except for want of memory, is told as breaking the rule `what`."""
    try:
        yield
    except (JobError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise LayerError(f"{what}, and raises {type(error).__name__}: {one_line(error)}") from error


def check_outputs(outputs: Any, name: str) -> None:
    """Refuse, with a JobError, what cannot pass to the next stage or no gradient comes back for."""
    check_tensors(outputs, f"{name} gives")
    if any(tensor.is_floating_point() and not tensor.requires_grad for tensor in tensors_of(outputs)):
        raise JobError(f"{name} gives a floating-point tensor that no gradient flows through")


def check_gradients(given: Any, name: str) -> None:
    """Refuse, with a JobError, a layer that a backward pass has gone through without a gradient for all that it was given."""
    if any(tensor.is_floating_point() and tensor.grad is None for tensor in tensors_of(given)):
        raise JobError(f"{name} makes no use of a tensor that it is given, so that no gradient goes back")


def check_tensors(value: Any, who_gives: str) -> None:
    """Refuse what is neither a tensor nor a tuple of tensors.

    Raises:
        JobError: It is something else.
    """
    parts = value if isinstance(value, tuple) else (value,)
    if not parts or not all(isinstance(part, Tensor) for part in parts):
        kinds = ", ".join(type(part).__name__ for part in parts)
        described = f"a tuple of {kinds or 'nothing'}" if isinstance(value, tuple) else f"a {kinds}"
        raise JobError(f"{who_gives} {described}, and only a tensor or a tuple of tensors passes from stage to stage")


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Of a tensor itself, of a tuple its members."""
    for part in value if isinstance(value, tuple) else (value,):
        if isinstance(part, Tensor):
            yield part


def fresh(value: Any, dtype: torch.dtype) -> Any:
    """Inputs as another stage would send them: floats in the model's type, with a gradient to be asked for."""
    if isinstance(value, tuple):
        return tuple(fresh(part, dtype) for part in value)
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().to(dtype).requires_grad_()
    return value


def shapes_of(value: Any) -> str:
    """Types and shapes, to compare."""
    return " ".join(f"{tensor.dtype}{tuple(tensor.shape)}" for tensor in tensors_of(value))
