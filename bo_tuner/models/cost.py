"""How long a config's optimizer step should take, part by part."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bo_tuner.config import TrainConfig
from bo_tuner.models.choices import Choices, Floats, Problem
from bo_tuner.models.software import ADAM_BYTES
from bo_tuner.models.stages import Stages, by_depth, stages_of
from bo_tuner.models.terms import with_terms
from bo_tuner.models.traffic import gradients_s
from bo_tuner.schedules import Pipeline

__all__ = ["TIME_PARTS", "StageTimes", "Times", "stage_times", "times_of"]

TIME_PARTS = ("compute", "tensor", "bubble", "exchange", "gradients", "optimizer", "fixed")
"""Names of the fields of `Times`, in the order that they are shown in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of an optimizer step, one element a config."""

    compute: Floats
    """Layers of the busiest stage over all micro-batches, and the host where it is slower."""
    tensor: Floats
    """The part of layers that tensor-parallel ranks spend on all-reduces."""
    bubble: Floats
    """Waiting for the pipeline to fill and drain."""
    exchange: Floats
    """Messages between stages."""
    gradients: Floats
    """Reducing gradients, and under ZeRO gathering weights, as far as nothing hides it; on a CPU with the copies around it."""
    optimizer: Floats
    fixed: Floats
    """Of the framework, whatever is trained."""

    @property
    def total(self) -> Floats:
        """The step."""
        return sum((getattr(self, part) for part in TIME_PARTS), np.zeros_like(self.compute))


def times_of(problem: Problem, choices: Choices) -> Times:
    """Predict the step time of `choices`.

    What a step takes beyond all of its micro-batches on the slowest stage, its schedule says (`bo_tuner.schedules`): how long that stage
    waits for others, and for messages.
    A block's tensor-parallel ranks reduce its output 4 times, 6 with recomputation, in rings of 2 (t - 1) / t of its bytes (Shoeybi et
    al., arXiv 1909.08053, section 3). `bo_tuner.models.traffic` tells what data-parallel ranks move.

    Args:
        problem: What is trained, and on what.
        choices: Depths that the model has layers for.
    """
    return Times(**by_depth(TIME_PARTS, _of_one_depth, problem, choices))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds that one config's stages need for a micro-batch, in order."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    """Recomputation included."""
    message_s: float
    """One way between two stages."""


def stage_times(problem: Problem, config: TrainConfig) -> StageTimes:
    """What a simulation of one config's pipeline needs.

    Args:
        problem: What is trained, and on what.
        config: A depth that the model has layers for.
    """
    choices = Choices.of([config], problem.n_ranks)
    stages = stages_of(problem.profile, config.pipeline_depth, problem.software, problem.layer_costs)
    layers, _ = _layer_times(problem, choices, stages)
    forward, both = _forwards(choices, stages, layers)[0], (layers @ stages.n_layers.T)[0]
    return StageTimes(
        forward_s=tuple(float(forward[sort]) for sort in stages.sort_of),
        backward_s=tuple(float(both[sort] - forward[sort]) for sort in stages.sort_of),
        message_s=float(_one_way(problem, choices, stages)[0]),
    )


def _of_one_depth(problem: Problem, choices: Choices, stages: Stages) -> dict[str, Floats]:
    software = problem.software
    m, depth = choices.accumulation, choices.depth
    layers, tensor_share = _layer_times(problem, choices, stages)
    of_stage = layers @ stages.n_layers.T
    slowest = np.argmax(of_stage, axis=1)
    worst = of_stage[np.arange(len(choices)), slowest]
    once = of_stage @ stages.n_stages
    pipeline = Pipeline(
        depth=depth,
        n_micro_batches=m,
        forward_s=_forwards(choices, stages, layers)[np.arange(len(choices)), slowest],
        work_s=worst,
        passage_s=once,
        message_s=_one_way(problem, choices, stages),
    )
    compute = m * worst
    tensor = compute * (tensor_share @ stages.n_layers.T)[np.arange(len(choices)), slowest] / worst
    n_parameters = np.max(stages.total("n_trainable") - stages.n_shared) / choices.tensor
    sharded = np.where(choices.zero_stage >= 1, choices.data, 1.0)
    parts = {
        "compute": compute - tensor,
        "tensor": tensor,
        "bubble": choices.by_schedule(lambda schedule, chosen: schedule.bubble_s(pipeline.at(chosen))),
        "exchange": choices.by_schedule(lambda schedule, chosen: schedule.exchange_s(pipeline.at(chosen))),
        "gradients": gradients_s(
            problem,
            choices,
            n_parameters=n_parameters,
            n_tensors=np.max(stages.total("n_tensors")),
            n_tied=stages.n_tied,
            backward_and_forward_s=once / depth,
        ),
        "optimizer": _update_s(problem) * n_parameters / sharded,
        "fixed": np.full(len(choices), software.step_s),
    }
    return with_terms("time", problem, choices, parts, n_parameters=n_parameters / sharded)


def _forwards(choices: Choices, stages: Stages, layers: Floats) -> Floats:
    """The forward pass's part of what layers take, by config and sort of stage."""
    of_stage: Floats = (layers / _passes(choices, stages)) @ stages.n_layers.T
    return of_stage


