"""`Opening`: a study of real training steps; its manifest, stored or new, once it is known that the model trains."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bo_tuner.cluster import Cluster
from bo_tuner.config import TrainConfig
from bo_tuner.cuda import check_can_build, check_cuda
from bo_tuner.errors import ConfigError, LaunchError, ModelError
from bo_tuner.goal import Goal
from bo_tuner.hardware import Hardware
from bo_tuner.models.choices import Problem
from bo_tuner.models.software import deepspeed_with
from bo_tuner.nvml import Nvml
from bo_tuner.objectives import ignore_events
from bo_tuner.objectives.calibration import calibrate
from bo_tuner.objectives.launch import ForkServer
from bo_tuner.objectives.memory import Baseline
from bo_tuner.objectives.training import (
    DeepSpeedBackEnd,
    TrainingObjective,
    extensions,
    model_facts,
    training_server,
)
from bo_tuner.objectives.training.dimensions import dimensions_ready
from bo_tuner.objectives.training.environment import changed_variables, recorded_environment
from bo_tuner.objectives.training.facts import Balance, ModelFacts, check_precision
from bo_tuner.objectives.training.sources import JobSources, model_spec
from bo_tuner.opening.base import check_depth, forked, own_versions, versions_changed
from bo_tuner.opening.options import TuneOptions
from bo_tuner.opening.users_code import hand_over, keep_pickles
from bo_tuner.outcome import TrialLimits
from bo_tuner.profile import ModelProfile
from bo_tuner.space import SearchSpace, default_config, lightest
from bo_tuner.storage import Location, Manifest, StudyStore, learned_noise
from bo_tuner.workload import OPTIMIZERS, ModelStructure, Workload

__all__ = ["LONGEST_STEP_S", "Opening", "open_training"]

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
    first_step_timeout_s: float | None = None
    """As the user gave it."""

    @property
    def longest_step_s(self) -> float:
        """Configs that take longer cannot be measured in a sensible time."""
        return LONGEST_STEP_S

    @property
    def notes(self) -> Sequence[str]:
        """That samples are shorter than the model allows, where nobody said how long they are."""
        workload = self.wanted.workload
        usual, model = workload.model.usual_seq_len, workload.model
        if (
            self.seq_len is not None
            or workload.data is not None
            or model.source != "config"
            or workload.seq_len >= usual
        ):
            return ()
        return (
            f"samples of {workload.seq_len} tokens, since this is a CPU (--seq-len {usual} takes those that {model.name} is made for)",
        )

    def open(self) -> Manifest:
        """The study's manifest: the stored one when it agrees, else a new one, written once the model is known to train.

        Raises:
            StudyMismatchError: The study exists for something else.
            ModelError: Model, data or optimizer cannot be used.
            ConfigError: The device has not the precision, or the model not the layers.
        """
        stored = self.store.manifest()
        if stored is not None:
            is_code = self.wanted.workload.model.source != "config"  # it is built again, to see whether it changed
            facts = self._facts(traces=True) if is_code else None
            stored.check_code(self.wanted, study_name=self.store.name, flops=self._flops(facts))
            wanted = self._agreed(stored, facts)
            stored.check_same(wanted, study_name=self.store.name)
            self._keep(stored.workload)
            if newer := versions_changed(stored.versions):
                print(f"{newer}: earlier trials may have been faster or slower for that", file=sys.stderr, flush=True)
            changed = changed_variables(stored.environment, self.wanted.environment or {})
            if changed:
                note = "earlier trials ran otherwise, and exported jobs are launched as when the study began"
                print(f"the environment has changed: {changed}; {note}", file=sys.stderr, flush=True)
            return stored
        facts = self._facts(traces=True)
        check_precision(self.wanted.workload.precision, facts, device=self.wanted.cluster.device)
        manifest = self._with(facts)
        check_depth(self.max_depth, manifest.workload)
        # Raises where only pipelines would meet the batch, and this model cannot be split.
        candidates = manifest.space.candidates(manifest.cluster, DeepSpeedBackEnd())
        if _has_users_code(manifest.workload) or manifest.space.dimensions:
            self._probe(manifest.workload, candidates)
        created = self.store.create(replace(manifest, noise=learned_noise(self.store.location, manifest.cluster)))
        self._keep(manifest.workload)
        self.store.note_profile(facts.profile or facts.unprofiled_because)
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
            first_step_s=self.first_step_timeout_s,
            baseline=self.baseline,
            dimensions=self.wanted.space.dimensions,
        )

    def start(self) -> None:
        """Start the processes that ranks are forked from, and say so, since it takes some seconds."""
        if not self.server.is_started:
            must_compile = self.wanted.cluster.device == "cpu" and not extensions.is_cached()
            once = " (this once a small op is compiled: about a minute)" if must_compile else ""
            print(f"starting the training processes{once} ...", file=sys.stderr, flush=True)
            self.server.start()

    def problem(self, manifest: Manifest) -> Problem | None:
        """The model and this machine. What the study does not keep yet is traced and measured now, in some seconds, and kept."""
        workload = manifest.workload
        try:
            return Problem(
                profile=self._profile(workload),
                hardware=self._hardware(workload),
                software=deepspeed_with(workload.optimizer, manifest.cluster.device),
                n_ranks=manifest.cluster.n_ranks,
                layer_costs=workload.structure.layer_costs,
                dimensions=self.wanted.space.dimensions,
            )
        except (ConfigError, LaunchError) as error:
            print(f"no expectation: {error}", file=sys.stderr, flush=True)
            return None

    def _profile(self, workload: Workload) -> ModelProfile:
        """Raises a ModelError where there is none, or only one of the whole of a model whose layers are dealt to stages."""
        found = self.store.profile()
        if found is None:  # the process that wrote the study died, or did not know of profiles
            facts = self._facts(traces=True)
            found = facts.profile or facts.unprofiled_because
            self.store.note_profile(found)
        if isinstance(found, str):
            raise ModelError(found)
        if found.whole_because and not workload.structure.whole_because:
            raise ModelError(found.whole_because)
        return found

    def _hardware(self, workload: Workload) -> Hardware:
        found = self.store.calibration()
        if found is None:
            found = self._calibration_of_parent() or self._calibrated(workload)
            self.store.note_calibration(found)
        return found

    def _calibrated(self, workload: Workload) -> Hardware:
        cluster = self.wanted.cluster
        print("measuring how fast this machine is ...", file=sys.stderr, flush=True)
        return calibrate(self.server, cluster, precision=workload.precision).hardware(cluster)

    def _calibration_of_parent(self) -> Hardware | None:
        """What the study that this one was forked from found on the same machine."""
        fork = self.wanted.fork
        if fork is None:
            return None
        parent = StudyStore(self.store.location, fork.study)
        manifest = parent.manifest()
        wanted = (self.wanted.cluster, self.wanted.workload.precision)
        is_same = manifest is not None and (manifest.cluster, manifest.workload.precision) == wanted
        return parent.calibration() if is_same else None

    def _keep(self, workload: Workload) -> None:
        keep_pickles(self._sources(workload), self.wanted.space.dimensions, self.store, folder=self.server.run_dir)

    def _sources(self, workload: Workload) -> JobSources:
        return JobSources.of(workload, self.server.run_dir)

    def _facts(self, *, traces: bool = False) -> ModelFacts:
        workload, cluster = self.wanted.workload, self.wanted.cluster
        self.start()
        print(f"building {workload.model.name} once, to look at it ...", file=sys.stderr, flush=True)
        return model_facts(
            workload,
            self.server,
            self._sources(workload),
            device=cluster.device,
            balance=self.balance,
            seq_len=self.seq_len,
            longest_wait_s=self.data_timeout_s,
            traces=traces,
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
                n_samples=facts.n_samples,
                structure=facts.structure,
            ),
            space=self._space(facts.structure, facts.n_samples),
            versions={**own_versions(), **facts.versions},
        )

    def _flops(self, facts: ModelFacts | None) -> tuple[int, ...]:
        """Of a sample in the study and now; nothing where that cannot be compared."""
        before, now = self.store.profile(), facts.profile if facts else None
        if not isinstance(before, ModelProfile) or now is None or before.seq_len != now.seq_len:
            return ()
        return (before.flops, now.flops)

    def _agreed(self, stored: Manifest, facts: ModelFacts | None) -> Manifest:
        """What is wanted, completed by what the stored study found out, or by what a model from code shows today."""
        known = stored.workload
        if facts is not None:
            wanted = self._with(facts)
        else:
            wanted = replace(self.wanted, workload=replace(self.wanted.workload, n_parameters=known.n_parameters))
        structure = known.structure
        if self.balance == "parameters" and structure.cost_unit == "seconds":
            structure = replace(structure, cost_unit="parameters")  # a difference, to be told
        workload = replace(wanted.workload, structure=structure, n_samples=known.n_samples)
        if self.seq_len is None and known.data is not None:
            workload = replace(workload, seq_len=known.seq_len, data_seq_len=known.data_seq_len)
        check_depth(self.max_depth, workload)
        return replace(wanted, workload=workload, space=self._space(known.structure, known.n_samples))

    def _space(self, structure: ModelStructure, n_samples: int | None) -> SearchSpace:
        """What is left of the space for the model and its data."""
        return self.wanted.space.for_model(structure).for_data(n_samples, n_ranks=self.wanted.cluster.n_ranks)

    def _probe(self, workload: Workload, candidates: Sequence[TrainConfig]) -> None:
        """One step of training with the user's code or settings, before anything is written down.

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


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _has_users_code(workload: Workload) -> bool:
    return workload.model.source != "config" or workload.data is not None or workload.optimizer not in OPTIMIZERS


