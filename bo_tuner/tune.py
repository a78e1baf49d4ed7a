"""`tune`: the Python entry."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from bo_tuner.budget import Budget, Spent
from bo_tuner.cluster import Cluster, MemoryLimit
from bo_tuner.config import TrainConfig
from bo_tuner.engine import Engine, Progress, StopReason
from bo_tuner.errors import ConfigError, StoreError
from bo_tuner.objectives.launch import ForkServer
from bo_tuner.objectives.training import (
    DeepSpeedBackEnd,
    TrainingObjective,
    deepspeed_config,
    extensions,
    model_facts,
    training_server,
)
from bo_tuner.objectives.training.facts import check_precision
from bo_tuner.open_candidates import OpenCandidates
from bo_tuner.outcome import Measurement
from bo_tuner.report import LineProgress, study_to_dict, write_job
from bo_tuner.samplers import make_sampler
from bo_tuner.samplers.table import check_sampler_name
from bo_tuner.space import BatchRule, SearchSpace
from bo_tuner.storage import Location, Manifest, StudyStore
from bo_tuner.text import count, gib
from bo_tuner.trial import TrialRecord, best_of
from bo_tuner.workload import ModelSpec, Optimizer, Precision, Workload, check_choice, check_seq_len

if TYPE_CHECKING:
    import optuna
    from transformers import PretrainedConfig

__all__ = ["BestTrial", "TuneResult", "tune"]

_LONGEST_STEP_S = 10.0
"""Candidates whose optimizer step would take longer are set aside, unless the batch is fixed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BestTrial:
    """The fastest configuration that fits."""

    record: TrialRecord
    workload: Workload
    cluster: Cluster

    @property
    def config(self) -> TrainConfig:
        """What to train with."""
        return self.record.config

    @property
    def measurement(self) -> Measurement:
        """What its trial showed."""
        assert self.record.result is not None and self.record.result.measurement is not None
        return self.record.result.measurement

    def deepspeed_config(self) -> dict[str, Any]:
        """The DeepSpeed config to train with."""
        return deepspeed_config(self.config, self.workload, n_ranks=self.cluster.n_ranks)

    def export(self, folder: str | Path) -> list[Path]:
        """Write ds_config.json, train.py and launch.sh; returns the files.

        Raises:
            StoreError: The folder cannot be written.
        """
        return write_job(Path(folder), self.record, self.workload, self.cluster)


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult:
    """A study as it stands when `tune` returns."""

    study_name: str
    study: optuna.Study
    """The Optuna study."""
    trials: Sequence[TrialRecord]
    manifest: Manifest
    budget: Budget
    spent: Spent
    stop_reason: StopReason

    @property
    def best(self) -> BestTrial | None:
        """The fastest complete trial; None when nothing completed."""
        record = best_of(self.trials)
        if record is None:
            return None
        return BestTrial(record=record, workload=self.manifest.workload, cluster=self.manifest.cluster)

    def to_dict(self) -> dict[str, Any]:
        """What `bo-tuner tune --json` prints."""
        return study_to_dict(self.study_name, self.trials, budget=str(self.budget), spent=self.spent)


