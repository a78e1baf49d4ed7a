"""`profile_of`: what a model costs, layer by layer, found without weights and without an accelerator."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from bo_tuner.errors import ModelError
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
from bo_tuner.objectives.training.job.data import describe, micro_batches, n_tokens
from bo_tuner.objectives.training.job.engine import load_model, run_forward
from bo_tuner.objectives.training.job.errors import JobError
from bo_tuner.objectives.training.job.hugging_face import architecture_of, keep_no_caches
from bo_tuner.objectives.training.job.layers import LayerStack, loss_of
from bo_tuner.objectives.training.job.recompute import recompute, recomputed_layers
from bo_tuner.objectives.training.job.split import as_stack
from bo_tuner.objectives.training.job.structure import structure_of
from bo_tuner.objectives.training.kernels import DeviceType
from bo_tuner.objectives.training.tracing import Trace, Tracer
from bo_tuner.profile import LayerProfile, ModelProfile, Recomputed, Tie
from bo_tuner.workload import Precision, Workload

__all__ = ["profile_of", "workload_profile"]

_TYPES: Mapping[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_FEWER, _MORE = 2, 3
"""Samples of two traces: their difference is what one sample adds to a micro-batch. With a single one torch leaves out copies."""
_N_SETTLED = 2
"""The first of some layers alike may make what the others share, as a mask; from the second on they cost the same."""


def workload_profile(workload: Workload, *, device: DeviceType = "cuda") -> ModelProfile:
    """The profile of a model from a Hugging Face config or from a function in a file, which is called in this process.

    Args:
        workload: Its data, if there are any, come from a function in a file too.
        device: Whose kernels are looked at; there need not be one.

    Raises:
        ModelError: The model cannot be built, or not traced; the text says why.
    """
    spec = workload.model
    source = {"architecture": dict(spec.architecture), "function": spec.function or None}
    seq_len = workload.seq_len if workload.data is None else workload.data_seq_len
    try:
        with told("the model must be one that can be built"):
            model = load_model(source)
        job = {"model": {**source, "architecture": architecture_of(model)}, "data": workload.data, "seed": 0}
        batch = next(micro_batches({**job, "seq_len": seq_len}, micro_batch_size=1))
        return profile_of(model, batch, name=spec.name, precision=workload.precision, device=device)
    except JobError as error:
        raise ModelError(f"model {spec.name}: {error}") from error


def profile_of(
    model: nn.Module,
    batch: Any,
    *,
    name: str,
    precision: Precision,
    device: DeviceType,
    whole_because: str = "",
) -> ModelProfile:
    """Trace a model in training, as the job would run it, on samples like the one in `batch`.

    Args:
        model: With weights or without; left as it is.
        batch: A micro-batch of one sample, on the CPU.
        name: For people.
        precision: Of weights and activations.
        device: Whose kernels are looked at; there need not be one.
        whole_because: Why it cannot be split, where that is known.

    Raises:
        JobError: It cannot be traced; the text says why.
    """
    structure = structure_of(model).to(_TYPES[precision]).train()
    keep_no_caches(structure)
    stack: LayerStack | None = None
    samples: tuple[list[_Sample], list[_Sample]] | None = None
    if not whole_because:
        try:
            stack = as_stack(structure)
            samples = _one_sample(stack, batch, device, _TYPES[precision])
        except JobError as error:
            stack, whole_because = None, str(error)
    plain, again = samples or _one_sample(structure, batch, device, None)
    layers = [[structure]] if stack is None else _modules_of(stack)
    blocks = [] if stack is None else stack.recomputable()
    parts = zip(plain, again, layers, strict=True)
    return ModelProfile(
        name=name,
        seq_len=n_tokens(batch),
        element_bytes=_TYPES[precision].itemsize,
        hidden=max(plain, key=lambda sample: sample.matmul_flops).width,
        heads=_heads(model),
        layers=tuple(_layer(*part, is_block=number in blocks) for number, part in enumerate(parts)),
        ties=_ties(layers),
        whole_because=whole_because,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    """What one sample more adds to a trace; of operations, which it does not add to, their number."""

    matmul_flops: int
    attention_flops: int
    all_flops: int
    moved_bytes: int
    wide_bytes: int
    n_operations: int
    kept_bytes: int
    whole_kept_bytes: int
    output_bytes: int
    width: int
    working_bytes: int


def _one_sample(
    model: nn.Module, batch: Any, device: DeviceType, dtype: torch.dtype | None
) -> tuple[list[_Sample], list[_Sample]]:
    """One sample in a stack's layers, given their type, or in a whole model; without recomputation and with it."""
    recomputing = copy.deepcopy(model)
    blocks: list[nn.Module] = []
    with contextlib.suppress(JobError):  # it has none
        blocks = recomputed_layers(recomputing)
    recompute(blocks)
    kinds = [kind_of(layer) for layer in model.layers] if dtype and isinstance(model, LayerStack) else []
    alike = _list_of_alike(model)

    def traces(model: nn.Module, n_samples: int) -> list[Trace]:
        recomputed = blocks if model is recomputing else []
        tracer, samples = Tracer(model, device=device, recomputed=recomputed), _repeated(batch, n_samples)
        with told(f"{type(model).__name__} must run where weights have shapes and no values"):
            if dtype and isinstance(model, LayerStack):
                return _traces_of_layers(model, samples, dtype, kinds, tracer)
            return [tracer.trace(lambda: loss_of(run_forward(model, samples)), tree_leaves(samples))[0]]

    def samples(model: nn.Module) -> list[_Sample]:
        return list(map(_difference, traces(model, _FEWER), traces(model, _MORE)))

    def all_samples(model: nn.Module) -> list[_Sample]:
        if dtype or not alike:
            return samples(model)
        with contextlib.suppress(JobError):  # some models count their blocks themselves
            return [_extrapolated(model.get_submodule(alike), lambda: samples(model)[0])]
        return samples(model)

    return all_samples(model), all_samples(recomputing)