def _check_power(goal: Goal, cluster: Cluster) -> None:
    """Refuse a goal that needs power where nothing tells it.

    Raises:
        ConfigError: The ranks run on CPUs, or the driver does not tell what one of their GPUs draws.
    """
    if not goal.needs_power:
        return
    needs = f"--objective {goal.name} needs power that is measured"
    if cluster.device == "cpu":
        raise ConfigError(f"{needs}, and CPU ranks tell none: use GPUs, or another objective")
    with Nvml() as nvml:
        silent = [str(device.index) for device in nvml.visible()[: cluster.n_ranks] if not device.tells_power()]
    if silent:
        raise ConfigError(
            f"{needs}, and the driver does not tell that of GPU {', '.join(silent)}: use another objective"
        )


@contextlib.contextmanager
def open_training(options: TuneOptions) -> Generator[Opening]:
    """Look at the options and at this machine; the processes that ranks are forked from live as long as the opening.

    Raises:
        ConfigError: An option cannot be used; among them ModelError and ClusterError.
        DeviceBusyError: Somebody else uses a GPU.
        CudaError: torch cannot use the GPUs.
        StoreError: The storage cannot be written.
    """
    spec = model_spec(options.model)
    options.length_of(spec)
    cluster = Cluster.detect(device=options.device, n_ranks=options.ranks, tell=_say)
    goal = options.goal_on(cluster.n_ranks)
    _check_power(goal, cluster)
    memory_bytes = options.memory.bytes_on(cluster)
    space = options.space_on(cluster)
    location = Location(options.storage)
    baseline = Baseline(allow_shared=options.allow_shared_gpu)
    with baseline.ready(cluster, limit_bytes=memory_bytes):
        pass  # says at once if somebody else uses the GPUs
    location.check_writable()
    check_cuda(cluster)
    with training_server(cluster) as server:
        workload = options.workload_of(spec, cluster, folder=server.run_dir)
        check_can_build(workload.optimizer, cluster)
        if spec.source == "object":
            hand_over(options.model, server.run_dir)
        space = replace(space, dimensions=dimensions_ready(space, workload, folder=server.run_dir))
        balance: Any = options.balance  # checked
        store, fork = forked(
            StudyStore(location, options.study or f"{workload.label}_{cluster.label}{goal.label}"), options.fork
        )
        yield Opening(
            wanted=Manifest(
                workload=workload,
                cluster=cluster,
                space=space,
                seed=options.seed,
                goal=goal,
                code=options.users_code,
                fork=fork,
                environment=recorded_environment(cluster),
            ),
            store=store,
            server=server,
            memory_bytes=memory_bytes,
            balance=balance,
            seq_len=options.seq_len,
            max_depth=options.max_depth,
            data_timeout_s=options.data_timeout,
            first_step_timeout_s=options.first_step_timeout,
            baseline=baseline,
        )
