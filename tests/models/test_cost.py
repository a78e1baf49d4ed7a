"""What the cost model says: the closed forms of papers, and what must hold whatever the figures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bo_tuner.config import TrainConfig
from bo_tuner.hardware import Link
from bo_tuner.models.cost import TIME_PARTS, Times, stage_times, times_of
from tests.models.gpt import BLOCK, DEVICE, GPT, HIDDEN, N_BLOCKS, ONLY_BLOCKS, PLAIN, SEQ_LEN, VOCAB, choices, problem

FREE = replace(DEVICE, inside=Link(bytes_per_s=1e30, latency_s=0.0), between=Link(bytes_per_s=1e30, latency_s=0.0))
"""Messages cost nothing."""


def times(*configs: TrainConfig, n_ranks: int = 8, **others: Any) -> Times:
    return times_of(problem(n_ranks=n_ranks, **others), choices(*configs, n_ranks=n_ranks))


def deep(depth: int, m: int, schedule: str = "1f1b", **others: Any) -> TrainConfig:
    return TrainConfig(pipeline_depth=depth, grad_accum_steps=m, pipeline_schedule=schedule, **others)


@pytest.mark.parametrize(("depth", "m"), [(2, 2), (4, 4), (8, 8), (8, 64)])
def test_equal_stages_take_m_plus_d_minus_1_times_one(depth: int, m: int) -> None:
    of = times(deep(depth, m), deep(depth, m, "2bw"), profile=ONLY_BLOCKS, hardware=FREE)
    flush, steady = of.compute + of.bubble
    assert flush / steady == pytest.approx((m + depth - 1) / m)
    assert of.bubble[0] / of.compute[0] == pytest.approx((depth - 1) / m)


def test_gpipe_takes_as_long_as_1f1b_but_waits_for_fewer_messages() -> None:
    free = times(deep(4, 8), deep(4, 8, "gpipe"), hardware=FREE)
    assert free.total[0] == pytest.approx(free.total[1])
    one_way = 1.0
    slow = replace(DEVICE, inside=Link(bytes_per_s=1e30, latency_s=one_way))
    of = times(deep(4, 8), deep(4, 8, "gpipe"), deep(4, 8, "2bw"), hardware=slow)
    assert of.exchange == pytest.approx([2 * (8 + 4 - 2 - 2), 2 * 3, 2 * 8 * 3 / 4])


def test_a_stage_with_more_to_do_holds_up_the_others() -> None:
    """Five blocks in three stages: two, two and one."""
    uneven = replace(ONLY_BLOCKS, layers=(BLOCK,) * 5)
    even = replace(ONLY_BLOCKS, layers=(BLOCK,) * 6)
    of = times(deep(3, 100), n_ranks=3, profile=uneven, hardware=FREE)
    full = times(deep(3, 100), n_ranks=3, profile=even, hardware=FREE)
    assert of.compute[0] == pytest.approx(full.compute[0])
    assert of.bubble[0] == pytest.approx(full.bubble[0] * 3 / 4)  # it waits for two blocks and one, not two and two


def test_a_layer_costs_one_forward_and_two_backward_passes_and_one_more_when_recomputed() -> None:
    plain, recomputed = times(TrainConfig(), TrainConfig(recompute=True), profile=ONLY_BLOCKS).compute
    assert recomputed / plain == pytest.approx(4 / 3)
    rate = DEVICE.matmul
    efficiency = rate.share * SEQ_LEN / (SEQ_LEN + rate.half_tokens) * HIDDEN / (HIDDEN + rate.half_width)
    forward = (
        BLOCK.matmul_flops / (rate.peak_flops_per_s * efficiency)
        + BLOCK.attention_flops / DEVICE.attention_flops_per_s
        + BLOCK.moved_bytes / DEVICE.memory_bytes_per_s
    )
    assert plain == pytest.approx(3 * N_BLOCKS * forward)


def test_larger_micro_batches_are_never_less_efficient() -> None:
    of = times(*(TrainConfig(micro_batch_size=b) for b in (1, 2, 4, 8, 16)))
    assert (np.diff(of.compute / np.array([1, 2, 4, 8, 16])) < 0).all()


def test_a_slow_host_sets_a_floor_that_a_larger_micro_batch_does_not_raise() -> None:
    slow = replace(PLAIN, host_factor=100.0)
    of = times(*(TrainConfig(micro_batch_size=b) for b in (1, 2)), software=slow, profile=ONLY_BLOCKS)
    floor = 3 * N_BLOCKS * BLOCK.n_operations * 100 * DEVICE.operation_s
    assert of.compute == pytest.approx([floor, floor], rel=0.01)


def test_where_nothing_is_launched_ahead_host_and_device_add_up() -> None:
    busy = replace(PLAIN, host_factor=1.0)
    alone = times(TrainConfig(), profile=ONLY_BLOCKS).compute[0]
    host = 3 * N_BLOCKS * BLOCK.n_operations * DEVICE.operation_s
    eager = replace(DEVICE, launches_ahead=False)
    both = times(TrainConfig(), software=busy, profile=ONLY_BLOCKS, hardware=eager).compute[0]
    assert both == pytest.approx(alone + host)


def test_tensor_parallelism_collapses_across_servers() -> None:
    """As in PipeDream-2BW, arXiv 2006.09503, figure 6c: on servers of eight, 16-way tensor parallelism is several times slower than
    8-way, and than a pipeline of 16."""
    far = replace(DEVICE, between=Link(bytes_per_s=12.5e9, latency_s=2e-5))
    configs = [
        TrainConfig(tensor_parallel=8, micro_batch_size=8, grad_accum_steps=64),
        TrainConfig(tensor_parallel=16, micro_batch_size=8, grad_accum_steps=64),
        deep(16, 64, "2bw", micro_batch_size=8),
    ]
    made = choices(*configs, n_ranks=64).global_batch
    within, across, pipeline = times(*configs, n_ranks=64, hardware=far).total / made
    assert across > 5 * within
    assert across > 5 * pipeline


def test_a_tensor_block_is_reduced_four_times_and_six_when_recomputed() -> None:
    slow = replace(DEVICE, inside=Link(bytes_per_s=1e6, latency_s=0.0))
    plain, recomputed = times(
        TrainConfig(tensor_parallel=2),
        TrainConfig(tensor_parallel=2, recompute=True),
        profile=ONLY_BLOCKS,
        hardware=slow,
    ).tensor
    assert plain == pytest.approx(4 * N_BLOCKS * 2 * SEQ_LEN * HIDDEN / 1e6, rel=1e-3)
    assert recomputed / plain == pytest.approx(6 / 4, rel=1e-3)


def test_zero_moves_what_its_paper_says() -> None:
    """Rajbhandari et al., arXiv 1910.02054, section 7: 2 elements a parameter for stages 0 to 2 and 3 for stage 3, at one micro-batch."""
    slow = replace(DEVICE, inside=Link(bytes_per_s=1e6, latency_s=0.0))  # nothing can hide
    configs = [TrainConfig(zero_stage=stage, grad_accum_steps=m) for m in (1, 4) for stage in (0, 1, 2, 3)]
    shown = times(*configs, profile=ONLY_BLOCKS, hardware=slow).gradients
    elements = shown / (ONLY_BLOCKS.n_parameters * 2 / 1e6 * 7 / 8)
    assert elements == pytest.approx([2, 2, 2, 3, 2, 2, 5, 12], rel=1e-3)


def test_a_replica_alone_reduces_nothing() -> None:
    assert times(deep(8, 8), TrainConfig(tensor_parallel=8)).gradients.tolist() == [0, 0]


def test_backward_passes_hide_a_reduction_but_never_all_of_it() -> None:
    fast, slow = (replace(DEVICE, inside=Link(bytes_per_s=speed, latency_s=0.0)) for speed in (1e12, 1e10))
    hidden = times(TrainConfig(micro_batch_size=32), hardware=fast).gradients[0]
    shown = times(TrainConfig(), hardware=slow).gradients[0]
    volume = 2 * 7 / 8 * GPT.n_parameters * 2
    assert 0 < hidden < 0.5 * volume / 1e12 + 0.01
    assert shown > 0.5 * volume / 1e10


def test_nothing_hides_where_the_host_does_the_work() -> None:
    device = replace(DEVICE, inside=Link(bytes_per_s=1e11, latency_s=0.0), memory_bytes_per_s=1e15)
    volume_s = 2 * 7 / 8 * GPT.n_parameters * 2 / 1e11
    hidden, shown = (
        times(TrainConfig(micro_batch_size=32), hardware=replace(device, launches_ahead=ahead)).gradients[0]
        for ahead in (True, False)
    )
    assert shown == pytest.approx(volume_s, rel=0.1)
    assert hidden < volume_s / 3


def host_gradients(**others: Any) -> np.ndarray[Any, Any]:
    """Seconds by micro-batches (1, 4) and ZeRO stage of two ranks with 4-byte elements, that copy 1 byte a second and exchange for nothing."""
    host = replace(FREE, launches_ahead=False, memory_bytes_per_s=1.0)
    configs = [TrainConfig(zero_stage=stage, grad_accum_steps=m) for m in (1, 4) for stage in (0, 1, 2, 3)]
    profile = replace(ONLY_BLOCKS, element_bytes=4)
    return times(*configs, n_ranks=2, profile=profile, hardware=host, **others).gradients.reshape(2, 4)


def test_a_host_adds_every_micro_batch_to_the_gradients_in_four_passes() -> None:
    one, four = host_gradients()
    assert one == pytest.approx([4 * 4 * ONLY_BLOCKS.n_parameters] * 4)
    assert four == pytest.approx(4 * one)


def test_a_host_copies_around_every_reduction_and_gathering() -> None:
    copying = replace(PLAIN, gradient_passes=(1000, 2000, 3000, 4000), weight_passes=100)
    one, four = (host_gradients(software=copying) - host_gradients()) / (4 * ONLY_BLOCKS.n_parameters)
    assert one == pytest.approx([1000, 2100, 3100, 4200])
    assert four == pytest.approx([1000, 2100, 12100, 16800])


def test_under_zero_1_and_2_a_host_reduces_all_and_gathers_besides() -> None:
    """In elements of half a model that two ranks exchange."""
    slow = replace(DEVICE, launches_ahead=False, inside=Link(bytes_per_s=1.0, latency_s=0.0), memory_bytes_per_s=1e30)
    configs = [TrainConfig(zero_stage=stage, grad_accum_steps=4) for stage in (0, 1, 2, 3)]
    of = times(*configs, n_ranks=2, profile=ONLY_BLOCKS, hardware=slow)
    elements = of.gradients / (2 * ONLY_BLOCKS.n_parameters / 2)
    assert elements == pytest.approx([2, 3, 9, 12])
    slower = replace(slow, gather_bytes_per_s=0.5)
    of = times(*configs, n_ranks=2, profile=ONLY_BLOCKS, hardware=slower)
    assert of.gradients / (2 * ONLY_BLOCKS.n_parameters / 2) == pytest.approx(elements + np.array([0, 1, 1, 8]))


def test_under_zero_3_a_host_gathers_tensor_by_tensor_in_either_pass() -> None:
    slow = replace(FREE, launches_ahead=False, inside=Link(bytes_per_s=1e30, latency_s=1.0), memory_bytes_per_s=1e30)
    profile = replace(ONLY_BLOCKS, layers=(replace(BLOCK, n_tensors=12),) * N_BLOCKS)
    configs = [TrainConfig(zero_stage=stage, grad_accum_steps=5) for stage in (0, 1, 2, 3)]
    of = times(*configs, n_ranks=4, profile=profile, hardware=slow)
    assert of.gradients == pytest.approx([0, 0, 0, 5 * 2 * 12 * N_BLOCKS * 3], abs=0.01)


def test_a_host_reduces_tied_weights_between_their_stages() -> None:
    slow = replace(DEVICE, launches_ahead=False, inside=Link(bytes_per_s=1.0, latency_s=0.0), memory_bytes_per_s=1e30)
    of = times(deep(2, 4), n_ranks=2, hardware=slow)
    assert of.gradients == pytest.approx([VOCAB * HIDDEN * 2])


def test_logits_cost_what_a_wide_product_takes_beyond_its_arithmetic() -> None:
    wide = replace(DEVICE, wide_s_per_byte=1e-6)
    profile = replace(GPT, layers=(*GPT.layers[:-1], replace(GPT.layers[-1], wide_bytes=10**6)))
    config = TrainConfig(micro_batch_size=2, grad_accum_steps=4)
    more = times(config, profile=profile, hardware=wide).compute - times(config, hardware=wide).compute
    assert more == pytest.approx([3 * 2 * 4 * 1.0])


def test_a_measured_update_replaces_the_traffic_of_adam() -> None:
    config = TrainConfig()
    by_traffic = times(config).optimizer[0]
    measured = times(config, hardware=replace(DEVICE, update_s=1e-11)).optimizer[0]
    assert measured == pytest.approx(1e-11 * GPT.n_parameters + by_traffic * 10 / 40)


def test_optimizer_steps_are_shared_from_stage_1_on() -> None:
    of = times(*(TrainConfig(zero_stage=stage) for stage in (0, 1, 2, 3)))
    assert of.optimizer[0] == pytest.approx(PLAIN.optimizer_bytes * GPT.n_parameters / DEVICE.memory_bytes_per_s)
    assert of.optimizer[1:] == pytest.approx([of.optimizer[0] / 8] * 3)


def test_the_parts_make_the_step() -> None:
    of = times(deep(2, 4, tensor_parallel=2))
    assert sum(getattr(of, part)[0] for part in TIME_PARTS) == of.total[0]


def test_many_configs_at_once_are_told_as_one_by_one() -> None:
    configs = [deep(depth, m, tensor_parallel=t) for depth in (1, 2, 4) for m in (1, 8) for t in (1, 2)]
    together = times(*configs).total
    assert together == pytest.approx([times(config).total[0] for config in configs])


def test_messages_leave_a_node_only_at_the_stages_that_border_on_another() -> None:
    """16 ranks on two nodes: of 15 boundaries one lies between them, and the ranks of one stage share the way out."""
    slow = replace(DEVICE, inside=Link(bytes_per_s=1e30, latency_s=0.0), between=Link(bytes_per_s=1e9, latency_s=0.0))
    given = problem(ONLY_BLOCKS, n_ranks=16, hardware=slow)
    message = BLOCK.output_bytes
    for depth, width, n_far in ((2, 8, 1), (4, 4, 1), (16, 1, 1)):
        config = TrainConfig(pipeline_depth=depth, grad_accum_steps=depth)
        one_way = stage_times(given, config).message_s
        assert one_way * (depth - 1) == pytest.approx(n_far * message * width / 1e9)
