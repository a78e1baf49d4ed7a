"""Opening a study: its manifest, stored or new, once it is known that the model trains; and what is said of it first."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from bo_tuner.budget import Budget
from bo_tuner.cluster import Cluster
from bo_tuner.config import TrainConfig
from bo_tuner.errors import ConfigError, ModelError
from bo_tuner.objectives import ignore_events
from bo_tuner.objectives.launch import ForkServer
from bo_tuner.objectives.memory import Baseline
from bo_tuner.objectives.training import DeepSpeedBackEnd, TrainingObjective, extensions, model_facts
from bo_tuner.objectives.training.facts import Balance, ModelFacts, check_precision
from bo_tuner.objectives.training.sources import JobSources
from bo_tuner.outcome import TrialLimits
from bo_tuner.space import default_config, lightest
from bo_tuner.storage import Manifest, StudyStore
from bo_tuner.text import count, gib, millions
from bo_tuner.workload import OPTIMIZERS, UNKNOWN_LENGTH, Workload

__all__ = ["LONGEST_STEP_S", "Opening", "introduction", "start_server"]

LONGEST_STEP_S = 10.0
"""Candidates whose optimizer step would take longer are set aside, unless the batch is fixed."""
_LONGEST_PROBE_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What is needed to start a study or to go on with it."""

    wanted: Manifest
    """As far as the options say; the model is not built yet."""
    store: StudyStore
    server: ForkServer
    memory_bytes: int
    """Limit per rank."""
    balance: Balance
    seq_len: int | None
    """As the user gave it."""
    max_depth: int | None
    """As the user gave it."""
    data_timeout_s: float
    baseline: Baseline
    """Of the GPUs, read before anything ran on them."""

    def open(self) -> Manifest:
        """The study's manifest: the stored one when it agrees, else a new one, written once the model is known to train.

        Raises:
            StudyMismatchError: The study exists for something else.
            ModelError: Model, data or optimizer cannot be used.
            ConfigError: The device has not the precision, or the model not the layers.
        """
        stored = self.store.manifest()
        if stored is not None:
            wanted = self._agreed(stored)
            stored.check_same(wanted, study_name=self.store.name)
            self._keep_pickles(stored.workload)
            return stored
        facts = self._facts()
        check_precision(self.wanted.workload.precision, facts, device=self.wanted.cluster.device)
        manifest = self._with(facts)
        self._check_depth(manifest.workload)
        # Raises where only pipelines would meet the batch, and this model cannot be split.
        candidates = manifest.space.candidates(manifest.cluster, DeepSpeedBackEnd())
        if _has_users_code(manifest.workload):
            self._probe(manifest.workload, candidates)
        created = self.store.create(manifest)
        self._keep_pickles(manifest.workload)
        return created

    def objective(self, workload: Workload, *, log_dir: Path) -> TrainingObjective:
        """What measures the configs."""
        return TrainingObjective(
            workload,
            self.wanted.cluster,
            self.server,
            log_dir=log_dir,
            seed=self.wanted.seed,
            sources=self._sources(workload),
            longest_wait_s=self.data_timeout_s,
            baseline=self.baseline,
        )

    def _sources(self, workload: Workload) -> JobSources:
        return JobSources.of(workload, self.server.run_dir)

    def _facts(self) -> ModelFacts:
        workload, cluster = self.wanted.workload, self.wanted.cluster
        start_server(self.server, cluster)
        print(f"building {workload.model.name} once, to look at it ...", file=sys.stderr, flush=True)
        return model_facts(
            workload,
            self.server,
            self._sources(workload),
            device=cluster.device,
            balance=self.balance,
            seq_len=self.seq_len,
            longest_wait_s=self.data_timeout_s,
        )

    def _with(self, facts: ModelFacts) -> Manifest:
        workload = self.wanted.workload
        model = workload.model
        if model.source != "config":
            model = replace(model, architecture=facts.architecture, digest=facts.digest)
        return replace(
            self.wanted,
            workload=replace(
                workload,
                model=model,
                n_parameters=facts.n_parameters,
                seq_len=facts.seq_len,
                data_seq_len=facts.data_seq_len,
                structure=facts.structure,
            ),
            space=self.wanted.space.for_model(facts.structure),
            versions={
                "bo_tuner": _version("bo_tuner"),
                "optuna": _version("optuna"),
                "host": platform.node(),
                **facts.versions,
            },
        )

    def _agreed(self, stored: Manifest) -> Manifest:
        """What is wanted, completed by what the stored study found out; a model from code is built again, to see whether it changed."""
        known = stored.workload
        if self.wanted.workload.model.source != "config":
            wanted = self._with(self._facts())
        else:
            wanted = replace(self.wanted, workload=replace(self.wanted.workload, n_parameters=known.n_parameters))
        structure = known.structure
        if self.balance == "parameters" and structure.cost_unit == "seconds":
            structure = replace(structure, cost_unit="parameters")  # a difference, to be told
        workload = replace(wanted.workload, structure=structure)
        if self.seq_len is None and known.data is not None:
            workload = replace(workload, seq_len=known.seq_len, data_seq_len=known.data_seq_len)
        self._check_depth(workload)
        return replace(wanted, workload=workload, space=self.wanted.space.for_model(known.structure))

    def _check_depth(self, workload: Workload) -> None:
        most = workload.structure.max_depth
        if self.max_depth is not None and self.max_depth > most and not workload.structure.whole_because:
            raise ConfigError(
                f"--max-depth must be at most the {count(most, 'layer')} of {workload.model.name}; got {self.max_depth}"
            )

    def _probe(self, workload: Workload, candidates: Sequence[TrainConfig]) -> None:
        """One step of training with the user's code, before anything is written down.

        Raises:
            ModelError: It fails; the text says why.
        """
        print("training for one step, to see that it works ...", file=sys.stderr, flush=True)
        objective = self.objective(workload, log_dir=self.server.run_dir / "logs")
        limits = TrialLimits(max_steps=1, deadline_s=_LONGEST_PROBE_S, memory_bytes=self.memory_bytes)
        for config in (default_config(candidates), lightest(candidates)):
            result = objective(config, limits=limits, on_event=ignore_events)
            if result.measurement is not None:
                return
            if not result.outcome.is_memory:
                raise ModelError(f"model {workload.model.name} must train for one step, and does not: {result.reason}")

    def _keep_pickles(self, workload: Workload) -> None:
        """Models and functions from Python lie in the study's folder, for exports in other processes."""
        sources = self._sources(workload)
        if sources.pickles:
            self.store.folder.mkdir(parents=True, exist_ok=True)
            sources.copied_to(self.store.folder)


