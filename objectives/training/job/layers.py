"""`LayerStack`: a model as a chain of layers and a loss, which is what a pipeline cuts into stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from .errors import JobError

__all__ = ["LayerStack", "layer_stack", "loss_of", "module_of"]

Loss = Callable[[Any, Any], Any]
"""Takes the last layer's output and the labels."""


class LayerStack(nn.Module):
    """Layers that are called one after the other, each with the output of the one before, and a loss at the end.

    What passes between layers is a tensor or a tuple of tensors. As a whole it is a module like any other:
    `stack(inputs, labels)` gives the loss.
    """

    def __init__(self, layers: Iterable[nn.Module], loss: Loss) -> None:
        """Put a chain together.

        Args:
            layers: In order.
            loss: Takes the last output and the labels and gives a scalar; may be a module with weights.
        """
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.loss = loss

    def forward(self, inputs: Any, labels: Any) -> Any:
        """The loss of one micro-batch."""
        for layer in self.layers:
            inputs = layer(inputs)
        return self.loss(inputs, labels)

    def pair(self, batch: Any) -> tuple[Any, Any]:
        """A micro-batch as (inputs, labels), each a tensor or a tuple of tensors.

        Raises:
            JobError: It is no pair.
        """
        if not isinstance(batch, Sequence) or len(batch) != 2:
            raise JobError(f"batches of a list of layers must be pairs (inputs, labels); got {type(batch).__name__}")
        return _tensors(batch[0]), _tensors(batch[1])

    def recomputable(self) -> list[int]:
        """Layers whose activations are worth dropping: all that have weights."""
        return [number for number, layer in enumerate(self.layers) if any(True for _ in layer.parameters())]


def _tensors(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value  # loaders make lists of tuples


def layer_stack(layers: Iterable[Any], loss: Loss) -> LayerStack:
    """A stack from what users write for DeepSpeed's PipelineModule: modules, functions, LayerSpec and TiedLayerSpec.

    Raises:
        JobError: A layer is none of these, or there is none.
    """
    tied: dict[str, nn.Module] = {}
    made = [_layer(layer, number, tied) for number, layer in enumerate(layers)]
    if not made:
        raise JobError("a list of layers must hold at least one layer; it is empty")
    return LayerStack(made, loss)


def _layer(layer: Any, number: int, tied: dict[str, nn.Module]) -> nn.Module:
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    if isinstance(layer, TiedLayerSpec):
        if layer.key not in tied:
            tied[layer.key] = layer.build()
        return tied[layer.key] if layer.forward_fn is None else _Tied(tied[layer.key], layer.forward_fn)
    if isinstance(layer, LayerSpec):
        built: nn.Module = layer.build()
        return built
    if isinstance(layer, nn.Module):
        return layer
    if callable(layer):
        return _Applied(layer)
    raise JobError(
        f"layer {number} must be a module, a function, or DeepSpeed's LayerSpec; it is {type(layer).__name__}"
    )


class _Tied(nn.Module):
    """A module that another layer owns too, used in another way."""

    def __init__(self, module: nn.Module, forward: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        self.module = module
        self._use = forward

    def forward(self, inputs: Any) -> Any:
        return self._use(self.module, inputs)


class _Applied(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, inputs: Any) -> Any:
        return self._function(inputs)


def module_of(made: Any, what: str) -> nn.Module:
    """What a user's function returned, as a module whose forward gives a loss.

    Args:
        made: A module, or a pair of layers and loss.
        what: What it is called in messages.

    Raises:
        JobError: It is neither.
    """
    if isinstance(made, nn.Module) and not isinstance(made, nn.Sequential | nn.ModuleList):
        return made
    if isinstance(made, tuple) and len(made) == 2 and callable(made[1]) and isinstance(made[0], Iterable):
        return layer_stack(made[0], made[1])
    raise JobError(
        f"{what} must return a module whose forward gives a loss, or a pair (layers, loss); "
        f"it returned {_described(made)}"
    )


def _described(made: Any) -> str:
    if made is None:
        return "nothing"
    if isinstance(made, tuple):
        return f"a tuple of {', '.join(type(part).__name__ for part in made)}"
    alone = " without a loss" if isinstance(made, nn.Sequential | nn.ModuleList | list) else ""
    return f"{type(made).__name__}{alone}"


def loss_of(output: Any) -> Tensor:
    """The loss in what a model's forward gave: itself, `.loss`, `["loss"]`, or the first of a tuple.

    Raises:
        JobError: It is not a scalar tensor, or no gradient flows from it.
    """
    found = output
    if isinstance(output, Mapping):
        found = output.get("loss")
    elif hasattr(output, "loss"):
        found = output.loss
    elif isinstance(output, tuple | list) and output:
        found = output[0]
    if not isinstance(found, Tensor):
        raise JobError(
            "forward must give a loss (a scalar tensor, .loss, ['loss'], or the first of a tuple); "
            f"it gave {type(output).__name__}{'' if found is output else f' whose loss is {type(found).__name__}'}"
        )
    if found.numel() != 1:
        raise JobError(f"the loss must be a scalar, and has shape {tuple(found.shape)}: take its mean")
    if not found.requires_grad:
        raise JobError(
            "a gradient must flow from the loss, and none does: it is detached, or computed without any weight"
        )
    return found.reshape(()) if found.dim() else found