def _passes(choices: Choices, stages: Stages) -> Floats:
    """Forward passes that a layer takes as long as, both ways together; shape (configs, kinds)."""
    return 3.0 + np.where(choices.recomputes[:, None], stages.repeated, 0.0)


def _one_way(problem: Problem, choices: Choices, stages: Stages) -> Floats:
    """Seconds until what a stage gives is at the next one, in the mean of a pipeline's boundaries.

    Neighbouring ranks hold the same stage (the order of Megatron, arXiv 2104.04473, section 3.1: tensor, data, pipeline). So only as many
    boundaries lie between nodes as there are nodes to join, and those ranks of a node share its way out that hold one stage.
    """
    software, hardware = problem.software, problem.hardware
    message = stages.each("output_bytes").max() * choices.micro_batch
    if software.shards_sequence:
        message = message / choices.tensor
    near, far = hardware.inside, hardware.between
    n_boundaries = np.maximum(choices.depth - 1, 1)
    far_share = np.minimum((problem.n_nodes - 1) / n_boundaries, 1)
    together = np.minimum(choices.data * choices.tensor, problem.node_size)
    inside = message / near.bytes_per_s + near.latency_s
    outside = message * together / far.bytes_per_s + far.latency_s
    one_way = far_share * outside + (1 - far_share) * inside + software.exchange_s
    return np.where(choices.depth > 1, one_way, 0.0)


def _layer_times(problem: Problem, choices: Choices, stages: Stages) -> tuple[Floats, Floats]:
    """Seconds of forward and backward of one micro-batch in one layer of each kind, shape (configs, kinds); and the part of it spent on
    tensor-parallel all-reduces."""
    software, hardware, profile = problem.software, problem.hardware, problem.profile
    tensor, batch = choices.tensor[:, None], choices.micro_batch[:, None]
    tokens = batch * profile.seq_len
    rate = hardware.matmul
    width = profile.hidden / tensor
    efficiency = rate.share * tokens / (tokens + rate.half_tokens) * width / (width + rate.half_width)
    whole = stages.each("whole_kept_bytes") / np.maximum(stages.each("kept_bytes"), 1.0)
    across = 1 / tensor if software.shards_sequence else np.ones_like(tensor)
    moved = stages.each("moved_bytes") * batch * (whole * across + (1 - whole) / tensor)
    forward = (
        stages.each("matmul_flops") * batch / tensor / (rate.peak_flops_per_s * efficiency)
        + stages.each("attention_flops") * batch / tensor / hardware.attention_flops_per_s
        + moved / hardware.memory_bytes_per_s
        + stages.each("wide_bytes") * batch / tensor * hardware.wide_s_per_byte
    )
    passes = _passes(choices, stages)
    n_reduces = np.where(stages.each("is_block") > 0, passes * 2 - 2, 0.0)
    ring = 2 * (tensor - 1) / tensor * stages.each("output_bytes") * batch
    is_near = tensor <= problem.node_size
    near, far = hardware.inside, hardware.between
    speed = np.where(
        is_near, near.bytes_per_s, far.bytes_per_s * np.minimum(tensor, problem.node_size) / problem.node_size
    )
    latency = np.where(is_near, near.latency_s, far.latency_s)
    reduces = np.where(tensor > 1, n_reduces * (ring / speed + 2 * np.log2(tensor) * latency), 0.0)

    host = passes * stages.each("n_operations") * hardware.operation_s * software.host_factor
    host = host * np.maximum(tensor / problem.node_size, 1.0) ** problem.constants.far_exponent
    factor, exponent = software.pipeline_host
    host = host * np.where((tensor > 1) & (choices.depth > 1)[:, None], factor * tensor**exponent, 1.0)
    device = passes * forward + reduces
    q = problem.constants.overlap if hardware.launches_ahead else 1.0
    together = (device**q + host**q) ** (1 / q)
    return together, reduces * np.where(device > 0, together / np.maximum(device, 1e-30), 0.0)


def _update_s(problem: Problem) -> float:
    """Of one parameter: as its memory traffic tells, the optimizer's own part as measured where it was."""
    software, hardware = problem.software, problem.hardware
    if hardware.update_s is None:
        return software.optimizer_bytes / hardware.memory_bytes_per_s
    return hardware.update_s + (software.optimizer_bytes - ADAM_BYTES) / hardware.memory_bytes_per_s
