"""Transformers models as chains of layers: the families of BERT, DistilBERT and GPT-2.

The parts are the model's own modules, so weights, ties and arithmetic are too. A head is the model's own class with its base
model replaced by one that hands on given hidden states: it computes logits and loss as the whole model does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .errors import JobError
from .layers import LayerStack

__all__ = ["as_stack"]

LABELS = ("labels", "next_sentence_label", "start_positions", "end_positions")
"""Names under which batches hold labels, in the order in which they travel."""


def as_stack(model: nn.Module) -> LayerStack:
    """The layers of a model.

    Raises:
        JobError: It cannot be split; the text is the reason.
    """
    if not all(parameter.requires_grad for parameter in model.parameters()):
        raise JobError("some of its weights are frozen, and a gradient must flow through every cut of a pipeline")
    if isinstance(model, LayerStack):
        return model
    split = _SPLITS.get(type(model).__name__)
    if split is None:
        known = ", ".join(sorted({name.partition("For")[0].removesuffix("LMHeadModel") for name in _SPLITS}))
        raise JobError(
            f"{type(model).__name__} is neither a list of layers nor of a family that can be split ({known})"
        )
    return split(model)


class _FamilyStack(LayerStack):
    """A split transformers model. Between layers travel the hidden states and the mask of padding."""

    def pair(self, batch: Any) -> tuple[Any, Any]:
        if not isinstance(batch, Mapping) or "input_ids" not in batch:
            raise JobError("a split transformers model must get batches that are mappings with input_ids")
        tokens = batch["input_ids"]
        mask = batch.get("attention_mask")
        inputs = [tokens, torch.ones_like(tokens) if mask is None else mask.long()]
        if batch.get("token_type_ids") is not None:
            inputs.append(batch["token_type_ids"])
        names = [name for name in LABELS if batch.get(name) is not None]
        strangers = batch.keys() - {"input_ids", "attention_mask", "token_type_ids", *names}
        if strangers or not names:
            raise JobError(
                "batches of a split transformers model may hold input_ids, attention_mask, token_type_ids and labels; "
                f"these hold {', '.join(batch)}"
            )
        head = self.layers[-1]
        assert isinstance(head, _Head)
        head.label_names = names
        return tuple(inputs), tuple(batch[name] for name in names)

    def recomputable(self) -> list[int]:
        return [number for number, layer in enumerate(self.layers) if isinstance(layer, _Block)]


class _PaddingMask:
    """The mask that attention takes, from that of padding: made once per micro-batch and stage, by transformers itself.

    Blocks of a decoder that are called without it see the future under eager attention.
    """

    def __init__(self, config: Any, *, is_causal: bool) -> None:
        self._config = config
        self._is_causal = is_causal
        self._made_from: Tensor | None = None
        self._made: Any = None

    def __call__(self, hidden: Tensor, padding: Tensor) -> Any:
        if self._made_from is not padding:
            from transformers.masking_utils import create_bidirectional_mask, create_causal_mask

            make = create_causal_mask if self._is_causal else create_bidirectional_mask
            positions = {"position_ids": _positions(hidden), "cache": None} if self._is_causal else {}
            self._made = make(config=self._config, inputs_embeds=hidden, attention_mask=padding, **positions)
            self._made_from = padding
        return self._made


def _positions(hidden: Tensor) -> Tensor:
    return torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)


class _Embedding(nn.Module):
    """(tokens, padding[, token types]) -> (hidden states, padding)."""

    def __init__(self, parts: Mapping[str, nn.Module], embed: Callable[..., Tensor]) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(parts)
        self._embed = embed

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        tokens, padding, *types = inputs
        return self._embed(self.parts, tokens, types[0] if types else None), padding


class _Block(nn.Module):
    """One transformer layer: (hidden states, padding) -> the same."""

    def __init__(self, block: nn.Module, mask: _PaddingMask, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.block = block
        self._mask = mask
        self._call = call

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, padding = inputs
        return self._call(self.block, hidden, self._mask(hidden, padding)), padding


class _Given(nn.Module):
    """In the place of the base model: hidden states come in as embeddings and go out as its result."""

    def __init__(self, norm: nn.Module | None, pooler: nn.Module | None) -> None:
        super().__init__()
        self.norm = norm
        self.pooler = pooler

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

        hidden = inputs_embeds if self.norm is None else self.norm(inputs_embeds)
        pooled = None if self.pooler is None else self.pooler(hidden)
        return BaseModelOutputWithPoolingAndCrossAttentions(last_hidden_state=hidden, pooler_output=pooled)


class _Head(nn.Module):
    """The last layer, which holds the head's weights; logits are computed with the loss, when the labels are there."""

    def __init__(self, model: nn.Module, *, norm: nn.Module | None = None, pooler: nn.Module | None = None) -> None:
        super().__init__()
        self.head = copy.copy(model)
        self.head._modules = {**model._modules, str(model.base_model_prefix): _Given(norm, pooler)}
        self.label_names: list[str] = ["labels"]

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return inputs

    def loss(self, outputs: tuple[Tensor, Tensor], labels: tuple[Tensor, ...]) -> Any:
        return self.head(inputs_embeds=outputs[0], **dict(zip(self.label_names, labels, strict=True))).loss


