"""What torch does for a part of a model, seen on the meta device: operations, products, memory traffic, and what is alive when.

Weights and what comes of them have shapes and no values. Whatever follows from the data alone (token numbers, masks, positions)
is computed on the CPU, since models read it: transformers leaves a mask of ones out, and torch then takes another attention kernel.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from bo_tuner.objectives.training.kernels import DeviceType, kernels_of
from bo_tuner.profile import WIDE

__all__ = ["Trace", "Tracer"]

_aten = torch.ops.aten
_META = torch.device("meta")


def _grouped_flops(one: Tensor, other: Tensor, *_: Any, **__: Any) -> int:
    """Each row of the first is multiplied with one of the matrices, whichever experts the rows are for."""
    return 2 * one.numel() * other.shape[-1]


_FLOPS: Mapping[Any, Callable[..., int]] = {
    **flop_registry,
    _aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[_aten._scaled_dot_product_flash_attention],
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _aten._scaled_dot_product_flash_attention_backward
    ],
    _aten._grouped_mm: _grouped_flops,
}
"""torch's own formulas, and for what it has none: a multiplication and an addition each one operation; a causal mask saves none."""


@dataclass(slots=True, kw_only=True)
class Trace:
    """One forward and backward pass of a part of a model. Counts are of the forward pass where nothing else is said."""

    matmul_flops: int = 0
    """Products with weights."""
    attention_flops: int = 0
    """Products of activations with one another."""
    all_flops: int = 0
    """Of both passes."""
    moved_bytes: int = 0
    """Read and written by all other operations."""
    n_operations: int = 0
    """Kernels; views and bare allocations are none."""
    kept_bytes: int = 0
    """Saved for the backward pass, weights and buffers left out, and what an earlier part has saved."""
    whole_kept_bytes: int = 0
    """The part of it that tensor parallelism does not divide."""
    wide_bytes: int = 0
    """Written by products that make over `WIDE` times as many features as they read."""
    output_bytes: int = 0
    """Floating-point tensors that go on to the next part."""
    width: int = 0
    """Of the most costly product with a weight: the lesser of features read and written."""
    allocations: list[int] = field(default_factory=list)
    """Bytes of each storage as it comes, and with a minus as it goes, in both passes; the gradients of weights are among them."""


