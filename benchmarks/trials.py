"""Trials as benchmarks run them: a preset, its facts, and an objective that must complete."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Generator
from dataclasses import dataclass, replace
from pathlib import Path

from bo_tuner.cluster import Cluster
from bo_tuner.config import TrainConfig
from bo_tuner.objectives import ignore_events
from bo_tuner.objectives.launch import ForkServer
from bo_tuner.objectives.training import ModelFacts, TrainingObjective, model_facts, training_server
from bo_tuner.outcome import Measurement, TrialLimits, TrialResult
from bo_tuner.workload import ModelSpec, Workload

__all__ = ["Trials", "trials_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trials:
    """Runs configs of one workload."""

    facts: ModelFacts
    workload: Workload
    cluster: Cluster
    server: ForkServer
    folder: Path
    """Gone when the benchmark ends."""
    objective: TrainingObjective
    limits: TrialLimits
    """The usual ones; memory is 92 % of a device."""

    def run(self, config: TrainConfig, limits: TrialLimits) -> tuple[TrialResult, Measurement]:
        """One trial; a benchmark ends where it does not complete."""
        result = self.objective(config, limits=limits, on_event=ignore_events)
        if result.measurement is None:
            sys.exit(f"{config.name} must complete, and ended as {result.outcome}: {result.reason}")
        return result, result.measurement


@contextlib.contextmanager
def trials_of(model: str, *, seq_len: int, device: str, n_ranks: int | None, traces: bool = False) -> Generator[Trials]:
    """Processes that train `model` on this machine, while the context lasts; with `traces` its profile is among its facts."""
    cluster = Cluster.detect(device=device, n_ranks=n_ranks)
    workload = Workload(model=ModelSpec.resolve(model), n_parameters=0, seq_len=seq_len)
    with tempfile.TemporaryDirectory() as folder, training_server(cluster) as server:
        facts = model_facts(workload, server, device=cluster.device, traces=traces)
        workload = replace(workload, n_parameters=facts.n_parameters, structure=facts.structure)
        yield Trials(
            facts=facts,
            workload=workload,
            cluster=cluster,
            server=server,
            folder=Path(folder),
            objective=TrainingObjective(workload, cluster, server, log_dir=Path(folder)),
            limits=TrialLimits(memory_bytes=int(0.92 * cluster.memory_bytes)),
        )
