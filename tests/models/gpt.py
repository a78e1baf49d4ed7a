"""A small GPT on round figures, and made-up hardware, for what the models say of them."""

from __future__ import annotations

from bo_tuner.config import TrainConfig
from bo_tuner.hardware import Hardware, Link, MatmulRate
from bo_tuner.models.choices import Choices, Problem
from bo_tuner.models.software import Software
from bo_tuner.profile import LayerProfile, ModelProfile, Recomputed, Tie

SEQ_LEN, HIDDEN, VOCAB, N_BLOCKS = 1024, 1024, 32_000, 16

BLOCK = LayerProfile(
    name="block",
    n_parameters=12 * HIDDEN**2,
    n_trainable=12 * HIDDEN**2,
    matmul_flops=2 * SEQ_LEN * 12 * HIDDEN**2,
    attention_flops=4 * SEQ_LEN**2 * HIDDEN,
    moved_bytes=40 * SEQ_LEN * HIDDEN,
    n_operations=30,
    kept_bytes=34 * SEQ_LEN * HIDDEN,
    whole_kept_bytes=10 * SEQ_LEN * HIDDEN,
    output_bytes=2 * SEQ_LEN * HIDDEN,
    is_block=True,
    recomputed=Recomputed(
        kept_bytes=2 * SEQ_LEN * HIDDEN,
        whole_kept_bytes=2 * SEQ_LEN * HIDDEN,
        working_bytes=34 * SEQ_LEN * HIDDEN,
        share=1.0,
    ),
)
EMBEDDING = LayerProfile(
    name="embedding",
    n_parameters=VOCAB * HIDDEN,
    n_trainable=VOCAB * HIDDEN,
    matmul_flops=0,
    attention_flops=0,
    moved_bytes=6 * SEQ_LEN * HIDDEN,
    n_operations=3,
    kept_bytes=8 * SEQ_LEN,
    whole_kept_bytes=8 * SEQ_LEN,
    output_bytes=2 * SEQ_LEN * HIDDEN,
)
HEAD = LayerProfile(
    name="head",
    n_parameters=VOCAB * HIDDEN,
    n_trainable=VOCAB * HIDDEN,
    matmul_flops=2 * SEQ_LEN * VOCAB * HIDDEN,
    attention_flops=0,
    moved_bytes=8 * SEQ_LEN * VOCAB,
    n_operations=5,
    kept_bytes=2 * SEQ_LEN * HIDDEN,
    whole_kept_bytes=2 * SEQ_LEN * HIDDEN,
    output_bytes=4,
    working_bytes=8 * SEQ_LEN * VOCAB,
)
GPT = ModelProfile(
    name="gpt",
    seq_len=SEQ_LEN,
    element_bytes=2,
    hidden=HIDDEN,
    heads=16,
    layers=(EMBEDDING, *([BLOCK] * N_BLOCKS), HEAD),
    ties=(Tie(first=0, second=N_BLOCKS + 1, n_parameters=VOCAB * HIDDEN),),
)
ONLY_BLOCKS = ModelProfile(
    name="blocks", seq_len=SEQ_LEN, element_bytes=2, hidden=HIDDEN, heads=16, layers=(BLOCK,) * N_BLOCKS
)
"""Every stage of a pipeline the same."""
DEVICE = Hardware(
    name="device",
    memory_bytes=80 * 2**30,
    memory_bytes_per_s=1.7e12,
    matmul=MatmulRate(peak_flops_per_s=312e12, share=0.8, half_tokens=50, half_width=50),
    attention_flops_per_s=100e12,
    inside=Link(bytes_per_s=250e9, latency_s=1e-5),
    between=Link(bytes_per_s=50e9, latency_s=2e-5),
    node_size=8,
    operation_s=5e-6,
    source="made up",
)
PLAIN = Software(
    name="plain", gradient_bytes=2, host_factor=0.0, exchange_s=0.0, step_s=0.0, fragmentation=0.0, context_bytes=0
)
"""Nothing but arithmetic."""


def problem(
    profile: ModelProfile = GPT,
    *,
    n_ranks: int = 8,
    software: Software = PLAIN,
    hardware: Hardware = DEVICE,
) -> Problem:
    """With defaults for what a test does not care for."""
    return Problem(profile=profile, hardware=hardware, software=software, n_ranks=n_ranks)


def choices(*configs: TrainConfig, n_ranks: int = 8) -> Choices:
    """Configs as arrays."""
    return Choices.of(configs, n_ranks)
