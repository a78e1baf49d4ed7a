"""What the memory model says: the figures of papers, and what must hold whatever the figures."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bo_tuner.config import TrainConfig
from bo_tuner.models.memory import MEMORY_PARTS, Memory, memory_of
from bo_tuner.models.software import DEEPSPEED, Software, deepspeed_with
from bo_tuner.profile import LayerProfile, ModelProfile
from tests.models.gpt import (
    BLOCK,
    DEVICE,
    GPT,
    HEAD,
    HIDDEN,
    N_BLOCKS,
    ONLY_BLOCKS,
    PLAIN,
    SEQ_LEN,
    VOCAB,
    choices,
    problem,
)


def memory(*configs: TrainConfig, n_ranks: int = 8, software: Software = PLAIN, profile: ModelProfile = GPT) -> Memory:
    return memory_of(problem(profile, n_ranks=n_ranks, software=software), choices(*configs, n_ranks=n_ranks))


def test_model_states_are_those_of_the_zero_paper() -> None:
    """Rajbhandari et al., arXiv 1910.02054, figure 1: 7.5 B parameters on 64 devices."""
    layer = LayerProfile(
        name="all",
        n_parameters=7_500_000_000,
        n_trainable=7_500_000_000,
        matmul_flops=0,
        attention_flops=0,
        moved_bytes=0,
        n_operations=0,
        kept_bytes=0,
        whole_kept_bytes=0,
        output_bytes=0,
    )
    model = ModelProfile(name="7.5B", seq_len=1, element_bytes=2, hidden=1, heads=1, layers=(layer,))
    of = memory(*(TrainConfig(zero_stage=stage) for stage in (0, 1, 2, 3)), n_ranks=64, profile=model)
    states = (of.weights + of.gradients + of.optimizer) / 1e9
    assert states.round(1).tolist() == [120.0, 31.4, 16.6, 1.9]


def test_frozen_parameters_are_only_weights() -> None:
    frozen = replace(BLOCK, n_trainable=0)
    model = replace(ONLY_BLOCKS, layers=(frozen,) * N_BLOCKS)
    of = memory(TrainConfig(), profile=model)
    assert (of.gradients[0], of.optimizer[0]) == (0, 0)
    assert of.weights[0] == N_BLOCKS * 12 * HIDDEN**2 * 2


def test_the_optimizer_step_counts_where_it_holds_more_than_activations_do() -> None:
    """A 16-bit gradient is copied to fp32 for it; what a list-wise update holds comes on top."""
    stages = [TrainConfig.from_params({"zero_stage": stage, "micro_batch_size": 1}) for stage in (0, 1)]
    small = replace(BLOCK, n_parameters=10**9, n_trainable=10**9)
    model = replace(ONLY_BLOCKS, layers=(small,) * N_BLOCKS)
    n_parameters = 10**9 * N_BLOCKS

    def in_step(software: Software) -> list[float]:
        of = memory(*stages, profile=model, software=software)
        return [float(n_bytes) / n_parameters for n_bytes in of.activations + of.working]

    by_optimizer = {
        name: replace(PLAIN, step_bytes=deepspeed_with(name, "cuda").step_bytes)
        for name in ("adamw", "fused_adam", "own.py:build")
    }
    assert {name: in_step(software) for name, software in by_optimizer.items()} == {
        "adamw": [4, 4 / 8],
        "fused_adam": [8, 4 / 8],
        "own.py:build": [8, 8 / 8],
    }
    large = [replace(config, micro_batch_size=4096) for config in stages]
    assert memory(*large, software=by_optimizer["adamw"]).total.tolist() == memory(*large).total.tolist()
    assert deepspeed_with("adamw", "cpu") == DEEPSPEED


def test_fp32_training_has_no_master_weights() -> None:
    of = memory(TrainConfig(), profile=replace(GPT, element_bytes=4))
    assert (of.gradients / of.weights).tolist() == [1.0]
    assert (of.optimizer / of.weights).tolist() == [2.0]


def test_tied_weights_count_once_when_whole_and_twice_when_split() -> None:
    whole, split = memory(TrainConfig(), TrainConfig(pipeline_depth=2)).weights
    assert whole == (N_BLOCKS * 12 * HIDDEN**2 + VOCAB * HIDDEN) * 2
    assert split == (N_BLOCKS // 2 * 12 * HIDDEN**2 + VOCAB * HIDDEN) * 2


def test_the_first_stage_of_1f1b_keeps_as_much_as_the_whole_model() -> None:
    """Korthikanti et al., arXiv 2205.05198, section 4.3: layers of the model's worth, whatever the depth."""
    deep = [TrainConfig(pipeline_depth=depth, grad_accum_steps=16) for depth in (1, 2, 4, 8)]
    of = memory(*deep, profile=ONLY_BLOCKS)
    assert of.activations.tolist() == [N_BLOCKS * BLOCK.kept_bytes] * 4


def test_few_micro_batches_fill_no_deep_pipeline() -> None:
    few, many = memory(
        TrainConfig(pipeline_depth=8, grad_accum_steps=2),
        TrainConfig(pipeline_depth=8, grad_accum_steps=64),
        profile=ONLY_BLOCKS,
    ).activations
    assert few == many / 4


