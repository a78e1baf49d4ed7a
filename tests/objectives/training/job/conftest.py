"""Small models with strong weights, and real ranks that train them exactly as a trial does."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bo_tuner.config import TrainConfig
from bo_tuner.objectives.launch import ForkServer
from bo_tuner.objectives.training import deepspeed_config
from bo_tuner.objectives.training.job.functions import load_function
from bo_tuner.objectives.training.job.hugging_face import architecture_of
from bo_tuner.objectives.training.sources import write_object
from bo_tuner.workload import ModelSpec, Precision, Workload

TARGETS = Path(__file__).parents[3] / "targets"
_LONGEST_S = 400.0


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


class Ranks:
    """Trains a model in real ranks."""

    def __init__(self, server: ForkServer, folder: Path) -> None:
        self._server = server
        self._folder = folder
        self._numbers = itertools.count()

    def train(
        self,
        model: nn.Module,
        *,
        data: str | None = "language",
        n_ranks: int = 2,
        n_steps: int = 2,
        zero_stage: int = 0,
        micro_batch_size: int = 2,
        grad_accum_steps: int = 1,
        stages: Sequence[int] | None = None,
        recompute: bool = False,
        precision: Precision = "fp32",
        optimizer: str | None = "sgd",
    ) -> list[dict[str, Any]]:
        """What each rank found, as `trained.train` reports it; weights that are not on the meta device travel along.

        Args:
            data: A function of small_data.py; None for samples made up for a transformers model.
            optimizer: Likewise; None for AdamW.
        """
        number = next(self._numbers)
        pickled = self._folder / f"model{number}.pkl"
        write_object(model, pickled, "the model")
        config = TrainConfig.from_params(
            {
                "zero_stage": zero_stage,
                "micro_batch_size": micro_batch_size,
                "grad_accum_steps": grad_accum_steps,
                "pipeline_depth": len(stages or (0, 1)) - 1,
            }
        )
        workload = Workload(
            model=ModelSpec(name="small", architecture={}),
            n_parameters=sum(parameter.numel() for parameter in model.parameters()),
            seq_len=8,
            precision=precision,
            optimizer="adamw" if optimizer is None else "their own",
        )
        job = {
            "model": {"structure": str(pickled), "architecture": architecture_of(model)},
            "data": None if data is None else f"{TARGETS / 'small_data.py'}:{data}",
            "optimizer": None if optimizer is None else f"{TARGETS / 'small_data.py'}:{optimizer}",
            "seq_len": 8,
            "seed": 0,
            "stages": stages,
            "recompute": recompute,
        }
        # DeepSpeed clips gradients to a norm of 1 where it is not told otherwise, which would hide how large they are.
        ds_config = {**deepspeed_config(config, workload, n_ranks=n_ranks), "gradient_clipping": 0.0}
        spec = self._folder / f"spec{number}"
        spec.write_text(
            json.dumps(
                {
                    "job": job,
                    "ds_config": ds_config,
                    "rendezvous": str(self._folder / f"rendezvous{number}"),
                    "n_ranks": n_ranks,
                    "n_steps": n_steps,
                }
            )
        )
        self._run(spec, n_ranks)
        return [torch.load(f"{spec}.{rank}", weights_only=True) for rank in range(n_ranks)]

    def _run(self, spec: Path, n_ranks: int) -> None:
        environments: list[Mapping[str, str]] = [
            {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(n_ranks)} for rank in range(n_ranks)
        ]
        logs = [Path(f"{spec}.log{rank}") for rank in range(n_ranks)]
        group = self._server.launch("trained:train", spec=spec, environments=environments, logs=logs)
        try:
            done: set[int] = set()
            while len(done) < n_ranks:
                done |= {rank for rank, _ in group.poll(0.1)}
                failed = [rank for rank, code in group.exit_codes.items() if code and rank not in done]
                assert not failed, logs[failed[0]].read_text()[-3000:]
        finally:
            group.kill()


@pytest.fixture(scope="session")
def small() -> Callable[[str], Callable[..., Any]]:
    """`small(name)`: a function of small_data.py, as the ranks find it."""
    return lambda name: load_function(f"{TARGETS / 'small_data.py'}:{name}")


@pytest.fixture
def ranks(server: ForkServer, tmp_path: Path) -> Ranks:
    return Ranks(server, tmp_path)


@pytest.fixture(scope="session")
def strong() -> Callable[..., nn.Module]:
    """`strong(class, config, **changes)`: a tiny transformers model without dropout, whose weights are so large that a lost mask shows."""
    import transformers

    sizes: dict[str, dict[str, Any]] = {
        "Bert": {
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "max_position_embeddings": 32,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "pad_token_id": 0,
        },
        "DistilBert": {
            "dim": 16,
            "n_layers": 2,
            "n_heads": 2,
            "hidden_dim": 32,
            "max_position_embeddings": 32,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "qa_dropout": 0.0,
            "seq_classif_dropout": 0.0,
            "pad_token_id": 0,
        },
        "GPT2": {
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 2,
            "n_positions": 32,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 1,
        },
    }

    def make(name: str, **changes: Any) -> nn.Module:
        family = next(family for family in ("DistilBert", "Bert", "GPT2") if name.startswith(family))
        config = getattr(transformers, f"{family}Config")(**{"vocab_size": 50, **sizes[family], **changes})
        torch.manual_seed(0)
        model: nn.Module = getattr(transformers, name)(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(20.0) if parameter.dim() > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
        return model

    return make
