"""`profile_of_shape`: the profile of a decoder from its shape alone, and `profile_of_size` from its parameters alone, for tables of
measurements that name no more."""

from __future__ import annotations

from bo_tuner.profile import WIDE, LayerProfile, ModelProfile, Recomputed, Tie

__all__ = ["profile_of_shape", "profile_of_size"]

_INDEX_BYTES = 8
"""Of a token's number, kept by the embedding, and of its label, kept by the loss."""
_SINGLE = 4
"""Bytes of fp32, which sums, norms without a kernel of their own, and losses are computed in."""
_WIDTH_OF_LAYERS = 128
"""Width for each layer, and of a head, in GPT-3 of 6.7 B and of 175 B parameters (Brown et al., arXiv 2005.14165, table 2.1)."""
_VOCAB = 50_257
"""Of GPT-3."""


def profile_of_size(*, name: str, n_parameters: int, seq_len: int) -> ModelProfile:
    """A profile as GPT-3's would be with so many parameters: how a config compares with others depends on the shape only weakly.

    Blocks hold 12 x layers x width^2 parameters (Kaplan et al., arXiv 2001.08361, section 2.1).

    Args:
        name: For people.
        n_parameters: Of the model.
        seq_len: Tokens of a sample.
    """
    layers = max(round((n_parameters / (12 * _WIDTH_OF_LAYERS**2)) ** (1 / 3)), 1)
    width = layers * _WIDTH_OF_LAYERS
    return profile_of_shape(
        name=name,
        seq_len=seq_len,
        layers=layers,
        hidden=width,
        heads=layers,
        ffn=4 * width,
        vocab=_VOCAB,
        gated_mlp=False,
        tied_embeddings=True,
        causal=True,
    )