def test_gpipe_keeps_every_micro_batch_and_2bw_one_more_version_of_the_weights() -> None:
    def deep(schedule: str) -> TrainConfig:
        return TrainConfig(pipeline_depth=4, grad_accum_steps=16, pipeline_schedule=schedule)

    of = memory(deep("1f1b"), deep("gpipe"), deep("2bw"), profile=ONLY_BLOCKS)
    assert (of.activations / of.activations[0]).tolist() == [1, 4, 1]
    assert (of.weights / of.weights[0]).tolist() == [1, 1, 2]


def test_recomputation_keeps_inputs_of_blocks_and_one_block() -> None:
    plain, recomputed = memory(
        TrainConfig(micro_batch_size=4), TrainConfig(micro_batch_size=4, recompute=True), profile=ONLY_BLOCKS
    ).activations
    assert plain == 4 * N_BLOCKS * BLOCK.kept_bytes
    assert recomputed == 4 * N_BLOCKS * 2 * SEQ_LEN * HIDDEN
    working = memory(TrainConfig(micro_batch_size=4, recompute=True), profile=ONLY_BLOCKS).working
    assert working.tolist() == [4 * BLOCK.kept_bytes]


@pytest.mark.parametrize(
    ("shards_sequence", "per_block"), [(False, 10 + 24 / 4), (True, 34 / 4)], ids=["tensor", "tensor and sequence"]
)
def test_tensor_parallel_ranks_share_activations_as_in_the_paper(shards_sequence: bool, per_block: float) -> None:
    """Korthikanti et al., arXiv 2205.05198, table 2, without the attention's own part."""
    software = replace(PLAIN, shards_sequence=shards_sequence)
    of = memory(TrainConfig(tensor_parallel=4), software=software, profile=ONLY_BLOCKS)
    assert of.activations.tolist() == [N_BLOCKS * per_block * SEQ_LEN * HIDDEN]


def test_logits_are_with_the_last_stage() -> None:
    """It holds one micro-batch, the first two: the one that needs more is told."""
    wordy = replace(GPT, layers=(*GPT.layers[:-1], replace(HEAD, working_bytes=10**11)))
    of = memory(TrainConfig(pipeline_depth=2, grad_accum_steps=2), profile=wordy)
    assert of.working.tolist() == [1e11]
    assert of.activations[0] == N_BLOCKS / 2 * BLOCK.kept_bytes + HEAD.kept_bytes


def test_zero_reduces_in_buckets_no_larger_than_the_model() -> None:
    software = replace(PLAIN, bucket_elements=500_000_000)
    of = memory(TrainConfig(), TrainConfig(zero_stage=1), TrainConfig(zero_stage=1), software=software)
    assert of.buffers.tolist() == [0, *[2 * GPT.n_parameters * 2] * 2]
    assert memory(TrainConfig(zero_stage=1), n_ranks=1, software=software).buffers.tolist() == [0]


def test_the_allocator_loses_a_part_of_all() -> None:
    software = replace(PLAIN, fragmentation=0.1, context_bytes=5)
    of = memory(TrainConfig(), software=software)
    stored = sum(getattr(of, part)[0] for part in MEMORY_PARTS if part != "overhead")
    assert of.overhead[0] == pytest.approx(0.1 * stored + 5)
    assert of.total[0] == pytest.approx(1.1 * stored + 5)


def test_a_cpu_has_no_caching_allocator() -> None:
    lossy = replace(PLAIN, fragmentation=0.1, context_bytes=5)
    host = problem(software=lossy, hardware=replace(DEVICE, launches_ahead=False))
    assert memory_of(host, choices(TrainConfig())).overhead.tolist() == [0]


def test_zero_keeps_master_weights_beside_fp32_weights_where_the_framework_does() -> None:
    single = replace(GPT, element_bytes=4)
    copies = replace(PLAIN, copies_fp32=True)
    of = memory(TrainConfig(), TrainConfig(zero_stage=1), profile=single, software=copies, n_ranks=2)
    assert (of.optimizer / GPT.n_parameters).tolist() == [8, 12 / 2]
    assert (memory(TrainConfig(zero_stage=1), profile=single, n_ranks=2).optimizer / GPT.n_parameters).tolist() == [4]


def test_more_of_anything_never_needs_less() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        config = TrainConfig(
            zero_stage=int(rng.integers(0, 2)),  # type: ignore[arg-type]
            micro_batch_size=int(rng.integers(1, 9)),
            grad_accum_steps=int(rng.integers(1, 9)),
            pipeline_depth=int(rng.choice([1, 2])),
            tensor_parallel=int(rng.choice([1, 2])),
            recompute=bool(rng.integers(0, 2)),
        )
        larger = replace(config, micro_batch_size=config.micro_batch_size + 1)
        more_in_flight = replace(config, grad_accum_steps=config.grad_accum_steps + 1)
        more_sharded = replace(config, zero_stage=config.zero_stage + 1)  # type: ignore[arg-type]
        split = replace(config, tensor_parallel=config.tensor_parallel * 2)
        base, *others = memory(config, larger, more_in_flight, more_sharded, split).total
        assert others[0] > base
        assert others[1] >= base
        assert others[2] <= base
        assert others[3] < base
