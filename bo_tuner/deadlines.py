"""How long a trial may take as a whole, before it is given up: guessed from the workload, then learned from the trials."""

from __future__ import annotations

from collections.abc import Sequence

from bo_tuner.cluster import DeviceKind
from bo_tuner.config import TrainConfig
from bo_tuner.outcome import Outcome
from bo_tuner.trial import TrialRecord
from bo_tuner.workload import Workload

__all__ = ["PATIENCE", "slowest_s", "trial_deadline_s"]

PATIENCE = 10.0
"""Anything may take this many times as long as the slowest of its kind so far."""
_FIRST_S = 600.0
_LEAST_S = 90.0
_SLOWEST_FLOPS = {"cpu": 5e9, "cuda": 1e12}
"""Of one rank, per second: a tenth of what one core with AVX2 gives, a sixtieth of what a T4 is sold with (65e12, fp16)."""


def slowest_s(n_samples: float, workload: Workload, device: DeviceKind) -> float:
    """Seconds that one rank of the slowest machine we think of would train on `n_samples`.

    Forward and backward take 6 operations a parameter and token (Kaplan et al., "Scaling Laws for Neural Language Models",
    section 2.1), and 2 more where activations are recomputed.
    """
    return 8 * workload.n_parameters * workload.seq_len * n_samples / _SLOWEST_FLOPS[device]


def trial_deadline_s(
    config: TrainConfig,
    records: Sequence[TrialRecord],
    *,
    n_steps: int,
    workload: Workload,
    device: DeviceKind,
    n_ranks: int,
) -> float:
    """Seconds for the trial of `config`, generous: the longest start so far and all steps at the slowest rate so far, times ten.

    Before anything has completed, the workload says how long steps may take. A try that timed out is given twice as long.

    Args:
        config: What runs.
        records: All trials so far, that of `config` included when it was tried before.
        n_steps: Optimizer steps it may make.
        workload: What is trained.
        device: On what.
        n_ranks: World size.
    """
    n_samples = n_steps * config.global_batch(n_ranks)
    rates = [rate for record in records if (rate := record.samples_per_s)]
    if rates:
        starts = [(record.result.phases_s or {}).get("start", 0.0) for record in records if record.result]
        seconds = max(_LEAST_S, PATIENCE * (max(starts) + n_samples / min(rates)))
    else:
        seconds = max(_FIRST_S, slowest_s(n_samples / n_ranks, workload, device))
    n_timeouts = sum(
        attempt.outcome is Outcome.TIMEOUT
        for record in records
        if record.config == config
        for attempt in record.attempts
    )
    return seconds * 2.0**n_timeouts
