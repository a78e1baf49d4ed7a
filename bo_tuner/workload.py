"""`Workload`: what is trained. `ModelSpec`: which model, by preset name or from a Hugging Face config on disk."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from bo_tuner.errors import ConfigError, ModelError
from bo_tuner.stored import known_fields
from bo_tuner.text import did_you_mean

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["OPTIMIZERS", "UNKNOWN_LENGTH", "ModelSpec", "ModelStructure", "Precision", "Workload", "preset_names"]

Precision = Literal["fp32", "bf16", "fp16"]
OPTIMIZERS = ("adamw", "adam", "fused_adam")
"""Those that go by name: torch's two, and DeepSpeed's FusedAdam, which decouples weight decay as AdamW does."""
UNKNOWN_LENGTH = 1
"""Stands for the tokens of a sample until model and data were looked at, and where samples are no tokens."""

_LENGTH_FIELDS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx")
_LONGEST_USUAL = 2048
_LONGEST_USUAL_ON_CPU = 128
"""Steps of a whole context take seconds to minutes on a CPU, where nobody trains for long."""
_COUNT_FROM_PADDING = ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "roberta-prelayernorm", "longformer")
"""Their first position is pad_token_id + 1, so as many positions are never used."""


def preset_names() -> list[str]:
    """Models that are known by name."""
    folder = resources.files("bo_tuner.presets")
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model without weights: a Hugging Face architecture, or a structure that code makes."""

    name: str
    """For people and for names of studies."""
    architecture: Mapping[str, Any]
    """A Hugging Face `config.json`; empty for a model from code that is none of transformers'."""
    source: Literal["config", "function", "object"] = "config"
    """What gives it: a Hugging Face config, a function of the user's, or an object in Python. The latter two travel as a pickled structure."""
    function: str = ""
    """`FILE.py:FUNCTION`, the path absolute, where `source` is a function."""
    digest: str = ""
    """Of the parameters of a model from code: tells that it is still the same. Empty until it was built."""

    @classmethod
    def resolve(cls, model: str | Path | PretrainedConfig | ModelSpec) -> ModelSpec:
        """Find a model.

        Args:
            model: A preset's name, a folder that holds `config.json`, such a file, or a transformers config object.

        Raises:
            ModelError: No such preset or file, or the file is not a model's config.
        """
        if isinstance(model, ModelSpec):
            return model
        if isinstance(model, str | Path):
            text = str(model)
            if text in preset_names():
                found = resources.files("bo_tuner.presets").joinpath(f"{text}.json").read_text(encoding="utf-8")
                return cls(name=text, architecture=json.loads(found))
            return cls._from_path(Path(os.path.expanduser(model)), text)
        if hasattr(model, "to_dict") and hasattr(model, "model_type"):
            architecture = json.loads(json.dumps(model.to_dict(), default=str))
            name = str(getattr(model, "name_or_path", "") or model.model_type)
            return cls(name=Path(name).name, architecture={"model_type": model.model_type, **architecture})
        what = f"the class {model.__name__}: make one" if isinstance(model, type) else type(model).__name__
        raise ModelError(
            "a model must be a preset's name, a path to a Hugging Face config, FILE.py:FUNCTION, a transformers config or a "
            f"torch module; got {what}"
        )

    @classmethod
    def _from_path(cls, path: Path, given: str) -> ModelSpec:
        is_folder = bool(given.strip()) and os.path.isdir(path)  # os.path: False for a text that is no path at all
        file = path / "config.json" if is_folder else path
        if not given.strip() or not os.path.exists(file):
            if is_folder:
                raise ModelError(f"folder {given} must hold a config.json, and does not")
            known = preset_names()
            raise ModelError(
                f"model {given!r} is neither a preset nor a path{did_you_mean(given, known)}; presets: {', '.join(known)}"
            )
        try:
            architecture = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelError(f"{file} must be a Hugging Face config in JSON, and cannot be read: {error}") from error
        if not isinstance(architecture, dict) or "model_type" not in architecture:
            raise ModelError(f"{file} must be a Hugging Face config; it has no model_type")
        return cls(
            name=file.parent.resolve().name if file.name == "config.json" else file.stem, architecture=architecture
        )

    @property
    def remark(self) -> str:
        """What of the model's config is left aside, in one line; empty when it is taken whole."""
        quantization = self.architecture.get("quantization_config")
        if not quantization:
            return ""
        method = quantization.get("quant_method", "") if isinstance(quantization, Mapping) else ""
        return f"the config's quantization{f' ({method})' if method else ''} is ignored: all weights are trained, in full precision"

    @property
    def longest_seq_len(self) -> int | None:
        """Most tokens a sample may have, where positions are limited."""
        for field in _LENGTH_FIELDS:
            value = self.architecture.get(field)
            if isinstance(value, int) and value > 0:
                if self.architecture.get("model_type") in _COUNT_FROM_PADDING:
                    padding = self.architecture.get("pad_token_id", 1)
                    value -= (padding if isinstance(padding, int) else 1) + 1
                return value
        return None

    @property
    def usual_seq_len(self) -> int:
        """Tokens of a sample by default: the longest, but at most 2048."""
        return min(self.longest_seq_len or _LONGEST_USUAL, _LONGEST_USUAL)

    def made_up_seq_len(self, device: str) -> int:
        """The same of samples that are made up, on such a device: at most 128 on a CPU. The user's data is asked for the usual length."""
        return min(self.usual_seq_len, _LONGEST_USUAL_ON_CPU) if device == "cpu" else self.usual_seq_len


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStructure:
    """What building a model once has shown of it."""

    n_trainable: int | None = None
    """Parameters that are trained; None when all are."""
    layer_costs: tuple[float, ...] = ()
    """Of each layer that a pipeline can be cut between, embedding and head included; empty when it cannot be split."""
    cost_unit: str = ""
    """Of `layer_costs`: `seconds` (forward and backward of one sample) or `parameters`."""
    whole_because: str = ""
    """Why it cannot be split; empty when it can."""
    plain_because: str = ""
    """Why its activations cannot be recomputed; empty when they can."""

    @property
    def max_depth(self) -> int:
        """Most pipeline stages."""
        return max(len(self.layer_costs), 1)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelStructure:
        """The inverse of `dataclasses.asdict`."""
        values: dict[str, Any] = {**known_fields(cls, data), "layer_costs": tuple(data.get("layer_costs", ()))}
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is trained: the same for every trial of a study.

    Raises:
        ConfigError: A value is outside its domain, or the sequence is longer than the model has positions.
    """

    model: ModelSpec
    n_parameters: int
    """Trainable and frozen, tied ones once."""
    seq_len: int
    """Tokens of a sample."""
    precision: Precision = "fp32"
    """Of weights in the forward pass; 16-bit keeps fp32 master weights."""
    optimizer: str = "adamw"
    """`adamw`, `adam`, `fused_adam`, or where the user's own comes from: `FILE.py:FUNCTION` or a Python name."""
    data: str | None = None
    """Where the user's data comes from, as for `optimizer`; None for synthetic samples."""
    data_seq_len: int | None = None
    """Tokens of a sample that the user's data is asked for, whose samples may have others; None where it decides."""
    n_samples: int | None = None
    """Of the user's data set; None where it has no length, and for synthetic samples."""
    structure: ModelStructure = ModelStructure()

    def __post_init__(self) -> None:
        check_choice("--precision", self.precision, get_args(Precision))
        check_seq_len(self.model, self.seq_len)

    @property
    def label(self) -> str:
        """Short, for names: `bert-tiny_seq128_fp32`; the user's data, whose samples may be of any length, by its function's name; a
        length that is not known yet is left out."""
        samples = f"seq{self.seq_len}" if self.data is None else _short(self.data)
        if self.data is None and self.seq_len == UNKNOWN_LENGTH:
            samples = ""
        optimizer = "" if self.optimizer == "adamw" else _short(self.optimizer)
        return "_".join(part for part in (self.model.name, samples, self.precision, optimizer) if part)

    def to_dict(self) -> dict[str, Any]:
        """Plain data that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Workload:
        """The inverse of `to_dict`."""
        model = ModelSpec(**known_fields(ModelSpec, data["model"]))
        values: dict[str, Any] = {**known_fields(cls, data), "model": model}
        if "structure" in data:
            values["structure"] = ModelStructure.from_dict(data["structure"])
        return cls(**values)


def _short(source: str) -> str:
    return source.rpartition(":")[2]


def check_choice(option: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuse a value that is none of `choices`, in the words of the option."""
    if value not in choices:
        raise ConfigError(f"{option} must be one of {', '.join(choices)}; got {value!r}")


def check_seq_len(model: ModelSpec, seq_len: int) -> None:
    """Refuse a length that the model has no positions for."""
    longest = model.longest_seq_len
    if seq_len < 1 or (longest is not None and seq_len > longest):
        most = f" and at most the {longest} positions of {model.name}" if longest else ""
        raise ConfigError(f"--seq-len must be at least 1{most}; got {seq_len}")
