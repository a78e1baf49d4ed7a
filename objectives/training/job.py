"""The training job itself: model, synthetic or own data, DeepSpeed engine, one optimizer step.

This file imports nothing of bo_tuner. `bo-tuner export` puts a copy of it beside the exported script, so that what runs
there is the very code that was measured.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

__all__ = [
    "StepTimes",
    "SyntheticData",
    "batches",
    "build_engine",
    "build_model",
    "join_group",
    "labels_kind",
    "model_class",
    "place_model",
    "run_step",
]

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
        raise LookupError(f"transformers {transformers.__version__} has no class {named[0]!r}")
    if labels_kind(found.__name__) is None:
        endings = ", ".join(LABELS_BY_SUFFIX)
        raise ValueError(f"{found.__name__} gives no loss; the class must end in one of {endings}")
    return found


def labels_kind(class_name: str) -> str | None:
    """Which labels the class takes; None when it computes no loss."""
    return next((kind for suffix, kind in LABELS_BY_SUFFIX.items() if class_name.endswith(suffix)), None)


def build_model(architecture: Mapping[str, Any]) -> nn.Module:
    """The model with fresh random weights, on torch's current default device. Nothing is downloaded.

    Raises:
        Exception: Whatever the model's own constructor raises.
    """
    model = model_class(architecture)(_hf_config(architecture))
    model.config.use_cache = False  # type: ignore[union-attr]  # keys and values are of no use in training
    return model


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


def batches(
    data: Dataset[dict[str, Tensor]], *, micro_batch_size: int, rank: int, n_workers: int = 0, seed: int = 0
) -> Iterator[dict[str, Tensor]]:
    """Endless micro-batches on the host; every rank draws its own samples, with replacement."""
    n_drawn = 1 << 30
    generator = torch.Generator().manual_seed(seed * 1_000_003 + rank)
    sampler = RandomSampler(data, replacement=True, num_samples=n_drawn, generator=generator)  # type: ignore[arg-type]  # sized
    return iter(
        DataLoader(
            data,
            batch_size=micro_batch_size,
            sampler=sampler,
            num_workers=n_workers,
            pin_memory=torch.cuda.is_available(),
        )
    )


def join_group(device: torch.device, *, init_method: str | None = None, rank: int = -1, world_size: int = -1) -> None:
    """Join the process group that DeepSpeed will use: gloo on a CPU, NCCL on GPUs.

    Args:
        device: Where this rank computes.
        init_method: As in torch.distributed; None reads the launcher's environment variables.
        rank: Of this process, where `init_method` needs it.
        world_size: Likewise.
    """
    import deepspeed

    backend = "nccl" if device.type == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size)
    deepspeed.init_distributed(dist_backend=backend)


def place_model(architecture: Mapping[str, Any], ds_config: Mapping[str, Any], *, device: torch.device) -> nn.Module:
    """The model as one rank holds it at first: whole on `device`, or sharded from the start under ZeRO 3.

    Args:
        architecture: A Hugging Face `config.json` as a mapping.
        ds_config: A complete DeepSpeed config.
        device: Where this rank computes.
    """
    if ds_config.get("zero_optimization", {}).get("stage") != 3:
        with device:
            return build_model(architecture)
    import deepspeed

    # transformers writes initial weights into the finished model, which no rank holds under ZeRO 3: it is kept from that
    # while building, then each module is gathered and initialised in turn.
    with _no_initial_weights(), deepspeed.zero.Init(config_dict_or_path=dict(ds_config)):
        model = build_model(architecture)
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if own:
            with deepspeed.zero.GatheredParameters(own, modifier_rank=0):
                if torch.distributed.get_rank() == 0:
                    model._init_weights(module)  # type: ignore[operator]  # every PreTrainedModel has it
    return model


@contextlib.contextmanager
def _no_initial_weights() -> Iterator[None]:
    from transformers import PreTrainedModel

    original = PreTrainedModel.initialize_weights
    PreTrainedModel.initialize_weights = lambda *_, **__: None
    try:
        yield
    finally:
        PreTrainedModel.initialize_weights = original


def build_engine(model: nn.Module, ds_config: Mapping[str, Any]) -> Any:
    """The model under DeepSpeed, ready for `run_step`; the process group must exist.

    Raises:
        Exception: What DeepSpeed raises when it refuses the config.
    """
    import deepspeed

    model.train()
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return deepspeed.initialize(model=model, model_parameters=trainable, config=dict(ds_config))[0]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One optimizer step, in seconds of this rank's clock."""

    total_s: float
    """End to end: loading, copying, forward, backward, update, until the device is done."""
    engine_s: float
    """Forward + backward + step alone."""
    loss: float
    """Mean over the micro-batches."""


def run_step(engine: Any, data: Iterator[Mapping[str, Tensor]], *, grad_accum_steps: int) -> StepTimes:
    """One optimizer step of `grad_accum_steps` micro-batches, timed until the device is done."""
    device: torch.device = engine.device
    clock = _GpuClock() if device.type == "cuda" else _HostClock()
    losses: list[Tensor] = []
    started = time.perf_counter()
    for _ in range(grad_accum_steps):
        batch = {name: tensor.to(device, non_blocking=True) for name, tensor in next(data).items()}
        with clock:
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
        losses.append(loss.detach())
        del loss, batch
    mean_loss = float(torch.stack(losses).float().mean())
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    total_s = time.perf_counter() - started
    return StepTimes(total_s=total_s, engine_s=clock.total_s(), loss=mean_loss)


class _HostClock:
    """Adds up the time of `with` blocks by the host's clock: right where the call returns when the work is done."""

    def __init__(self) -> None:
        self._total_s = 0.0
        self._started = 0.0

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._total_s += time.perf_counter() - self._started

    def total_s(self) -> float:
        return self._total_s


class _GpuClock:
    """Adds up the time of `with` blocks on the device's own stream, without holding it up."""

    def __init__(self) -> None:
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __enter__(self) -> None:
        span = (_gpu_event(), _gpu_event())
        span[0].record()
        self._spans.append(span)

    def __exit__(self, *_: object) -> None:
        self._spans[-1][1].record()

    def total_s(self) -> float:
        """Seconds; the device must be synchronised."""
        spans_ms: list[float] = [begin.elapsed_time(end) for begin, end in self._spans]
        return sum(spans_ms) / 1000


def _gpu_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch leaves it bare
