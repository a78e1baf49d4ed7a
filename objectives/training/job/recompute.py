"""Recomputation (activation checkpointing): layers forget their activations and compute them again in the backward pass."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .errors import JobError
from .layers import LayerStack

__all__ = ["recompute", "recomputed_layers"]


def recomputed_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of `model` that recomputation is for: those of a stack, or else its repeated blocks, the outermost ones.

    Raises:
        JobError: It has none; the text is the reason.
    """
    if isinstance(model, LayerStack):
        return [model.layers[number] for number in model.recomputable()]
    blocks = list(_repeated(model))
    if not blocks:
        raise JobError(f"{type(model).__name__} has no list of repeated layers to recompute one by one")
    return blocks


def _repeated(module: nn.Module) -> Iterable[nn.Module]:
    """Members of lists that hold two or more modules of one class with weights."""
    children = list(module.children())
    is_list = isinstance(module, nn.ModuleList | nn.Sequential)
    alike = [child for child in children if is_list and type(child) is type(children[0])]
    if len(alike) >= 2 and len(alike) == len(children) and any(True for _ in alike[0].parameters()):
        yield from alike
        return
    for child in children:
        yield from _repeated(child)


def recompute(layers: Iterable[nn.Module]) -> None:
    """Make each layer recompute its activations. Random numbers repeat, so results are the same.

    A layer's class is replaced by a subclass of it whose call is checkpointed, hooks included: names of weights, attributes
    and isinstance stay as they are, and ZeRO 3's hooks gather the weights again.
    """
    for layer in layers:
        kind = type(layer)
        if issubclass(kind, _Recomputed):
            continue  # it stands in the chain twice
        layer.__class__ = type(f"Recomputed{kind.__name__}", (_Recomputed, kind), {})


class _Recomputed(nn.Module):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.training and torch.is_grad_enabled()):
            return super().__call__(*args, **kwargs)
        return checkpoint(partial(super().__call__, **kwargs), *args, use_reentrant=False)
