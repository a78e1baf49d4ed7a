"""Models of transformers: built from an architecture without weights, and random samples of the right shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from .structure import without_weights

__all__ = ["SyntheticData", "architecture_of", "build_structure", "keep_no_caches", "labels_kind", "model_class"]

LABELS_BY_SUFFIX = {
    "ForMaskedLM": "tokens",
    "ForPreTraining": "pretraining",
    "LMHeadModel": "tokens",
    "ForCausalLM": "tokens",
    "ForTokenClassification": "token_classes",
    "ForSequenceClassification": "class",
    "ForQuestionAnswering": "span",
}
"""What kind of labels a Hugging Face class takes, by the end of its name."""


def model_class(architecture: Mapping[str, Any]) -> type[nn.Module]:
    """The Hugging Face class that an architecture names.

    Args:
        architecture: A Hugging Face `config.json` as a mapping; `architectures[0]` decides, else the language-model head
            of `model_type`.

    Raises:
        LookupError: The installed transformers has no such class.
        ValueError: It has no language-model head for the model type, or the class takes no labels.
    """
    import transformers
    from transformers.models.auto import modeling_auto

    named = architecture.get("architectures") or []
    if not named:
        kind = architecture.get("model_type")
        for table in (
            modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
            modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        ):
            if kind in table:
                named = [table[kind]]
                break
        else:
            raise ValueError(
                f"model_type {kind!r} has no language-model head in transformers; name one in architectures"
            )
    found: type[nn.Module] | None = getattr(transformers, str(named[0]), None)
    if found is None:
        raise LookupError(
            f"transformers {transformers.__version__} has no class {named[0]!r}: a model with code of its own is given as FILE.py:FUNCTION, "
            "a function that builds it"
        )
    if labels_kind(found.__name__) is None:
        endings = ", ".join(LABELS_BY_SUFFIX)
        raise ValueError(f"{found.__name__} gives no loss; the class must end in one of {endings}")
    return found


def labels_kind(class_name: str) -> str | None:
    """Which labels the class takes; None when it computes no loss."""
    return next((kind for suffix, kind in LABELS_BY_SUFFIX.items() if class_name.endswith(suffix)), None)


def build_structure(architecture: Mapping[str, Any]) -> nn.Module:
    """The model with its parameters on the meta device and its buffers on the CPU. Nothing is downloaded.

    Raises:
        Exception: Whatever the model's own constructor raises.
    """
    with without_weights():
        return model_class(architecture)(_hf_config(architecture))


def keep_no_caches(model: nn.Module) -> None:
    """Let no transformers model in `model` keep keys and values: they are of no use in training, and recomputation would add to them."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "use_cache"):
            config.use_cache = False  # type: ignore[union-attr]  # a transformers config


def architecture_of(model: nn.Module) -> dict[str, Any]:
    """The architecture that `build_structure` would take, of a transformers model that computes a loss, also inside an adapter
    of the peft library; nothing for any other."""
    config = getattr(model, "config", None)
    if not hasattr(config, "to_dict") or not hasattr(config, "model_type"):
        return {}
    kinds = [kind for module in model.modules() for kind in type(module).__mro__]
    names = [kind.__name__ for kind in kinds if kind.__module__.startswith("transformers.models.")]
    name = next((name for name in names if labels_kind(name) is not None), None)
    if name is None:
        return {}
    return {**config.to_dict(), "model_type": config.model_type, "architectures": [name]}  # type: ignore[union-attr]


def _hf_config(architecture: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    settings = {
        name: value for name, value in architecture.items() if name not in ("model_type", "transformers_version")
    }
    return AutoConfig.for_model(str(architecture["model_type"]), **settings)


class SyntheticData(Dataset[dict[str, Tensor]]):
    """Random samples of the right shape for a Hugging Face model, the same in every run with one seed.

    Each sample holds `input_ids`, `attention_mask` (all ones: the longest case) and the labels its class takes, all int64;
    token tensors have shape [seq_len]. A pool of samples is made at once and repeats.
    """

    def __init__(self, architecture: Mapping[str, Any], *, seq_len: int, n_samples: int = 256, seed: int = 0) -> None:
        config = _hf_config(architecture)
        vocab_size, n_labels = int(config.vocab_size), int(getattr(config, "num_labels", 2))
        generator = torch.Generator().manual_seed(seed)

        def integers(high: int, *shape: int) -> Tensor:
            return torch.randint(0, high, (n_samples, *shape), generator=generator)

        tokens = integers(vocab_size, seq_len)
        columns = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        match labels_kind(model_class(architecture).__name__):
            case "pretraining":
                columns |= {"labels": tokens, "next_sentence_label": integers(2)}
            case "token_classes":
                columns["labels"] = integers(n_labels, seq_len)
            case "class":
                columns["labels"] = integers(n_labels)
            case "span":
                columns |= {"start_positions": integers(seq_len), "end_positions": integers(seq_len)}
            case _:
                columns["labels"] = tokens
        self._columns = columns

    def __len__(self) -> int:
        return len(self._columns["input_ids"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self._columns.items()}