def _list_of_alike(model: nn.Module) -> str:
    """Name of the one list of layers alike that is long enough to be traced in part; else nothing."""
    lists = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > _N_SETTLED + 1
        if len({kind_of(layer) for layer in module}) == 1 and any(True for _ in module.parameters())
    ]
    return lists[0] if len(lists) == 1 else ""


def _extrapolated(blocks: Any, sample: Callable[[], _Sample]) -> _Sample:
    """What `sample` would find of all `blocks`, from what it finds of the first two and three."""
    n_blocks, removed = len(blocks), [*blocks][_N_SETTLED:]
    try:
        del blocks[_N_SETTLED + 1 :]
        more = sample()
        del blocks[_N_SETTLED:]
        fewer = sample()
    finally:
        del blocks[_N_SETTLED:]
        blocks.extend(removed)
    sums = (
        "matmul_flops",
        "attention_flops",
        "all_flops",
        "moved_bytes",
        "wide_bytes",
        "n_operations",
        "kept_bytes",
        "whole_kept_bytes",
    )
    n_left_out = n_blocks - _N_SETTLED - 1
    return replace(
        more, **{name: getattr(more, name) + n_left_out * (getattr(more, name) - getattr(fewer, name)) for name in sums}
    )


def _traces_of_layers(
    stack: LayerStack, batch: Any, dtype: torch.dtype, kinds: Sequence[Any], tracer: Tracer
) -> list[Trace]:
    """Layer after layer; those that are alike, and are given alike, are traced no more than `_N_SETTLED` times."""
    inputs, labels = stack.pair(batch)
    for part, what in ((inputs, "inputs"), (labels, "labels")):
        check_tensors(part, f"its data give {what} that are")
    # As outputs of a layer before: a gradient is asked for, and comes back on the meta device.
    inputs = tree_map_only(Tensor, lambda data: data.to("meta") if data.is_floating_point() else data, inputs)
    traces: list[Trace] = []
    known: dict[Any, list[tuple[Trace, Any]]] = {}
    for number, layer in enumerate(stack.layers):
        is_last = number == len(stack.layers) - 1
        name = f"layer {number} ({type(layer).__name__})"
        saved = [tracer.has_saved(tensor) for tensor in tensors_of(inputs)]
        same = known.setdefault((kinds[number], shapes_of(inputs), is_last, *saved), [])
        if len(same) < _N_SETTLED:
            given = fresh(inputs, dtype)
            end = (stack.loss, labels) if is_last else None
            used = [*tensors_of(given), *(tensors_of(labels) if is_last else ())]
            same.append(tracer.trace(partial(_run_layer, layer, given, end, name), used))
            check_gradients(given if number else (), name)
        found, inputs = same[-1]
        traces.append(found)
    return traces


