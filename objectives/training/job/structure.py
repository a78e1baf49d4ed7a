"""A model without its weights: how its structure is taken, told apart, and given weights again on a rank's device."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .errors import JobError
from .functions import one_line

__all__ = ["Initialise", "digest", "initialiser", "place", "structure_of", "without_weights"]

Initialise = Callable[[nn.Module], None]
"""Gives the weights that a module owns itself their values."""


def structure_of(model: nn.Module) -> nn.Module:
    """A copy of `model` whose parameters are on the meta device and whose buffers are on the CPU; ties are kept, and `model` is left
    as it is.

    A deep copy that finds meta tensors where the parameters were: `model.to("meta")` would change the caller's model, lose the
    buffers, and give tied modules a parameter each.

    Raises:
        JobError: The model cannot be copied.
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = _on_meta(parameter)
    try:
        structure = copy.deepcopy(model, memo)
    except Exception as error:
        raise JobError(
            f"model {type(model).__name__} must be one that copy.deepcopy can copy, and it raises "
            f"{type(error).__name__}: {one_line(error)}"
        ) from error
    for module in structure.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer if buffer.is_meta else buffer.cpu())  # each rank has a device of its own
    return structure


def _on_meta(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)


@contextlib.contextmanager
def without_weights() -> Iterator[None]:
    """Modules built inside get their parameters on the meta device and their buffers as usual."""
    original = nn.Module.register_parameter

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        original(self, name, param if param is None or param.is_meta else _on_meta(param))

    nn.Module.register_parameter = register  # type: ignore[method-assign]  # for the length of this context
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def digest(model: nn.Module) -> str:
    """Sixteen hexadecimal digits that differ where names, shapes, types, ties or freezing of parameters differ."""
    first_of: dict[int, str] = {}
    text = hashlib.sha256()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = first_of.setdefault(id(parameter), name)
        text.update(f"{name} {first} {tuple(parameter.shape)} {parameter.dtype} {parameter.requires_grad}\n".encode())
    return text.hexdigest()[:16]


def initialiser(model: nn.Module) -> Initialise:
    """How `model` gives its modules their first weights: a transformers model by its own rules, others by their modules'.

    Where others have rules as transformers' models have, these come on top: they often leave some modules to torch.
    """
    own: Any = getattr(model, "_init_weights", None)
    if not callable(own) or not _needs(own, 1):
        return _usual_weights
    if hasattr(model, "base_model_prefix"):
        rules: Initialise = own
        return rules

    def initialise(module: nn.Module) -> None:
        _usual_weights(module)
        own(module)

    return initialise


def _needs(function: Callable[..., Any], n_arguments: int) -> bool:
    """It can be called with so many arguments, and with no fewer."""
    parameters = inspect.signature(function).parameters.values()
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [one for one in parameters if one.default is one.empty and one.kind not in variable]
    return len(needed) == n_arguments


def _usual_weights(module: nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None)
    if callable(reset) and _needs(reset, 0):
        reset()
        return
    for name, parameter in module.named_parameters(recurse=False):
        if not parameter.is_floating_point():
            parameter.data.zero_()
        elif parameter.dim() >= 2:
            nn.init.normal_(parameter, std=0.02)
        else:
            # Scales are ones and called weight (or gamma) almost everywhere; shifts are zeros.
            nn.init.constant_(parameter, 1.0 if name.endswith(("weight", "gamma", "scale")) else 0.0)


def place(
    model: nn.Module,
    *,
    device: torch.device,
    initialise: Initialise,
    shard: Callable[[list[nn.Parameter]], None] | None = None,
) -> None:
    """Put every parameter and buffer of `model` on `device`; those without a value get fresh, finite ones. Ties are kept.

    Args:
        model: Changed in place.
        device: Where this rank computes.
        initialise: From `initialiser`.
        shard: Called with the parameters of each module in turn as soon as they have values, so that a rank never holds more
            than one module whole; None where parameters stay whole.
    """
    placed: dict[int, nn.Parameter] = {}
    fresh: set[int] = set()
    buffers: list[tuple[nn.Module, str, Tensor]] = []
    for module in model.modules():
        new: list[nn.Parameter] = []
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) not in placed:
                placed[id(parameter)] = _placed(parameter, device)
                new.append(placed[id(parameter)])
                if parameter.is_meta:
                    fresh.add(id(placed[id(parameter)]))
            setattr(module, name, placed[id(parameter)])
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                raise JobError(
                    f"buffer {name} of {type(module).__name__} must hold values, and is on the meta device: build the model "
                    "on the CPU"
                )
            buffers.append((module, name, buffer))
            setattr(module, name, buffer.to(device, copy=True))  # a rule for first weights may reset it
        if shard is not None and new:
            own = list(module.parameters(recurse=False))
            if len(new) == len(own) and all(id(parameter) in fresh for parameter in own):
                with torch.no_grad():
                    initialise(module)  # where a part is tied, and sharded by now, the rest stays zero
            shard(new)
    if shard is None:
        with torch.no_grad():
            _initialise_all(model, initialise, fresh)
    for module, name, buffer in buffers:
        setattr(module, name, buffer.to(device))


def _placed(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    value: Tensor = torch.zeros_like(parameter, device=device) if parameter.is_meta else parameter.detach().to(device)
    return nn.Parameter(value, requires_grad=parameter.requires_grad)


def _initialise_all(module: nn.Module, initialise: Initialise, fresh: set[int]) -> None:
    """Children first: rules of an outer module may correct those of its parts."""
    for child in module.children():
        _initialise_all(child, initialise, fresh)
    if any(id(parameter) in fresh for parameter in module.parameters()):
        initialise(module)
