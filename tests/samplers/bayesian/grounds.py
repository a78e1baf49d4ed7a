"""Landscapes made by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bo_tuner.samplers.bayesian.landscape import Landscape

GIB = 2**30


def ground(
    doublings: Sequence[float],
    *,
    rate: Sequence[float] | None = None,
    sorts: Sequence[int] | None = None,
    shares: Sequence[Sequence[float]] | None = None,
    memory: Sequence[Sequence[float]] | None = None,
) -> Landscape:
    """Configs along one dimension; `rate` is expected, everywhere the same by default."""
    n = len(doublings)
    return Landscape(
        numbers=np.array(doublings, dtype=float)[:, None],
        sorts=np.array(sorts if sorts is not None else [0] * n)[:, None],
        log_rate=np.log(rate if rate is not None else [1.0] * n),
        log_rule=np.zeros(n),
        shares=np.array(shares if shares is not None else [[1.0, 0.0]] * n),
        step_s=np.ones(n),
        memory=np.array(memory if memory is not None else [[GIB, GIB, GIB]] * n, dtype=float),
    )