def _run_layer(layer: nn.Module, given: Any, end: tuple[Any, Any] | None, name: str) -> Any:
    with told(f"{name} must take {describe(given)}"):
        outputs = layer(given)
    if end is None:
        check_outputs(outputs, name)
        return outputs
    loss, labels = end
    with told(f"the loss must take {describe(outputs)} and {describe(labels)}"):
        return loss_of(loss(outputs, labels))


def _repeated(batch: Any, n_samples: int) -> Any:
    """A micro-batch of so many samples like the one in `batch`, which lie along the first dimension."""
    if isinstance(batch, Tensor):
        return torch.cat([batch] * n_samples) if batch.dim() and batch.shape[0] == 1 else batch
    if isinstance(batch, Mapping):
        return {name: _repeated(part, n_samples) for name, part in batch.items()}
    if isinstance(batch, tuple | list):
        return tuple(_repeated(part, n_samples) for part in batch)
    return batch


def _difference(fewer: Trace, more: Trace) -> _Sample:
    """What the samples add that `more` has over `fewer`."""
    if len(fewer.allocations) != len(more.allocations):
        raise JobError(f"the model must do the same for {_FEWER} samples as for {_MORE}, and does not")
    # The gradients of weights, which stay, are as large for one sample more: they are not in the difference.
    alive = accumulate(b - a for a, b in zip(fewer.allocations, more.allocations, strict=True))
    kept_bytes = more.kept_bytes - fewer.kept_bytes
    return _Sample(
        matmul_flops=more.matmul_flops - fewer.matmul_flops,
        attention_flops=more.attention_flops - fewer.attention_flops,
        all_flops=more.all_flops - fewer.all_flops,
        moved_bytes=more.moved_bytes - fewer.moved_bytes,
        wide_bytes=more.wide_bytes - fewer.wide_bytes,
        n_operations=more.n_operations,
        kept_bytes=kept_bytes,
        whole_kept_bytes=more.whole_kept_bytes - fewer.whole_kept_bytes,
        output_bytes=more.output_bytes - fewer.output_bytes,
        width=more.width,
        working_bytes=max(max(alive, default=0) - kept_bytes, 0),
    )


def _layer(sample: _Sample, again: _Sample, modules: Sequence[nn.Module], *, is_block: bool) -> LayerProfile:
    kind = type(modules[0]).__name__
    parameters = list(nn.ModuleList(modules).parameters())
    products = sample.matmul_flops + sample.attention_flops
    as_ever, recomputed = (
        Recomputed(
            kept_bytes=one.kept_bytes,
            whole_kept_bytes=one.whole_kept_bytes,
            working_bytes=one.working_bytes,
            share=(one.all_flops - sample.all_flops) / products if products else 0.0,
        )
        for one in (sample, again)
    )
    return LayerProfile(
        name=kind[1:].lower() if kind.startswith("_") else kind,  # those of a family have names for people
        n_parameters=sum(parameter.numel() for parameter in parameters),
        n_trainable=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        n_tensors=sum(parameter.requires_grad for parameter in parameters),
        matmul_flops=sample.matmul_flops,
        attention_flops=sample.attention_flops,
        moved_bytes=sample.moved_bytes,
        wide_bytes=sample.wide_bytes,
        n_operations=sample.n_operations,
        kept_bytes=sample.kept_bytes,
        whole_kept_bytes=sample.whole_kept_bytes,
        output_bytes=sample.output_bytes,
        working_bytes=sample.working_bytes,
        is_block=is_block,
        recomputed=recomputed if recomputed != as_ever else None,
    )


def _heads(model: nn.Module) -> int:
    """As the first part with a transformers config tells, itself perhaps."""
    told = (getattr(getattr(module, "config", None), "num_attention_heads", None) for module in model.modules())
    return next((heads for heads in told if isinstance(heads, int)), 1)


def _modules_of(stack: LayerStack) -> list[list[nn.Module]]:
    """What holds the weights of each layer: the layer itself, and with the last one the loss."""
    modules = [[layer] for layer in stack.layers]
    modules[-1] += [stack.loss] if isinstance(stack.loss, nn.Module) else []
    return modules


def _ties(layers: Sequence[Sequence[nn.Module]]) -> tuple[Tie, ...]:
    first_of: dict[int, int] = {}
    shared: Counter[tuple[int, int]] = Counter()
    for number, modules in enumerate(layers):
        for parameter in nn.ModuleList(modules).parameters():
            first = first_of.setdefault(id(parameter), number)
            if first != number:
                shared[first, number] += parameter.numel()
    return tuple(Tie(first=first, second=second, n_parameters=n) for (first, second), n in shared.items())
