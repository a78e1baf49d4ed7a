"""What a config should need of each rank's memory, part by part."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bo_tuner.models.choices import Choices, Floats, Problem
from bo_tuner.models.stages import Stages, by_depth
from bo_tuner.models.terms import with_terms

__all__ = ["MEMORY_PARTS", "Memory", "memory_of"]

MEMORY_PARTS = ("weights", "gradients", "optimizer", "activations", "working", "buffers", "overhead")
"""Names of the fields of `Memory`, in the order that they are shown in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of the rank that needs most, one element a config."""

    weights: Floats
    """As the forward pass reads them, in as many versions as the schedule keeps."""
    gradients: Floats
    optimizer: Floats
    """Moments, and fp32 master weights in 16-bit training."""
    activations: Floats
    """Kept for backward passes, of all micro-batches in flight."""
    working: Floats
    """Alive for a moment: logits and their gradient, a block that is recomputed, weights gathered under ZeRO 3; or what the optimizer
    step holds beyond the activations, which are gone by then."""
    buffers: Floats
    """What messages are sent from and received in."""
    overhead: Floats
    """Contexts, and what the allocator loses."""

    @property
    def total(self) -> Floats:
        """All parts together."""
        return sum((getattr(self, part) for part in MEMORY_PARTS), np.zeros_like(self.weights))


def memory_of(problem: Problem, choices: Choices) -> Memory:
    """Predict the memory of `choices`.

    Model states follow ZeRO (arXiv 1910.02054, section 3): 2 + 2 + 12 bytes a parameter in 16-bit training with Adam, 4 + 4 + 8 in fp32,
    the optimizer's share divided by the data-parallel size from stage 1 on, gradients from 2, weights from 3. How many
    micro-batches a stage keeps, and how many versions of the weights, its schedule says (`bo_tuner.schedules`).

    Args:
        problem: What is trained, and on what.
        choices: Depths that the model has layers for.
    """
    return Memory(**by_depth(MEMORY_PARTS, _of_one_depth, problem, choices))


def _of_one_depth(problem: Problem, choices: Choices, stages: Stages) -> dict[str, Floats]:
    """Of the stage that needs most, which differs from config to config."""
    software, profile = problem.software, problem.profile
    tensor, data, batch = choices.tensor[:, None], choices.data[:, None], choices.micro_batch[:, None]
    zero = choices.zero_stage[:, None]
    is_16_bit = profile.element_bytes == 2
    n_parameters = (stages.total("n_parameters") - stages.n_shared) / tensor
    n_trained = np.maximum(stages.total("n_trainable") - stages.n_shared, 0) / tensor
    across = np.where(tensor > 1, tensor, 1.0) if software.shards_sequence else np.ones_like(tensor)

    kept, inputs = (_activations(problem, stages, choices, recomputed=recomputed) for recomputed in (False, True))
    working, again = (_working(problem, stages, choices, recomputed=recomputed) for recomputed in (False, True))
    first = (choices.depth * 1.0)[:, None]
    in_flight = choices.held_by(stages.earliest)
    recomputes = choices.recomputes[:, None]
    has_master = np.full_like(zero, True, dtype=bool) if is_16_bit else software.copies_fp32 & (zero >= 1)
    largest_weights = stages.each("n_parameters").max() * profile.element_bytes / tensor
    bucket = np.minimum(n_trained, software.bucket_elements) * profile.element_bytes
    message = stages.each("output_bytes").max() * batch / across
    kept_in_flight = in_flight * np.where(recomputes, inputs, kept)
    of_step = np.array(software.step_bytes)[zero.astype(int)] * n_trained * np.where(zero >= 1, 1 / data, 1.0)
    all_parts = {
        "weights": n_parameters
        * profile.element_bytes
        * np.where(zero >= 3, 1 / data, 1.0)
        * choices.by_schedule(lambda schedule, _: schedule.n_weight_versions)[:, None],
        "gradients": n_trained * (software.gradient_bytes if is_16_bit else 4) * np.where(zero >= 2, 1 / data, 1.0),
        "optimizer": n_trained * np.where(has_master, 12, 8) * np.where(zero >= 1, 1 / data, 1.0),
        "activations": kept_in_flight,
        "working": np.maximum(
            np.where(recomputes, again, working) + np.where(zero >= 3, 2 * largest_weights, 0.0),
            of_step - kept_in_flight if is_16_bit else 0.0,
        ),
        "buffers": np.where(zero >= 1, 2 * bucket, 0.0) * (data > 1) + np.where(first > 1, 2 * message, 0.0),
    }
    all_parts = with_terms(
        "memory", problem, choices, all_parts, n_parameters=n_trained * np.where(zero >= 1, 1 / data, 1.0)
    )
    n_sorts = len(stages.n_stages)
    full = {name: np.broadcast_to(part, (len(choices), n_sorts)) for name, part in all_parts.items()}
    stored = np.sum(list(full.values()), axis=0)
    worst = np.argmax(stored, axis=1)[:, None]
    found = {name: np.take_along_axis(part, worst, axis=1)[:, 0] for name, part in full.items()}
    on_gpu = problem.hardware.launches_ahead
    lost = np.take_along_axis(stored, worst, axis=1)[:, 0] * software.fragmentation + software.context_bytes
    found["overhead"] = lost if on_gpu else np.zeros_like(lost)
    return found


def _activations(problem: Problem, stages: Stages, choices: Choices, *, recomputed: bool) -> Floats:
    """Bytes that one micro-batch keeps, by config and sort of stage.

    Tensor-parallel ranks divide what lies between their matrix products; the rest is whole on each, unless the sequence is divided too
    (Korthikanti et al., arXiv 2205.05198, table 2).
    """
    tensor, batch = choices.tensor[:, None], choices.micro_batch[:, None]
    whole = stages.each("whole_kept_bytes", recomputed=recomputed)
    split = stages.each("kept_bytes", recomputed=recomputed) - whole
    across = tensor if problem.software.shards_sequence else np.ones_like(tensor)
    kept = split / tensor + whole / across
    if problem.software.keeps_gathered and not recomputed:
        kept = kept + np.where((tensor > 1) & (stages.each("is_block") > 0), stages.each("output_bytes"), 0.0)
    of_stage: Floats = (batch * kept) @ stages.n_layers.T
    return of_stage


def _working(problem: Problem, stages: Stages, choices: Choices, *, recomputed: bool) -> Floats:
    """Bytes that one micro-batch needs for a moment: the most of any layer in each sort of stage, and gathered inputs."""
    batch, tensor = choices.micro_batch[:, None], choices.tensor[:, None]
    of_kind = stages.each("working_bytes", recomputed=recomputed)
    working: Floats = batch * np.max(np.where(stages.n_layers > 0, of_kind, 0.0), axis=1) / tensor
    if problem.software.keeps_gathered and not recomputed:
        blocks = stages.n_layers @ np.where(stages.each("is_block") > 0, stages.each("output_bytes"), 0.0)
        working = working + np.where(tensor > 1, batch * blocks, 0.0)
    return working