def _has_users_code(workload: Workload) -> bool:
    return workload.model.source != "config" or workload.data is not None or workload.optimizer not in OPTIMIZERS


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"  # a checkout that runs as it is


def start_server(server: ForkServer, cluster: Cluster) -> None:
    """Start the processes that ranks are forked from, and say so, since it takes some seconds."""
    if not server.is_started:
        must_compile = cluster.device == "cpu" and not extensions.is_cached()
        once = " (this once a small op is compiled: about a minute)" if must_compile else ""
        print(f"starting the training processes{once} ...", file=sys.stderr, flush=True)
        server.start()


def introduction(store: StudyStore, manifest: Manifest, budget: Budget, *, memory_bytes: int, n_candidates: int) -> str:
    """What is about to be done, in a few lines."""
    workload, space, structure = manifest.workload, manifest.space, manifest.workload.structure
    size = f"{millions(workload.n_parameters)} parameters"
    if structure.n_trainable is not None:
        size += f", {millions(structure.n_trainable)} of them trained"
    length = "" if workload.seq_len == UNKNOWN_LENGTH else f", sequence length {workload.seq_len}"
    is_free = space.batch_rule.kind != "fixed"
    aside = f" (set aside: those whose step would take over {LONGEST_STEP_S:g} s)" if is_free else ""
    lines = [
        f"study {store.name} in {store.location.shown_url}",
        f"model {workload.model.name}, {size}{length}, {workload.precision}, {workload.optimizer}",
        *([f"data {workload.data}"] if workload.data is not None else []),
        f"on {manifest.cluster}, memory limit {gib(memory_bytes)} a rank",
        *_pipelines(manifest),
        *([f"no recomputation: {structure.plain_because}"] if structure.plain_because else []),
        f"global batch {space.batch_rule}",
        f"{count(n_candidates, 'candidate')}{aside}, budget {budget}",
    ]
    return "\n".join(lines)


def _pipelines(manifest: Manifest) -> list[str]:
    structure = manifest.workload.structure
    if structure.whole_because:
        return [f"no pipelines: {structure.whole_because}"]
    deepest = max(manifest.space.pipeline_depths)
    if deepest == 1:
        return []
    by = "measured time" if structure.cost_unit == "seconds" else "parameters"
    return [f"pipelines of up to {deepest} stages, {len(structure.layer_costs)} layers balanced by {by}"]
