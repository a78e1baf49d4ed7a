"""`ModelProfile`: what a model costs before it runs: per layer parameters, operations, memory traffic and activations kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from bo_tuner.stored import known_fields

__all__ = ["WIDE", "LayerProfile", "ModelProfile", "Recomputed", "Tie"]

WIDE = 8
"""A product that makes over so many times as many features as it reads is wide: those of a block make up to 4 times as many, or 16/3
of a gated one in one matrix; a vocabulary is wide unless the model is very large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputed:
    """What changes of a layer where blocks forget their activations and compute them again; units as in `LayerProfile`."""

    kept_bytes: int
    """Of a block its inputs; of a model that is one layer those of its blocks, and what lies outside of them."""
    whole_kept_bytes: int
    working_bytes: int
    """Of a block its activations, which come back for a moment."""
    share: float
    """Of the products of the forward pass that are computed again, 0 to 1: a block repeats all, but for what nobody needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile:
    """One layer, for one sample and one forward pass, on one device."""

    name: str
    """For people: `embedding`, `block`, `head`, or a class."""
    n_parameters: int
    """Trainable and frozen; tied ones count in every layer that uses them."""
    n_trainable: int
    matmul_flops: int
    """Products with weights, a multiplication and an addition each one operation."""
    attention_flops: int
    """Products of activations with one another; a causal mask saves none here, though kernels may leave half of them out."""
    moved_bytes: int
    """Read and written by all operations that are no matrix products."""
    n_operations: int
    """Kernels that the host launches, whatever the number of samples."""
    kept_bytes: int
    """Activations kept for the backward pass, without weights and without what an earlier layer keeps already."""
    whole_kept_bytes: int
    """The part of `kept_bytes` that every tensor-parallel rank keeps whole."""
    output_bytes: int
    """Handed on to the next layer."""
    working_bytes: int = 0
    """Most that is alive for a moment beyond what is kept, in either pass: of a head the logits in fp32 and their gradient. Gradients
    of activations are among it, those of weights are not."""
    wide_bytes: int = 0
    """Written by products with weights that make over `WIDE` times as many features as they read: logits."""
    n_tensors: int = 0
    """That hold the trainable parameters; 0 where a shape alone is known."""
    is_block: bool = False
    """One of the layers alike that recomputation applies to."""
    recomputed: Recomputed | None = None
    """Under recomputation of all blocks of the model; None where that changes nothing."""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LayerProfile:
        """The inverse of `dataclasses.asdict`."""
        values = known_fields(cls, data)
        if values.get("recomputed") is not None:
            values["recomputed"] = Recomputed(**known_fields(Recomputed, data["recomputed"]))
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tie:
    """Parameters that two layers share."""

    first: int
    """Index of the layer that holds them."""
    second: int
    """Index of a later layer that uses them again."""
    n_parameters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """A model on samples of one length."""

    name: str
    seq_len: int
    """Tokens of a sample."""
    element_bytes: int
    """Of a weight, and of an activation, in the forward pass: 2 or 4."""
    hidden: int
    """Width of the model: features of a token between two layers."""
    heads: int
    """Attention heads; most that tensor parallelism can divide a layer by."""
    layers: tuple[LayerProfile, ...]
    """In order; a pipeline may be cut between any two."""
    ties: tuple[Tie, ...] = ()
    whole_because: str = ""
    """Why it is one layer here and cannot be split; empty when it can."""

    @property
    def n_parameters(self) -> int:
        """Tied ones once."""
        return sum(layer.n_parameters for layer in self.layers) - sum(tie.n_parameters for tie in self.ties)

    @property
    def n_trainable(self) -> int:
        """Those that are trained, tied ones once; a tied parameter is taken as trained when its first layer is."""
        frozen = sum(tie.n_parameters for tie in self.ties if not self.layers[tie.first].n_trainable)
        return sum(layer.n_trainable for layer in self.layers) - sum(tie.n_parameters for tie in self.ties) + frozen

    @property
    def flops(self) -> int:
        """Matrix products of one sample's forward pass."""
        return sum(layer.matmul_flops + layer.attention_flops for layer in self.layers)

    @property
    def n_blocks(self) -> int:
        """Layers that recomputation applies to."""
        return sum(layer.is_block for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        """Plain data that JSON can hold, in which layers that are alike stand once: models have hundreds, databases and messages limits."""
        kinds = list(dict.fromkeys(self.layers))
        return {
            **asdict(self),
            "layers": [kinds.index(layer) for layer in self.layers],
            "kinds": [asdict(kind) for kind in kinds],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelProfile:
        """The inverse of `to_dict`."""
        kinds = [LayerProfile.from_dict(kind) for kind in data["kinds"]]
        values = known_fields(cls, data)
        values["layers"] = tuple(kinds[index] for index in data["layers"])
        values["ties"] = tuple(Tie(**known_fields(Tie, tie)) for tie in data["ties"])
        return cls(**values)
