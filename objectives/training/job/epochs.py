"""`Epochs`: the order in which a data set is trained on, epoch after epoch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Sampler

__all__ = ["Epochs", "tell_epoch"]

_AT_ONCE = 4096
"""Indices that become Python's numbers together; all of them would take 36 bytes a sample."""
_MOST_SEEDS = 2**63


class Epochs(Sampler[int]):
    """The samples of one replica, without end: in every epoch each sample comes once in all replicas together, in an order of its own."""

    def __init__(self, n_samples: int, *, seed: int, replica: int = 0, n_replicas: int = 1) -> None:
        """Share `n_samples`, at least one, among replicas that are given the same seed."""
        super().__init__()
        self._n_samples = n_samples
        self._seed = seed
        self._replica = replica
        self._n_replicas = n_replicas

    def __iter__(self) -> Iterator[int]:
        # Replicas take turns, across the ends of epochs too: nothing is left out, and nothing comes twice to make shares even.
        first = self._replica
        for epoch in itertools.count():
            generator = torch.Generator().manual_seed((self._seed * 1_000_003 + epoch) % _MOST_SEEDS)
            order = torch.randperm(self._n_samples, generator=generator)
            for some in order[first :: self._n_replicas].split(_AT_ONCE):
                yield from some.tolist()
            first = (first - self._n_samples) % self._n_replicas


def tell_epoch(loader: Any, epoch: int) -> None:
    """Tell a user's loader which epoch begins, as torch's DistributedSampler and data sets of Hugging Face want it."""
    for part in ("sampler", "dataset"):
        tell = getattr(getattr(loader, part, None), "set_epoch", None)
        if callable(tell):
            tell(epoch)
