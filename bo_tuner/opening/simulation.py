"""`SimulatedOpening`: a study of the cost model's figures, on devices that need not be here."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Generator
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

from bo_tuner.cluster import Cluster
from bo_tuner.hardware import hardware_of
from bo_tuner.models.choices import Problem
from bo_tuner.models.software import deepspeed_with
from bo_tuner.objectives.simulated import SimulatedObjective, Simulation
from bo_tuner.objectives.training import DeepSpeedBackEnd
from bo_tuner.objectives.training.dimensions import dimensions_ready
from bo_tuner.objectives.training.sources import JobSources, model_spec
from bo_tuner.opening.base import check_depth, forked, open_as_wanted, own_versions
from bo_tuner.opening.options import TuneOptions
from bo_tuner.opening.traced import traced
from bo_tuner.opening.users_code import hand_over, keep_pickles
from bo_tuner.origin import Origin
from bo_tuner.space import SearchSpace
from bo_tuner.storage import Location, Manifest, StudyStore
from bo_tuner.workload import Workload

__all__ = ["SimulatedOpening", "open_simulation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedOpening:
    """Opens a study of simulated trials. Implements `StudyOpening`."""

    simulated: Problem
    settings: Simulation
    wanted: Manifest
    store: StudyStore
    memory_bytes: int
    sources: JobSources
    """Where this run has what came as Python objects."""
    folder: Path
    """Of this run."""
    notes: tuple[str, ...]
    longest_step_s: float = inf
    """Nobody waits for a step."""

    def open(self) -> Manifest:
        """The stored manifest of the same simulation, or a new one."""
        manifest = open_as_wanted(self.store, self.wanted)
        keep_pickles(self.sources, self.wanted.space.dimensions, self.store, folder=self.folder)
        return manifest

    def objective(self, workload: Workload, *, log_dir: Path) -> SimulatedObjective:
        """What simulates."""
        return SimulatedObjective(
            self.simulated,
            seed=self.wanted.seed,
            settings=self.settings,
        )

    def start(self) -> None:
        """Nothing is to be started."""

    def problem(self, manifest: Manifest) -> Problem:
        """What is simulated: without its noise, the expectations come true."""
        return self.simulated


@contextlib.contextmanager
def open_simulation(options: TuneOptions) -> Generator[SimulatedOpening]:
    """Look the devices up and trace the model without weights: it is built in this process, and runs on nothing.

    Raises:
        ConfigError: An option cannot be used; among them ModelError, and ClusterError for devices that have no data sheet.
        StoreError: The storage cannot be written.
    """
    settings = options.simulate if isinstance(options.simulate, Simulation) else Simulation()
    spec = model_spec(options.model)
    options.length_of(spec)
    described = options.cluster
    cluster = (
        Cluster.detect(device=options.device, n_ranks=options.ranks)
        if described is None
        else Cluster.described(described)
    )
    memory_bytes = options.memory.bytes_on(cluster)
    space = options.space_on(cluster)
    goal = options.goal_on(cluster.n_ranks)
    location = Location(options.storage)
    location.check_writable()
    with tempfile.TemporaryDirectory(prefix="bo_tuner-") as name:
        folder = Path(name)
        workload = options.workload_of(spec, cluster, folder=folder)
        if spec.source == "object":
            hand_over(options.model, folder)
        space = replace(space, dimensions=dimensions_ready(space, workload, folder=folder))
        hardware = hardware_of(cluster, workload.precision)
        label = workload.label
        found = traced(workload, folder, seq_len=options.seq_len, device=cluster.device, balance=options.balance)
        workload = found.workload
        check_depth(options.max_depth, workload)
        space = space.for_model(workload.structure).for_data(workload.n_samples, n_ranks=cluster.n_ranks)
        space.candidates(cluster, DeepSpeedBackEnd())  # only pipelines may have met the batch
        where = cluster.label if described is None else "".join(described.split())
        store, fork = forked(
            StudyStore(location, options.study or f"{label}_{where}{goal.label}_simulated"), options.fork
        )
        yield SimulatedOpening(
            simulated=Problem(
                profile=found.profile,
                hardware=hardware,
                software=deepspeed_with(workload.optimizer, cluster.device),
                n_ranks=cluster.n_ranks,
                layer_costs=workload.structure.layer_costs,
                dimensions=space.dimensions,
            ),
            settings=settings,
            wanted=Manifest(
                workload=workload,
                cluster=cluster,
                space=space,
                seed=options.seed,
                goal=goal,
                origin=Origin(kind="simulation", settings={"seed": options.seed, **settings.to_dict()}),
                versions=own_versions(),
                code=options.users_code,
                fork=fork,
            ),
            store=store,
            memory_bytes=memory_bytes,
            sources=JobSources.of(workload, folder),
            folder=folder,
            notes=(f"rates from {hardware.source}", *_unknown(space)),
        )


def _unknown(space: SearchSpace) -> list[str]:
    """What the figures leave out."""
    names = ", ".join(dimension.name for dimension in space.dimensions if not dimension.is_modelled)
    return (
        [f"the cost model does not know what {names} would change: only noise tells its values apart"] if names else []
    )