def _family(embedding: _Embedding, blocks: list[_Block], head: _Head) -> LayerStack:
    return _FamilyStack([embedding, *blocks, head], head.loss)


def _split_bert(model: Any) -> LayerStack:
    if model.config.is_decoder or model.config.add_cross_attention:
        raise JobError(f"{type(model).__name__} as a decoder cannot be split")
    bert = model.bert
    mask = _PaddingMask(bert.config, is_causal=False)
    embedding = _Embedding({"embeddings": bert.embeddings}, _embed_bert)
    blocks = [_Block(block, mask, _call_block) for block in bert.encoder.layer]
    return _family(embedding, blocks, _Head(model, pooler=bert.pooler))


def _embed_bert(parts: nn.ModuleDict, tokens: Tensor, types: Tensor | None) -> Tensor:
    embedded: Tensor = parts["embeddings"](input_ids=tokens, token_type_ids=types)
    return embedded


def _call_block(block: nn.Module, hidden: Tensor, mask: Any) -> Tensor:
    found: Tensor = block(hidden, mask)
    return found


def _split_distilbert(model: Any) -> LayerStack:
    base = model.distilbert
    mask = _PaddingMask(base.config, is_causal=False)
    embedding = _Embedding({"embeddings": base.embeddings}, _embed_distilbert)
    return _family(embedding, [_Block(block, mask, _call_block) for block in base.transformer.layer], _Head(model))


def _embed_distilbert(parts: nn.ModuleDict, tokens: Tensor, types: Tensor | None) -> Tensor:
    if types is not None:
        raise JobError("DistilBERT takes no token_type_ids")
    embedded: Tensor = parts["embeddings"](tokens)
    return embedded


def _split_gpt2(model: Any) -> LayerStack:
    base = model.transformer
    if base.config.add_cross_attention:
        raise JobError(f"{type(model).__name__} with cross-attention cannot be split")
    mask = _PaddingMask(base.config, is_causal=True)
    embedding = _Embedding({"tokens": base.wte, "positions": base.wpe, "dropout": base.drop}, _embed_gpt2)
    blocks = [_Block(block, mask, _call_gpt2_block) for block in base.h]
    return _family(embedding, blocks, _Head(model, norm=base.ln_f))


def _embed_gpt2(parts: nn.ModuleDict, tokens: Tensor, types: Tensor | None) -> Tensor:
    embedded = parts["tokens"](tokens)
    embedded = embedded + parts["positions"](_positions(embedded))
    if types is not None:
        embedded = embedded + parts["tokens"](types)
    dropped: Tensor = parts["dropout"](embedded)
    return dropped


def _call_gpt2_block(block: nn.Module, hidden: Tensor, mask: Any) -> Tensor:
    found: Tensor = block(hidden, None, mask, position_ids=_positions(hidden), use_cache=False)
    return found


_HEADS = {
    "Bert": (
        _split_bert,
        ("MaskedLM", "PreTraining", "SequenceClassification", "TokenClassification", "QuestionAnswering"),
    ),
    "DistilBert": (
        _split_distilbert,
        ("MaskedLM", "SequenceClassification", "TokenClassification", "QuestionAnswering"),
    ),
    # GPT-2's sequence classification looks for the last token in the input, which the last stage has not.
    "GPT2": (_split_gpt2, ("TokenClassification", "QuestionAnswering")),
}
_SPLITS: dict[str, Callable[[Any], LayerStack]] = {
    "GPT2LMHeadModel": _split_gpt2,
    **{f"{family}For{head}": split for family, (split, heads) in _HEADS.items() for head in heads},
}
