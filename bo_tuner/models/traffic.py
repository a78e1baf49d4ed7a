"""`gradients_s`: what data-parallel ranks spend on gradients, and under ZeRO on weights."""

from __future__ import annotations

import numpy as np

from bo_tuner.models.choices import Choices, Floats, Problem

__all__ = ["gradients_s"]

_ACCUMULATION_PASSES = 4
"""torch writes every micro-batch's gradients, reads them and what they are added to, and writes the sum; settled by timings too."""


def gradients_s(
    problem: Problem,
    choices: Choices,
    *,
    n_parameters: Floats,
    n_tensors: float,
    n_tied: int,
    backward_and_forward_s: Floats,
) -> Floats:
    """Seconds of a step that nothing hides.

    ZeRO 0 moves 2 elements a parameter and step, stage 1 the same as reduce-scatter and all-gather, stage 2 one more for each further
    micro-batch, stage 3 three for each (arXiv 1910.02054, section 7).

    Args:
        problem: What is trained, and on what.
        choices: Of one depth.
        n_parameters: Trained ones of the fullest stage on one tensor rank.
        n_tensors: That hold them.
        n_tied: Of the model, held by two stages.
        backward_and_forward_s: One micro-batch in an average stage, of which two thirds are the backward pass.
    """
    reduce_scatter, all_gather = _rings(problem, choices, n_parameters)
    if problem.hardware.launches_ahead:
        seconds = _beside_a_device(problem, choices, reduce_scatter, all_gather, backward_and_forward_s)
    else:
        seconds = _by_the_host(problem, choices, reduce_scatter, all_gather, n_tensors)
    seconds = np.where(choices.data > 1, seconds + problem.constants.rank_toll_s * choices.data, 0.0)
    return seconds if problem.hardware.launches_ahead else seconds + _copies(problem, choices, n_parameters, n_tied)


def _rings(problem: Problem, choices: Choices, n_parameters: Floats) -> tuple[Floats, Floats]:
    """Seconds of one reduce-scatter of all gradients, and of one all-gather of all weights."""
    hardware, software = problem.hardware, problem.software
    data, tensor = choices.data, choices.tensor
    element = problem.profile.element_bytes
    near, far = hardware.inside, hardware.between
    # The groups of one node, as many as its tensor ranks, share its way out.
    groups = np.maximum(np.minimum(tensor, problem.node_size), 1.0)
    speed = np.where(
        data * tensor <= problem.node_size, near.bytes_per_s, np.minimum(near.bytes_per_s, far.bytes_per_s / groups)
    )
    ring = (data - 1) / data * n_parameters / speed * (1 + problem.constants.node_toll * np.log2(problem.n_nodes))
    return ring * (software.gradient_bytes if element == 2 else 4), ring * element


def _beside_a_device(
    problem: Problem,
    choices: Choices,
    reduce_scatter: Floats,
    all_gather: Floats,
    backward_and_forward_s: Floats,
) -> Floats:
    """Backward passes hide most of it."""
    least_shown, m, zero = problem.constants.least_shown, choices.accumulation, choices.zero_stage
    hidden = problem.constants.hidden * backward_and_forward_s
    shown = {
        0: np.maximum(2 * reduce_scatter - hidden * 2 / 3, least_shown * 2 * reduce_scatter),
        1: reduce_scatter + all_gather,
        2: all_gather + np.maximum(reduce_scatter - hidden * 2 / 3, least_shown * reduce_scatter) * m,
        3: np.maximum((2 * all_gather + reduce_scatter) - hidden, least_shown * (2 * all_gather + reduce_scatter)) * m,
    }
    return np.select([zero == stage for stage in shown], list(shown.values()))


def _by_the_host(
    problem: Problem, choices: Choices, reduce_scatter: Floats, all_gather: Floats, n_tensors: float
) -> Floats:
    """Reducing takes the time that passes would need, so that nothing hides.

    DeepSpeed all-reduces under ZeRO 1 and 2 too (runtime/zero/stage_1_and_2.py, allreduce_bucket), and forgets what is not a rank's
    share. Under ZeRO 3 it gathers tensor by tensor (runtime/zero/partition_parameters.py, all_gather_coalesced), each with a ring's delay.
    """
    m, zero = choices.accumulation, choices.zero_stage
    near = problem.hardware.inside.bytes_per_s
    all_gather = all_gather * near / (problem.hardware.gather_bytes_per_s or near)
    delay = (choices.data - 1) * problem.hardware.inside.latency_s
    shown = {
        0: 2 * reduce_scatter,
        1: 2 * reduce_scatter + all_gather,
        2: 2 * reduce_scatter * m + all_gather,
        3: (2 * (all_gather + n_tensors * delay) + reduce_scatter) * m,
    }
    return np.select([zero == stage for stage in shown], list(shown.values()))


def _copies(problem: Problem, choices: Choices, n_parameters: Floats, n_tied: int) -> Floats:
    """Seconds of passes over gradients and weights that the host makes itself, of one replica too, and of reducing gradients of tied
    weights between two stages."""
    hardware, software = problem.hardware, problem.software
    m, zero = choices.accumulation, choices.zero_stage
    n_reduced, n_gathered = np.where(zero >= 2, m, 1), np.select([zero == 0, zero <= 2], [0, 1], 2 * m)
    around = np.select([zero == stage for stage in range(4)], list(software.gradient_passes))
    passes = m * _ACCUMULATION_PASSES + n_reduced * around + n_gathered * software.weight_passes
    element = problem.profile.element_bytes
    seconds: Floats = passes * n_parameters * element / hardware.memory_bytes_per_s
    return seconds + n_tied * element / hardware.inside.bytes_per_s
