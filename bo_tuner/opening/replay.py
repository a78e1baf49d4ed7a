"""`ReplayOpening`: a study of a table that somebody measured before."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

from bo_tuner.errors import ConfigError
from bo_tuner.goal import Goal
from bo_tuner.models.choices import Problem
from bo_tuner.objectives.prior import cluster_of, problem_of
from bo_tuner.objectives.replay import ReplayObjective
from bo_tuner.objectives.table import MeasuredTable
from bo_tuner.opening.base import forked, open_as_wanted, own_versions
from bo_tuner.opening.options import TuneOptions
from bo_tuner.origin import Origin
from bo_tuner.space import SearchSpace
from bo_tuner.storage import Location, Manifest, StudyStore
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
    expected: Problem | None
    """What its model and devices let expect; None where they are not known, as the notes tell."""
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

    def problem(self, manifest: Manifest) -> Problem | None:
        """That of the table, before anything in it is looked up."""
        return self.expected


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
    problem, note = problem_of(table)
    goal = options.goal_on(table.n_ranks)
    _check_goal(goal, table)
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
        goal=goal,
        origin=Origin(
            kind="replay",
            source=f"group {table.name} of {path.absolute()}",
            settings={"group": table.name, "digest": table.digest},
        ),
        versions=own_versions(),
    )
    location = Location(options.storage)
    location.check_writable()
    store, fork = forked(StudyStore(location, options.study or f"{table.name}{goal.label}_replayed"), options.fork)
    yield ReplayOpening(
        table=table,
        wanted=replace(wanted, fork=fork),
        store=store,
        memory_bytes=max([cluster.memory_bytes, *peaks]),
        expected=problem,
        notes=(*table.notes, *([note] if note else [])),
    )


def _check_goal(goal: Goal, table: MeasuredTable) -> None:
    """Refuse a goal that the table cannot tell.

    Raises:
        ConfigError: Its steps are of several sizes, or it does not tell the length of samples.
    """
    batches = sorted({config.global_batch(table.n_ranks) for config in table.configs})
    if goal.needs_fixed_batch and len(batches) > 1:
        raise ConfigError(
            f"--objective {goal.name} compares steps of one size, and those of group {table.name} hold from {batches[0]} to "
            f"{batches[-1]} samples"
        )
    if goal.needs_tokens and table.seq_len is None:
        raise ConfigError(f"--objective {goal.name} counts tokens, and group {table.name} does not tell its seq_len")
