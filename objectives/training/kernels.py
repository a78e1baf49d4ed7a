"""Which kernels attention and dropout of meta tensors take: those of a device that need not be there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, library

__all__ = ["DeviceType", "kernels_of"]

DeviceType = Literal["cpu", "cuda"]
"""Whose kernels are looked at: attention and dropout keep other things on one than on the other."""

_aten = torch.ops.aten
_MATH, _FLASH, _EFFICIENT = 0, 1, 2
"""at::SDPBackend; the values are torch's."""
_WIDEST_FLASH_HEAD = 256
"""Features of a head that CUDA's flash attention takes (torch, sdp_utils.cpp)."""


@contextmanager
def kernels_of(device: DeviceType) -> Iterator[None]:
    """Attention and dropout of meta tensors take the kernels of `device`; torch has none for the meta device, and would take others."""

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if attn_mask is not None and attn_mask.dtype is torch.bool:  # as torch does, once for each call
            seen, unseen = torch.tensor(0.0, dtype=query.dtype), torch.tensor(-torch.inf, dtype=query.dtype)
            attn_mask = torch.where(attn_mask, seen, unseen)
        given = (query, key, value)
        choose = _on_cpu if device == "cpu" else _on_cuda
        kernel = choose(*given, attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
        outputs: tuple[Tensor, ...]
        if kernel == _MATH:
            outputs = _aten._scaled_dot_product_attention_math(
                *given, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        elif device == "cpu":
            outputs = _aten._scaled_dot_product_flash_attention_for_cpu(
                *given, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
            )
        elif kernel == _FLASH:
            outputs = _aten._scaled_dot_product_flash_attention(*given, dropout_p, is_causal, scale=scale)
        else:
            bias = None if attn_mask is None else attn_mask.expand(*query.shape[:-1], key.shape[-2])
            outputs = _aten._scaled_dot_product_efficient_attention(
                *given, bias, True, dropout_p, is_causal, scale=scale
            )
        return outputs[0]

    def dropout(input: Tensor, p: float, train: bool) -> Tensor:
        """On CUDA a byte for each element is kept. Elsewhere torch multiplies with zeros and ones, and keeps those."""
        if not train or p == 0:
            return input
        dropped: Tensor = torch.native_dropout(input, p, train)[0]
        return dropped

    with library._scoped_library("aten", "IMPL") as kernels:  # pyright: ignore[reportPrivateUsage]  # made for this
        kernels.impl("scaled_dot_product_attention", attention, "AutogradMeta")
        if device == "cuda":
            kernels.impl("dropout", dropout, "AutogradMeta")
        yield


def _on_cpu(*given: Tensor | None, **settings: Any) -> int:
    """torch itself decides, about tensors like these whose memory nobody touches."""
    there = [
        None if tensor is None else torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        for tensor in given
    ]
    choice: int = torch._fused_sdp_choice(*there, **settings)  # type: ignore[arg-type]  # three tensors, and one or None
    return choice


def _on_cuda(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, enable_gqa: bool, **_: Any) -> int:
    """torch's order (sdp_utils.cpp): flash attention where there is no mask and elements have two bytes, else the memory-efficient
    kernel. Where cuDNN's comes first, it keeps what flash attention keeps.
    """
    if mask is None and query.element_size() == 2 and query.shape[-1] <= _WIDEST_FLASH_HEAD:
        return _FLASH
    return _MATH if enable_gqa else _EFFICIENT
