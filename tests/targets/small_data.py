"""What a user would write: small data for a language model, different for every replica, and an optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

VOCABULARY = 50
N_TOKENS = 8


def language(micro_batch_size: int, rank: int, seed: int) -> Iterator[dict[str, Tensor]]:
    """Micro-batches without end, padded, with labels everywhere else."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    while True:
        tokens = torch.randint(4, VOCABULARY, (micro_batch_size, N_TOKENS), generator=generator)
        lengths = torch.randint(3, N_TOKENS + 1, (micro_batch_size, 1), generator=generator)
        mask = (torch.arange(N_TOKENS) < lengths).long()
        yield {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def vectors(micro_batch_size: int, rank: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of four numbers and one without end."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    while True:
        yield (
            torch.randn(micro_batch_size, 4, generator=generator),
            torch.randn(micro_batch_size, 1, generator=generator),
        )


class CountingSgd(torch.optim.SGD):
    """Plain steps, large enough to be seen, that tell how many weights they were given."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        given = list(parameters)
        self.n_given = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in given)
        super().__init__(given, lr=0.1)


def sgd(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """What `--optimizer` takes."""
    return CountingSgd(parameters)


def ragged(micro_batch_size: int, rank: int, seed: int) -> Iterator[dict[str, Tensor]]:
    """Micro-batches without end, each as long as its longest sample."""
    for batch in language(micro_batch_size, rank, seed):
        n_tokens = int(batch["attention_mask"].sum(dim=1).max())
        yield {name: column[:, :n_tokens].contiguous() for name, column in batch.items()}
