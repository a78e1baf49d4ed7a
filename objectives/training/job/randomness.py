"""Random numbers that a piece of code draws apart from all others."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch

__all__ = ["Randomness"]


class Randomness:
    """The random numbers of torch (on the host), NumPy and Python that code inside `own()` draws.

    They depend on the seed alone, and those outside are as if that code had not run. So a user's data are the same in every stage of
    a pipeline, though stages draw different dropout, and other data in every replica, though replicas begin alike.
    """

    def __init__(self, seed: int) -> None:
        outside = _state()
        torch.default_generator.manual_seed(seed)
        numpy.random.seed(seed % 2**32)
        random.seed(seed)
        self._state = _state()
        _set(outside)

    @contextmanager
    def own(self) -> Iterator[None]:
        """Draw from these."""
        outside = _state()
        _set(self._state)
        try:
            yield
        finally:
            self._state = _state()
            _set(outside)


def _state() -> tuple[Any, ...]:
    return torch.get_rng_state(), numpy.random.get_state(), random.getstate()


def _set(state: tuple[Any, ...]) -> None:
    torch.set_rng_state(state[0])
    numpy.random.set_state(state[1])
    random.setstate(state[2])