def profile_of_shape(
    *,
    name: str,
    seq_len: int,
    layers: int,
    hidden: int,
    heads: int,
    ffn: int,
    vocab: int,
    gated_mlp: bool,
    tied_embeddings: bool,
    causal: bool = False,
    flash_attention: bool = True,
    fused_kernels: bool = True,
    activation_dtype_bytes: int = 2,
    kv_heads: int | None = None,
    n_positions: int = 0,
) -> ModelProfile:
    """A profile as a trace of such a model would give it.

    Kept bytes follow Korthikanti 2022 ("Reducing Activation Recomputation in Large Transformer Models"), section 4.1, per token and
    for 2 bytes an element: norms 4h, inputs of products 4h, query, key, value and attention's result 8h, masks of dropout 2h, the wide
    part 4f, or 8f with a gate (its two factors, one of them before and after its activation, and their product). Without flash
    attention the scores come on top, 5as, or 2as without dropout. Section 4.2: of all that, tensor parallelism leaves norms, inputs
    and masks whole.

    Args:
        name: For people.
        seq_len: Tokens of a sample.
        layers: Blocks.
        hidden: Width.
        heads: Of attention.
        ffn: Width of the feed-forward part.
        vocab: Rows of the embedding.
        gated_mlp: As Llama: three matrices with a gate, RMS norms, rotary positions, no biases and no dropout. Otherwise as GPT: two
            matrices, layer norms, biases, dropout.
        tied_embeddings: The head uses the embedding's table again.
        causal: A token attends to earlier ones only; kernels of flash attention then leave half of the products out.
        flash_attention: No scores are kept.
        fused_kernels: Norms, activations, rotary positions and the softmax of scores are one kernel each; else they are made of single
            operations: RMS norms keep their input in fp32, scores are kept in fp32 too, GELU (its tanh form) keeps three results more.
        activation_dtype_bytes: Of a weight and an activation.
        kv_heads: Heads of keys and values; None for as many as `heads`.
        n_positions: Rows of a table of positions; 0 where there is none.
    """
    e, h, f, s = activation_dtype_bytes, hidden, ffn, seq_len
    keys = h // heads * (kv_heads or heads)
    scores = 0 if flash_attention else heads * s
    norm_parameters = h if gated_mlp else 2 * h
    matrices = 2 * h * h + 2 * h * keys + (3 if gated_mlp else 2) * h * f
    biases = 0 if gated_mlp else h + 2 * keys + h + f + h
    drops = 0 if gated_mlp else 1

    norm_kept = _SINGLE * h if gated_mlp and not fused_kernels else e * h
    norm_result = e * h if gated_mlp and not fused_kernels else 0  # before it is scaled
    whole = 2 * (norm_kept + norm_result + e * h) + drops * 2 * h
    wide = e * f * ((4 if gated_mlp else 2) + (0 if gated_mlp or fused_kernels else 3))
    attention = e * (2 * h + 2 * keys) + (_SINGLE * heads if flash_attention else 0)
    attention += scores * (e + drops * (1 + e) + (0 if fused_kernels else _SINGLE))
    kept = s * (whole + wide + attention)

    n_norm, norm_moved = (8, h * (24 + 4 * e)) if gated_mlp and not fused_kernels else (1, 2 * e * h)
    n_act, act_moved = (2, 5) if gated_mlp else (8, 18)
    if fused_kernels:
        n_act, act_moved = (1, 3 if gated_mlp else 2)
    n_rotary, rotary_moved = (0, 0) if not gated_mlp else (2, 2) if fused_kernels else (10, 10)
    n_scores, scores_moved = (1, 2 * e) if fused_kernels else (5, 6 * e + 4 * _SINGLE)
    moved = 2 * norm_moved + 2 * 3 * e * h + act_moved * e * f + rotary_moved * e * (h + keys) + scores_moved * scores
    moved += drops * (2 * e + 1) * (2 * h + scores)
    n_attention = 1 if flash_attention else 2 + n_scores + drops
    n_products = 6 + 1 if gated_mlp else 3 + 1
    n_operations = 2 * n_norm + 2 + 2 * drops + n_products + n_act + n_rotary + n_attention

    hidden_bytes = s * e * h
    # Gradients of the wide part, of what it is made from where no kernel does that at once, and of its input and result.
    working = s * e * ((1 if fused_kernels and not gated_mlp else 2) * f + 2 * h)
    block = LayerProfile(
        name="block",
        n_parameters=matrices + biases + 2 * norm_parameters,
        n_trainable=matrices + biases + 2 * norm_parameters,
        matmul_flops=2 * s * matrices,
        attention_flops=4 * s * s * h // (2 if causal and flash_attention else 1),
        moved_bytes=s * moved,
        n_operations=n_operations,
        kept_bytes=kept,
        whole_kept_bytes=s * whole,
        output_bytes=hidden_bytes,
        working_bytes=working,
        is_block=True,
        recomputed=Recomputed(
            kept_bytes=hidden_bytes,
            whole_kept_bytes=hidden_bytes,
            working_bytes=kept - hidden_bytes + working,
            share=1.0,
        ),
    )
    embedding = LayerProfile(
        name="embedding",
        n_parameters=(vocab + n_positions) * h,
        n_trainable=(vocab + n_positions) * h,
        matmul_flops=0,
        attention_flops=0,
        moved_bytes=s * h * (2 * e + (3 * e if n_positions else 0) + drops * (2 * e + 1)),
        n_operations=1 + (2 if n_positions else 0) + drops,
        kept_bytes=s * (_INDEX_BYTES + drops * h),
        whole_kept_bytes=s * (_INDEX_BYTES + drops * h),
        output_bytes=hidden_bytes,
        working_bytes=2 * hidden_bytes,
    )
    head_whole = s * (norm_kept + norm_result + e * h + _INDEX_BYTES)
    head = LayerProfile(
        name="head",
        n_parameters=vocab * h + norm_parameters,
        n_trainable=vocab * h + norm_parameters,
        matmul_flops=2 * s * h * vocab,
        attention_flops=0,
        moved_bytes=s * (norm_moved + vocab * (e + 3 * _SINGLE)),
        wide_bytes=s * e * vocab if vocab > WIDE * h else 0,
        n_operations=n_norm + 4,
        kept_bytes=head_whole + s * _SINGLE * vocab,
        whole_kept_bytes=head_whole,
        output_bytes=0,
        working_bytes=s * 2 * _SINGLE * vocab,
    )
    return ModelProfile(
        name=name,
        seq_len=s,
        element_bytes=e,
        hidden=h,
        heads=heads,
        layers=(embedding, *[block] * layers, head),
        ties=(Tie(first=0, second=layers + 1, n_parameters=vocab * h),) if tied_embeddings else (),
    )
