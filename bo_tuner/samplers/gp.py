"""Optuna's Gaussian process as a stock sampler, kept to one thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from optuna.samplers import GPSampler

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

__all__ = ["SingleThreadGPSampler"]

_N_STARTS = 5
"""Random trials before the process has a say: Optuna's ten would be half of a usual study."""


class SingleThreadGPSampler(GPSampler):
    """Fits and searches with one thread of torch's.

    On matrices this small threads only wait for one another, and from 100 trials on torch divides more of them (Optuna's issue 6230): on
    two busy cores a proposal took 3 s with 99 trials and 10 s with 100; with one thread both take 1 s.
    """

    def __init__(self, *, seed: int) -> None:
        # Times of steps are noisy: the process has to estimate how much.
        super().__init__(seed=seed, n_startup_trials=_N_STARTS, deterministic_objective=False)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """See Optuna; the number of threads is afterwards what it was."""
        import torch

        n_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return super().sample_relative(study, trial, search_space)
        finally:
            torch.set_num_threads(n_threads)
