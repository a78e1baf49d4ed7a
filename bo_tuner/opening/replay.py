"""`ReplayOpening`: a study of a table that somebody measured before."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from dataclasses import dataclass
from math import inf
from pathlib import Path

import numpy as np

from bo_tuner.models.choices import Choices
from bo_tuner.models.cost import times_of
from bo_tuner.models.memory import memory_of
from bo_tuner.objectives.prior import cluster_of, problem_of
from bo_tuner.objectives.replay import ReplayObjective
from bo_tuner.objectives.table import MeasuredTable
from bo_tuner.opening.base import open_as_wanted, own_versions
from bo_tuner.opening.options import TuneOptions
from bo_tuner.origin import Origin
from bo_tuner.space import SearchSpace
from bo_tuner.storage import Location, Manifest, StudyStore
from bo_tuner.text import count, rate
from bo_tuner.workload import UNKNOWN_LENGTH, ModelSpec, Workload

__all__ = ["ReplayOpening", "open_replay"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOpening:
    """Opens a study whose configs and their figures stand in a table. Implements `StudyOpening`."""

    table: MeasuredTable
    wanted: Manifest
    store: StudyStore
    memory_bytes: int
    """Of a device, or what the table has seen used where that is more: what completed there fits."""
    notes: tuple[str, ...]
    longest_step_s: float = inf
    """Nobody waits for a step."""

    def open(self) -> Manifest:
        """The stored manifest of the same table and group, or a new one."""
        return open_as_wanted(self.store, self.wanted)

    def objective(self, workload: Workload, *, log_dir: Path) -> ReplayObjective:
        """What looks configs up."""
        return ReplayObjective(self.table)

    def start(self) -> None:
        """Nothing is to be started."""


@contextlib.contextmanager
def open_replay(options: TuneOptions) -> Generator[ReplayOpening]:
    """Read the table; devices or a model that nobody knows stop nothing.

    Raises:
        ConfigError: The table cannot be read, or has no such group.
        StoreError: The storage cannot be written.
    """
    assert options.replay is not None
    path = Path(options.replay)
    table = MeasuredTable.read(path, options.group)
    cluster, _ = cluster_of(table)
    peaks = [run.memory_bytes for run in table.runs if run.is_complete and run.memory_bytes]
    wanted = Manifest(
        workload=Workload(
            model=ModelSpec(name=table.model, architecture={}),
            n_parameters=table.n_parameters,
            seq_len=table.seq_len or UNKNOWN_LENGTH,
            precision=cluster.usual_precision,
        ),
        cluster=cluster,
        space=SearchSpace.of_configs(table.configs),
        seed=options.seed,
        origin=Origin(
            kind="replay",
            source=f"group {table.name} of {path.absolute()}",
            settings={"group": table.name, "digest": table.digest},
        ),
        versions=own_versions(),
    )
    location = Location(options.storage)
    location.check_writable()
    yield ReplayOpening(
        table=table,
        wanted=wanted,
        store=StudyStore(location, options.study or f"{table.name}_replayed"),
        memory_bytes=max([cluster.memory_bytes, *peaks]),
        notes=(*table.notes, *_expected(table)),
    )


def _expected(table: MeasuredTable) -> list[str]:
    """What the cost model thinks of the table before anything is looked up, or why it thinks nothing; and what was supposed."""
    problem, note = problem_of(table)
    notes = [note] if note else []
    if problem is None:
        return notes
    configs = [config for config in table.configs if config.pipeline_depth <= problem.profile.n_blocks]
    if not configs:
        return [
            *notes,
            f"no prior: no config of the table fits the {count(problem.profile.n_blocks, 'block')} of {table.model}",
        ]
    choices = Choices.of(configs, problem.n_ranks)
    rates = choices.global_batch / times_of(problem, choices).total
    fits = memory_of(problem, choices).total <= problem.hardware.memory_bytes
    best = int(np.argmax(np.where(fits, rates, 0.0)))
    if not fits[best]:
        return [*notes, "the cost model expects that nothing fits"]
    expected = rate(float(rates[best])).removesuffix("/s")
    return [*notes, f"the cost model expects most of {configs[best].name}: {expected} samples/s"]
