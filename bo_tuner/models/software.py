"""`Software`: how a training framework spends time and memory beyond the arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from bo_tuner.cluster import DeviceKind

__all__ = [
    "ADAM_BYTES",
    "DEEPSPEED",
    "FRAMEWORKS",
    "MEGATRON",
    "NANOTRON",
    "Software",
    "deepspeed_with",
    "framework_of",
]


ADAM_BYTES = 30
"""Of `Software.optimizer_bytes`, what is Adam's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """What the same model on the same devices costs more or less under one framework than under another."""

    name: str
    gradient_bytes: int
    """Of a gradient element in 16-bit training: 4 where gradients are accumulated in fp32."""
    host_factor: float
    """Host time of an operation over that of launching it alone: the framework's own Python. Fitted where a table shows it."""
    pipeline_host: tuple[float, float] = (1.0, 0.0)
    """(a, b): in a pipeline whose stages are split over t > 1 tensor ranks, host time is a t^b times as long."""
    exchange_s: float = 1e-3
    """Host time to hand a micro-batch on to the next stage. Fitted."""
    step_s: float = 0.01
    """Host time once an optimizer step. Fitted."""
    optimizer_bytes: int = 40
    """Memory traffic of the optimizer for one parameter: Adam reads gradient, master weight and two moments and writes three and
    the 16-bit weight, `ADAM_BYTES`, and the norm and the unscaling of gradients pass over them once more."""
    step_bytes: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Of a parameter, in 16-bit training under ZeRO 0 to 3: held during the optimizer step alone, when no activations are."""
    gradient_passes: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Times that gradients are read or written around each of their reductions under ZeRO 0 to 3, where the host does it."""
    weight_passes: int = 0
    """Likewise weights around each of their gatherings."""
    bucket_elements: int = 0
    """Elements of each of the two buffers that gradients are reduced in under ZeRO 1 to 3, at most those of the model; 0 for none."""
    context_bytes: int = 750_000_000
    """Of a GPU's memory before anything is stored: what the driver, cuBLAS and NCCL take in each process. Guessed once. On a CPU what a process
    holds before it trains is no cost of a config."""
    fragmentation: float = 0.05
    """Of what a GPU stores, lost between blocks of torch's allocator. Guessed once."""
    copies_fp32: bool = False
    """ZeRO keeps fp32 master weights also where the weights themselves are fp32."""
    shards_sequence: bool = False
    """Tensor-parallel ranks divide the activations between matrix products too (sequence parallelism, arXiv 2205.05198)."""
    keeps_gathered: bool = False
    """With it, of the gathered inputs of a block's two column-parallel products one is kept for the backward pass, and the other while
    its micro-batch is worked on: that is what measured peaks of pipelines and of whole models leave room for."""
    partition: Literal["blocks", "flops", "cost"] = "blocks"
    """What pipeline stages are given alike: as many blocks, as much arithmetic in greedy order, or the least costliest stage."""


# Passes as in DeepSpeed 0.19. Gradients, ZeRO 0 (runtime/engine.py, allreduce_and_copy): flattened, scaled, copied back; 1 and 2
# (runtime/zero/stage_1_and_2.py, reduce_ipg_grads): copied into a bucket, flattened, divided, copied out; 3 (runtime/zero/stage3.py) as
# many. Weights: into and out of the flat tensor that is gathered. Each reads and writes. Those of stage 3 and of weights were not counted
# line by line, but settled by timings of bert-tiny on two CPU ranks.
DEEPSPEED = Software(
    name="deepspeed",
    gradient_bytes=2,
    host_factor=10.0,
    gradient_passes=(6, 8, 8, 8),
    weight_passes=4,
    bucket_elements=500_000_000,
    partition="cost",
)
MEGATRON = Software(name="megatron", gradient_bytes=4, host_factor=10.3, exchange_s=1.2e-3, step_s=0.016)
NANOTRON = Software(
    name="nanotron",
    gradient_bytes=4,
    host_factor=16.0,
    pipeline_host=(1.6, 0.53),
    exchange_s=9e-4,
    step_s=0.05,
    shards_sequence=True,
    keeps_gathered=True,
    partition="flops",
)
_FP32_GRADIENT, _WHOLE_LIST = 4, 4
"""Bytes of a parameter. DeepSpeed 0.19 copies 16-bit gradients to fp32 for the step (runtime/fp16/unfused_optimizer.py,
runtime/zero/stage_1_and_2.py, runtime/zero/stage3.py), and around FusedAdam under ZeRO 0 once more into one tensor
(runtime/fp16/fused_optimizer.py). torch's optimizers on CUDA, unless fused, update all parameters at once and hold as much again
(`foreach` in its documentation)."""


def deepspeed_with(optimizer: str, device: DeviceKind) -> Software:
    """DeepSpeed with an optimizer as a workload names it; what the step holds is counted on GPUs."""
    if device == "cpu":
        return DEEPSPEED
    few, many = _FP32_GRADIENT, _FP32_GRADIENT + _WHOLE_LIST
    step_bytes = {"adamw": (few,) * 4, "adam": (few,) * 4, "fused_adam": (many, few, few, few)}
    return replace(DEEPSPEED, step_bytes=step_bytes.get(optimizer, (many,) * 4))


FRAMEWORKS = {"ultrascale_playbook": NANOTRON, "deepspeed_autotuning": DEEPSPEED}
"""By data set of published measurements, where it is not Megatron or alike."""


def framework_of(data_set: str) -> Software:
    """What a published table was measured with."""
    return FRAMEWORKS.get(data_set, MEGATRON)
