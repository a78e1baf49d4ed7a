"""`StudyOpening`: what a study is opened with, whatever its figures come from; and what is said of it first."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Protocol

from bo_tuner.budget import Budget
from bo_tuner.errors import ConfigError
from bo_tuner.fork import Fork
from bo_tuner.goal import THROUGHPUT
from bo_tuner.models.choices import Problem
from bo_tuner.objectives import Objective
from bo_tuner.storage import Manifest, StudyStore
from bo_tuner.text import count, gib, large, percent
from bo_tuner.workload import UNKNOWN_LENGTH, Workload

__all__ = [
    "StudyOpening",
    "check_depth",
    "forked",
    "introduction",
    "open_as_wanted",
    "own_versions",
    "versions_changed",
]

_MEASURED_WITH = ("torch", "deepspeed", "transformers")


class StudyOpening(Protocol):
    """Opens a study, new or stored, and makes what its trials run on."""

    @property
    def store(self) -> StudyStore:
        """The study."""
        ...

    @property
    def memory_bytes(self) -> int:
        """Limit per rank."""
        ...

    @property
    def longest_step_s(self) -> float:
        """Configs whose optimizer step would take longer are set aside, unless the batch is fixed."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """What was supposed or left out, a line each, once the study is open."""
        ...

    def open(self) -> Manifest:
        """The study's manifest: the stored one when it agrees, else a new one, which is written.

        Raises:
            StudyMismatchError: The study exists for something else.
            ConfigError: What is wanted cannot be.
        """
        ...

    def objective(self, workload: Workload, *, log_dir: Path) -> Objective:
        """What says how a config does; ranks, where there are any, write their logs to `log_dir`."""
        ...

    def start(self) -> None:
        """Make ready for trials that are about to run."""
        ...

    def problem(self, manifest: Manifest) -> Problem | None:
        """What the models need to expect something of this study's configs; None where nothing can be expected, once it is said why."""
        ...


def open_as_wanted(store: StudyStore, wanted: Manifest) -> Manifest:
    """The stored manifest, which must be as `wanted`, or `wanted`, which is written: for studies that need no look at anything.

    Raises:
        StudyMismatchError: The study exists for something else.
    """
    stored = store.manifest()
    if stored is None:
        return store.create(wanted)
    stored.check_code(wanted, study_name=store.name)
    stored.check_same(wanted, study_name=store.name)
    return stored


def forked(store: StudyStore, new: str | None) -> tuple[StudyStore, Fork | None]:
    """The study to drive: `store`, or where `new` names one, that, which begins with the best configs of `store`.

    Raises:
        ConfigError: The new study exists, and was not forked from this one.
        StoreError: There is no study to fork.
    """
    if new is None:
        return store, None
    target = StudyStore(store.location, new)
    stored = target.manifest()
    if stored is None:
        old = StudyStore.existing(store.location, store.name)
        return target, Fork.of(old.name, old.records())
    if stored.fork is None or stored.fork.study != store.name:
        raise ConfigError(
            f"--fork must name a new study, or one forked from {store.name!r} before, and {new!r} is another: choose another name"
        )
    return target, stored.fork


def check_depth(max_depth: int | None, workload: Workload) -> None:
    """Refuse pipelines of more stages than the model has layers; one that stays whole takes any bound.

    Raises:
        ConfigError: They are asked for.
    """
    most = workload.structure.max_depth
    if max_depth is not None and max_depth > most and not workload.structure.whole_because:
        raise ConfigError(
            f"--max-depth must be at most the {count(most, 'layer')} of {workload.model.name}; got {max_depth}"
        )


def own_versions() -> dict[str, str]:
    """What every manifest tells: our version, Optuna's, and the host."""
    return {"bo_tuner": _version("bo_tuner"), "optuna": _version("optuna"), "host": platform.node()}


def versions_changed(before: Mapping[str, str]) -> str:
    """Which of the versions of a stored study are others today, in words; empty where none is."""
    today = {"python": platform.python_version()} | {package: _version(package) for package in _MEASURED_WITH}
    changed = [
        f"{name} {before[name]} is now {version}"
        for name, version in today.items()
        if name in before and before[name].partition("+")[0] != version.partition("+")[0]
    ]
    return ", ".join(changed)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"  # a checkout that runs as it is


def introduction(
    store: StudyStore,
    manifest: Manifest,
    budget: Budget,
    *,
    memory_bytes: int,
    n_candidates: int,
    longest_step_s: float = math.inf,
    notes: Sequence[str] = (),
) -> str:
    """What is about to be done, in a few lines; first of all that it is not real, where it is not."""
    workload, space, structure = manifest.workload, manifest.space, manifest.workload.structure
    size = f"{large(workload.n_parameters)} parameters" if workload.n_parameters else "size unknown"
    if structure.n_trainable is not None:
        size += f", {large(structure.n_trainable)} of them trained"
    length = "" if workload.seq_len == UNKNOWN_LENGTH else f", sequence length {workload.seq_len}"
    is_bounded = space.batch_rule.kind != "fixed" and longest_step_s < math.inf
    aside = f" (set aside: those whose step would take over {longest_step_s:g} s)" if is_bounded else ""
    is_time = budget.trials is None or budget.seconds is not None or budget.device_hours is not None
    of_time = " (of the time that its trials would take)" if is_time and not manifest.origin.is_real else ""
    lines = [
        *([manifest.origin.warning] if manifest.origin.warning else []),
        f"study {store.name} in {store.location.shown_url}" + (f", {manifest.fork}" if manifest.fork else ""),
        f"model {workload.model.name}, {size}{length}, {workload.precision}, {workload.optimizer}",
        *([f"note: {workload.model.remark}"] if workload.model.remark else []),
        *([f"data {workload.data}"] if workload.data is not None else []),
        f"on {manifest.cluster}, memory limit {gib(memory_bytes)} a rank",
        *(
            [f"launches of one config differ by about {percent(100 * manifest.noise.sd)}, by earlier studies here"]
            if manifest.noise
            else []
        ),
        *([f"objective {manifest.goal}"] if manifest.goal != THROUGHPUT else []),
        *notes,
        *([] if space.listed else _pipelines(manifest)),
        *([f"no recomputation: {structure.plain_because}"] if structure.plain_because else []),
        *([] if space.listed else [f"global batch {space.batch_rule}"]),
        *(f"dimension {dimension}" for dimension in space.dimensions),
        f"{count(n_candidates, 'candidate')}{aside}, budget {budget}{of_time}",
    ]
    return "\n".join(lines)


def _pipelines(manifest: Manifest) -> list[str]:
    structure = manifest.workload.structure
    if structure.whole_because:
        return [f"no pipelines: {structure.whole_because}"]
    deepest = max(manifest.space.pipeline_depths)
    if deepest == 1:
        return []
    by = {"seconds": "measured time", "operations": "arithmetic"}.get(structure.cost_unit, structure.cost_unit)
    return [f"pipelines of up to {deepest} stages, {len(structure.layer_costs)} layers balanced by {by}"]