def tune(
    model: str | Path | PretrainedConfig | ModelSpec,
    *,
    budget: str | int | Budget = "20 trials",
    study: str | None = None,
    storage: str | None = None,
    ranks: int | None = None,
    device: str = "auto",
    memory_limit: str | float | MemoryLimit = 0.92,
    global_batch: int | None = None,
    max_global_batch: int | None = None,
    seq_len: int | None = None,
    precision: str = "auto",
    optimizer: str = "adamw",
    zero_stages: Sequence[int] = (0, 1, 2, 3),
    sampler: str = "tpe",
    seed: int = 0,
    progress: Progress | None = None,
) -> TuneResult:
    """Find the fastest training configuration that fits, by short real training steps; start a study or go on with it.

    The same call goes on where an earlier one stopped, however it stopped. Studies lie in `./bo_tuner_studies/` by default.
    Works from scripts, notebooks and tests; a script needs no `if __name__ == "__main__"` guard.

    Example:
        >>> result = tune("bert-tiny", budget="10 trials", seq_len=128)  # doctest: +SKIP
        >>> result.best.deepspeed_config()  # doctest: +SKIP

    Args:
        model: A preset's name, a path to a Hugging Face config (folder or file), or a transformers config object.
        budget: "20 trials", "15m", "2 gpu-h", several with commas (the first reached ends it), or a number of trials.
        study: Its name; None for one that follows from model, sequence length, precision and ranks.
        storage: Any URL of Optuna's RDB storage; None for SQLite in `./bo_tuner_studies/`.
        ranks: World size; None for all visible GPUs, or two CPU ranks.
        device: `auto`, `cpu` or `cuda`.
        memory_limit: Per rank, as a fraction of the device or as bytes ("3GiB").
        global_batch: Fixes the samples per optimizer step.
        max_global_batch: Bounds them.
        seq_len: Tokens per sample; None for the model's longest, at most 2048.
        precision: `auto`, `fp32`, `bf16` or `fp16`; `auto` is fp32 on a CPU, else bf16 where the GPU has it, else fp16.
        optimizer: `adamw` or `adam`.
        zero_stages: ZeRO stages to try.
        sampler: `tpe`, `random` or `grid`.
        seed: Of the sampler and the synthetic data.
        progress: Is told how it goes; None writes lines to stderr, `bo_tuner.report.SilentProgress()` none.

    Returns:
        The study: its best trial, all trials, the Optuna study.

    Raises:
        ConfigError: An argument cannot be used; among them ModelError, ClusterError, StudyMismatchError.
        StudyBusyError: Another process drives this study.
        StoreError: The storage does not answer, or the disk is full.
        LaunchError: Training processes cannot be started.
        KeyboardInterrupt: As usual; all ranks are gone by then, and the same call resumes.
    """
    started = time.monotonic()
    budget = Budget.parse(budget)
    spec = ModelSpec.resolve(model)
    check_choice("--optimizer", optimizer, get_args(Optimizer))
    check_choice("--precision", precision, ("auto", *get_args(Precision)))
    check_sampler_name(sampler)
    if not 0 <= seed < 2**32:
        raise ConfigError(f"--seed must be from 0 to {2**32 - 1}; got {seed}")
    length = seq_len if seq_len is not None else spec.usual_seq_len
    check_seq_len(spec, length)
    cluster = Cluster.detect(device=device, n_ranks=ranks)
    memory_bytes = MemoryLimit.parse(memory_limit).bytes_on(cluster)
    rule = BatchRule.of(global_batch=global_batch, max_global_batch=max_global_batch)
    space = SearchSpace(zero_stages=tuple(zero_stages), batch_rule=rule)
    configs = space.candidates(cluster, DeepSpeedBackEnd())
    workload = Workload(
        model=spec,
        n_parameters=0,  # known once the model was built, below
        seq_len=length,
        precision=cluster.usual_precision if precision == "auto" else precision,  # type: ignore[arg-type]  # checked
        optimizer=optimizer,  # type: ignore[arg-type]  # checked above
    )
    name = study or f"{workload.label}_{cluster.label}"
    wanted = Manifest(workload=workload, cluster=cluster, space=space, seed=seed)
    store = StudyStore(Location(storage), name)
    progress = progress or LineProgress()
    try:
        store.location.check_writable()
        with training_server(cluster) as server:
            manifest = _open_study(store, wanted, server)
            candidates = OpenCandidates(
                configs,
                space=space,
                n_ranks=cluster.n_ranks,
                limit_bytes=memory_bytes,
                longest_step_s=_LONGEST_STEP_S,
            )
            _introduce(store, manifest, budget, memory_bytes, len(configs))
            with store.drive(n_ranks=cluster.n_ranks, budget=str(budget), since=started):
                engine = Engine(
                    store=store,
                    sampler=make_sampler(sampler, candidates, seed=seed),
                    candidates=candidates,
                    objective=TrainingObjective(
                        manifest.workload, cluster, server, log_dir=store.folder / "logs", seed=seed
                    ),
                    budget=budget,
                    memory_bytes=memory_bytes,
                    n_ranks=cluster.n_ranks,
                    progress=progress,
                )
                records = store.records()
                if candidates.open(records) and not budget.is_used_up(store.spent(records)):
                    _start(server, cluster)
                stop_reason = engine.run()
                store.note_stop(str(budget), stop_reason.value)
                store.write_note()
                return TuneResult(
                    study_name=name,
                    study=store.study,
                    trials=store.records(),
                    manifest=manifest,
                    budget=budget,
                    spent=store.spent(),
                    stop_reason=stop_reason,
                )
    except OSError as error:
        raise StoreError(
            f"files must be readable and the disk must have room; {error.filename or 'a file'} fails "
            f"({error.strerror or error}): mend that, or free some room, and run the same command again"
        ) from error


def _open_study(store: StudyStore, wanted: Manifest, server: ForkServer) -> Manifest:
    """The study's manifest: the stored one when it agrees, else a new one, written once the model is known to build."""
    stored = store.manifest()
    if stored is not None:
        n_parameters = stored.workload.n_parameters
        wanted = replace(wanted, workload=replace(wanted.workload, n_parameters=n_parameters))
        stored.check_same(wanted, study_name=store.name)
        return stored
    _start(server, wanted.cluster)
    facts = model_facts(wanted.workload.model, server)
    check_precision(wanted.workload.precision, facts, device=wanted.cluster.device)
    manifest = replace(
        wanted,
        workload=replace(wanted.workload, n_parameters=facts.n_parameters),
        versions={
            "bo_tuner": _version("bo_tuner"),
            "optuna": _version("optuna"),
            "host": platform.node(),
            **facts.versions,
        },
    )
    return store.create(manifest)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"  # a checkout that runs as it is


def _start(server: ForkServer, cluster: Cluster) -> None:
    if not server.is_started:
        must_compile = cluster.device == "cpu" and not extensions.is_cached()
        once = " (this once a small op is compiled: about a minute)" if must_compile else ""
        print(f"starting the training processes{once} ...", file=sys.stderr, flush=True)
        server.start()


def _introduce(store: StudyStore, manifest: Manifest, budget: Budget, memory_bytes: int, n_candidates: int) -> None:
    workload = manifest.workload
    size = f"{workload.n_parameters / 1e6:.1f} M parameters"
    is_free = manifest.space.batch_rule.kind != "fixed"
    aside = f" (set aside: those whose step would take over {_LONGEST_STEP_S:g} s)" if is_free else ""
    lines = [
        f"study {store.name} in {store.location.shown_url}",
        f"model {workload.model.name}, {size}, sequence length {workload.seq_len}, {workload.precision}, {workload.optimizer}",
        f"on {manifest.cluster}, memory limit {gib(memory_bytes)} a rank",
        f"global batch {manifest.space.batch_rule}",
        f"{count(n_candidates, 'candidate')}{aside}, budget {budget}",
    ]
    print("\n".join(lines), file=sys.stderr, flush=True)