class Tracer:
    """Traces the parts of one model, one after the other, and knows what those before have saved."""

    def __init__(self, model: nn.Module, *, device: DeviceType, recomputed: Iterable[nn.Module] = ()) -> None:
        """Begin with `model`.

        Args:
            model: Parameters on the meta device, buffers on the CPU.
            device: Whose kernels are looked at.
            recomputed: Parts that `recompute` was called with.
        """
        self._model = model
        self._device: DeviceType = device
        self._recomputed = list(recomputed)
        self._weights = WeakIdKeyDictionary()
        for tensor in (*model.parameters(), *model.buffers()):
            self._weights[tensor.untyped_storage()] = True
        self._saved = WeakIdKeyDictionary()

    def has_saved(self, tensor: Tensor) -> bool:
        """Some part needs it in its backward pass."""
        return tensor.untyped_storage() in self._saved

    def trace(self, call: Callable[[], Any], inputs: Iterable[Tensor]) -> tuple[Trace, Any]:
        """Run one part forward and backward.

        Args:
            call: Gives a tensor or a tuple of tensors: those of floating point are differentiated.
            inputs: What `call` works on.

        Returns:
            What was seen, and the outputs, detached.
        """
        counter = _Counter(self._weights, writes_bias_first=self._device == "cpu")
        found, inputs = counter.trace, list(inputs)
        for tensor in inputs:
            if not self.has_saved(tensor):
                counter.watch(tensor.untyped_storage())
        with _no_cycles_collected(), counter, kernels_of(self._device):
            with self._saving(counter):
                outputs = call()
            counter.is_forward = False
            parts = outputs if isinstance(outputs, tuple) else (outputs,)
            ends = [part for part in parts if part.requires_grad]
            found.output_bytes = sum(part.numel() * part.element_size() for part in parts if part.is_floating_point())
            for tensor in (*parts, *inputs):  # nobody needs them any more but who has saved them
                if not self.has_saved(tensor):
                    counter.release(tensor.untyped_storage())
            torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
        counter.close()
        self._model.zero_grad(set_to_none=True)
        detached = tuple(part.detach() for part in parts)
        return found, detached if isinstance(outputs, tuple) else detached[0]

    @contextmanager
    def _saving(self, counter: _Counter) -> Iterator[None]:
        """Count what autograd saves, and what recomputed parts hold: all that they are called with, to call them again."""

        def save(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage not in self._weights and storage not in self._saved:
                self._saved[storage] = True
                counter.trace.kept_bytes += storage.nbytes()
                counter.trace.whole_kept_bytes += 0 if counter.is_split(storage) else storage.nbytes()
            return tensor

        def hold(_: nn.Module, *given: Any) -> None:
            tree_map_only(Tensor, save, given)

        hooks = [part.register_forward_pre_hook(hold, with_kwargs=True) for part in self._recomputed]
        try:
            with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
                yield
        finally:
            for hook in hooks:
                hook.remove()


@contextmanager
def _no_cycles_collected() -> Iterator[None]:
    """Storages go when the last reference does, and at no other time: two traces of the same work look the same."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Counter(TorchDispatchMode):
    """Sees every operation beneath autograd, lets data and weights meet on the meta device, and counts."""

    def __init__(self, weights: WeakIdKeyDictionary, *, writes_bias_first: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it bare
        self.trace = Trace()
        self.is_forward = True
        self._weights = weights
        self._writes_bias_first = writes_bias_first
        """As torch does on a CPU: a product with a bias begins with copies of it, and ends with adding to them."""
        self._twins = WeakIdKeyDictionary()
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._split = WeakIdKeyDictionary()
        self._dearest = 0

    def watch(self, storage: torch.UntypedStorage) -> None:
        """Note that a storage is there, and later that it goes."""
        key, n_bytes, allocations = id(storage), storage.nbytes(), self.trace.allocations  # torch keeps the object, too
        if key not in self._alive:

            def gone(_: Any) -> None:
                del self._alive[key]
                allocations.append(-n_bytes)

            self._alive[key] = weakref.ref(storage, gone)
            allocations.append(n_bytes)

    def release(self, storage: torch.UntypedStorage) -> None:
        """Take a storage for gone."""
        if self._alive.pop(id(storage), None) is not None:
            self.trace.allocations.append(-storage.nbytes())

    def close(self) -> None:
        """What goes later, as outputs do, is no longer seen."""
        self._alive.clear()

    def is_split(self, storage: torch.UntypedStorage) -> bool:
        """Tensor parallelism would leave a share of it on each rank.

        As in Megatron-LM (Shoeybi 2019, section 3), what comes of a product of something whole with a weight is split by columns, and
        the product of that with a weight is whole again, unless it widens: that is a vocabulary, or the first matrix of a block.
        """
        return storage in self._split

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(tensor.is_meta for tensor in given):
            if not all(tensor.is_meta for tensor in given):
                args, kwargs = tree_map_only(Tensor, self._twin, (args, kwargs))
                given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            made = func(*args, **kwargs)
        else:
            made = self._from_data(func, args, kwargs)
        self._count(func, args, kwargs, given, made)
        return made

    def _from_data(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What depends on no weight has values; a device that was asked for because a weight is there is no reason to lose them."""
        if kwargs.get("device") != _META:
            return func(*args, **kwargs)
        if func is _aten._to_copy.default:
            data, kwargs = args[0], {**kwargs, "device": args[0].device}
            changes = kwargs.get("dtype") not in (None, data.dtype) or kwargs.get("memory_format") is not None
            return func(*args, **kwargs) if changes else _aten.alias(data)
        made = func(*args, **kwargs)
        is_float = isinstance(made, Tensor) and made.is_floating_point()
        return made if is_float else func(*args, **{**kwargs, "device": torch.device("cpu")})

    def _twin(self, tensor: Tensor) -> Tensor:
        """The same tensor on the meta device; views of one storage have twins that are views of one."""
        if tensor.is_meta:
            return tensor
        storage = tensor.untyped_storage()
        if storage not in self._twins:
            self._twins[storage] = torch.empty(storage.nbytes(), dtype=torch.uint8, device=_META).untyped_storage()
        empty = torch.empty(0, dtype=tensor.dtype, device=_META)
        return empty.set_(self._twins[storage], tensor.storage_offset(), tensor.shape, tensor.stride())

    def _count(self, func: Any, args: Any, kwargs: Any, given: list[Tensor], made: Any) -> None:
        outputs = [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
        old = {id(tensor.untyped_storage()) for tensor in given}
        fresh = [tensor for tensor in outputs if id(tensor.untyped_storage()) not in old]
        for tensor in fresh:
            self.watch(tensor.untyped_storage())
        if (not fresh and not func._schema.is_mutable) or "empty" in func._schema.name:
            return
        found = self.trace
        formula = _FLOPS.get(func._overloadpacket)
        flops = formula(*args, **kwargs, out_val=made) if formula else 0
        found.all_flops += flops
        if not self.is_forward:
            return
        found.n_operations += 1
        if formula is None:
            found.moved_bytes += sum(_touched_bytes(tensor) for tensor in (*given, *outputs))
        elif self._writes_bias_first and func is _aten.addmm.default:
            found.moved_bytes += _touched_bytes(outputs[0])
        is_split = any(tensor.untyped_storage() in self._split for tensor in given)
        factors = [tensor for tensor in given if tensor.untyped_storage() not in self._weights]
        if formula is None or len(factors) == len(given):
            found.attention_flops += flops
        else:
            found.matmul_flops += flops
            n_read, n_written = factors[0].shape[-1], outputs[0].shape[-1]
            is_split = not is_split or n_written > n_read
            found.wide_bytes += _touched_bytes(outputs[0]) if n_written > WIDE * n_read else 0
            if flops > self._dearest:
                self._dearest, found.width = flops, min(n_read, n_written)
        if is_split:
            for tensor in fresh:
                self._split[tensor.untyped_storage()] = True


def _touched_bytes(tensor: Tensor) -> int:
    """An expanded tensor is no longer than what it is expanded from."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
