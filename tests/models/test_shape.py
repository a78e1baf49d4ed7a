"""The profile of a shape is that of the transformers model of that shape, traced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from bo_tuner.models.shape import profile_of_shape
from bo_tuner.objectives.training.profiles import workload_profile
from bo_tuner.profile import ModelProfile
from bo_tuner.workload import ModelSpec, Precision, Workload

SEQ_LEN = 256
GPT2: Mapping[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 3000,
    "n_embd": 256,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 512,
    "activation_function": "gelu",
    "bos_token_id": 1,
    "eos_token_id": 1,
}
LLAMA: Mapping[str, Any] = {
    "model_type": "llama",
    "vocab_size": 3000,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 768,
}
GPT_SHAPE = {"ffn": 1024, "gated_mlp": False, "tied_embeddings": True, "n_positions": 512}
LLAMA_SHAPE = {"ffn": 768, "gated_mlp": True, "tied_embeddings": False, "fused_kernels": False}
MODELS: Mapping[str, tuple[Mapping[str, Any], Precision, Mapping[str, Any]]] = {
    "gpt2": (GPT2, "bf16", GPT_SHAPE),
    "gpt2 in single precision": (GPT2, "fp32", {**GPT_SHAPE, "activation_dtype_bytes": 4}),
    "gpt2, GELU of single operations": (
        {**GPT2, "activation_function": "gelu_new"},
        "bf16",
        {**GPT_SHAPE, "fused_kernels": False},
    ),
    "gpt2, scores kept": ({**GPT2, "attn_implementation": "eager"}, "bf16", {**GPT_SHAPE, "flash_attention": False}),
    "llama": (LLAMA, "bf16", LLAMA_SHAPE),
    "llama, two heads of keys": ({**LLAMA, "num_key_value_heads": 2}, "bf16", {**LLAMA_SHAPE, "kv_heads": 2}),
    "llama, tied": ({**LLAMA, "tie_word_embeddings": True}, "bf16", {**LLAMA_SHAPE, "tied_embeddings": True}),
    "llama, scores kept": (
        {**LLAMA, "attn_implementation": "eager"},
        "bf16",
        {**LLAMA_SHAPE, "flash_attention": False},
    ),
}


def of_shape(**changes: Any) -> ModelProfile:
    usual: dict[str, Any] = {"name": "small", "seq_len": SEQ_LEN, "layers": 4, "hidden": 256, "heads": 4, "vocab": 3000}
    return profile_of_shape(**{**usual, **changes})


def total(profile: ModelProfile, name: str) -> int:
    return sum(getattr(layer, name) for layer in profile.layers)


@pytest.mark.parametrize("name", MODELS)
def test_a_shape_has_the_parameters_and_products_of_the_model_and_keeps_as_much(name: str) -> None:
    architecture, precision, shape = MODELS[name]
    spec = ModelSpec(name="small", architecture=architecture)
    traced = workload_profile(Workload(model=spec, n_parameters=0, seq_len=SEQ_LEN, precision=precision))
    found = of_shape(**shape)
    assert (found.n_parameters, found.n_trainable) == (traced.n_parameters, traced.n_trainable)
    assert (found.hidden, found.heads, found.element_bytes) == (traced.hidden, traced.heads, traced.element_bytes)
    assert total(found, "matmul_flops") == total(traced, "matmul_flops")
    assert total(found, "wide_bytes") == total(traced, "wide_bytes") == SEQ_LEN * 3000 * found.element_bytes
    assert total(found, "attention_flops") == total(traced, "attention_flops")
    # Eager attention of transformers casts scores back and forth.
    most = 0.05 if "scores" in name else 0.005
    assert total(found, "kept_bytes") == pytest.approx(total(traced, "kept_bytes"), rel=most)
    assert total(found, "whole_kept_bytes") == pytest.approx(total(traced, "whole_kept_bytes"), rel=0.01)
    if "scores" not in name:  # the shape takes a softmax with scale and mask for one kernel
        assert total(found, "moved_bytes") == pytest.approx(total(traced, "moved_bytes"), rel=0.15)
        assert total(found, "n_operations") == pytest.approx(total(traced, "n_operations"), rel=0.3)


@pytest.mark.parametrize("name", ["gpt2", "gpt2, GELU of single operations"])
def test_layer_by_layer_too_and_under_recomputation(name: str) -> None:
    architecture, precision, shape = MODELS[name]
    spec = ModelSpec(name="small", architecture=architecture)
    traced = workload_profile(Workload(model=spec, n_parameters=0, seq_len=SEQ_LEN, precision=precision))
    found = of_shape(**shape)
    assert found.ties == traced.ties
    for ours, theirs in zip(found.layers, traced.layers, strict=True):
        assert (ours.name, ours.is_block, ours.output_bytes) == (theirs.name, theirs.is_block, theirs.output_bytes)
        assert ours.n_parameters == theirs.n_parameters
        assert ours.kept_bytes == pytest.approx(theirs.kept_bytes, rel=0.01)
        assert ours.working_bytes == pytest.approx(theirs.working_bytes, rel=0.2)
        if ours.is_block:
            assert ours.recomputed and theirs.recomputed
            assert ours.recomputed.kept_bytes == pytest.approx(theirs.recomputed.kept_bytes, rel=0.02)
            assert ours.recomputed.working_bytes == pytest.approx(theirs.recomputed.working_bytes, rel=0.1)


def test_a_block_of_gpt_keeps_what_korthikanti_counts() -> None:
    """34 bytes of each feature, 5 of each score: Korthikanti 2022, equation 1; 10 whole under tensor parallelism: equation 2."""
    block = of_shape(**GPT_SHAPE, flash_attention=False).layers[1]
    assert block.kept_bytes == SEQ_LEN * 256 * 34 + 5 * 4 * SEQ_LEN**2
    assert block.whole_kept_bytes == SEQ_LEN * 256 * 10


def test_a_published_model_has_its_published_size() -> None:
    """Llama of 8 billion, as nanotron's benchmarks trained it: untied, all heads of keys, 131,072 tokens."""
    found = of_shape(**{**LLAMA_SHAPE, "ffn": 14336, "layers": 32, "hidden": 4096, "heads": 32, "vocab": 131072})
    assert found.n_parameters == pytest.approx(8.86e9, rel=0.001)
    assert found.n_blocks == 32 and len(found.layers) == 34
