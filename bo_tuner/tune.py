"""`tune`: the Python entry."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from bo_tuner.budget import Budget, Spent
from bo_tuner.cluster import Cluster, MemoryLimit
from bo_tuner.config import TrainConfig
from bo_tuner.engine import Engine, Progress, StopReason
from bo_tuner.errors import ConfigError, ModelError, StoreError
from bo_tuner.objectives.launch import ForkServer
from bo_tuner.objectives.memory import Baseline
from bo_tuner.objectives.training import DeepSpeedBackEnd, deepspeed_config, training_server
from bo_tuner.objectives.training.facts import Balance
from bo_tuner.objectives.training.sources import MODEL_FILE, model_spec, named, write_object
from bo_tuner.open_candidates import OpenCandidates
from bo_tuner.opening import LONGEST_STEP_S, Opening, introduction, start_server
from bo_tuner.outcome import Measurement, TrialLimits
from bo_tuner.report import (
    ReportedStudy,
    SharedProgress,
    dashboard_figures,
    default_progress,
    study_to_dict,
    write_job,
    write_report,
)
from bo_tuner.report.page import begun
from bo_tuner.samplers import make_sampler
from bo_tuner.samplers.table import check_sampler_name
from bo_tuner.space import BatchRule, SearchSpace
from bo_tuner.storage import Location, Manifest, StudyStore
from bo_tuner.text import fraction_in
from bo_tuner.trial import TrialRecord, best_of
from bo_tuner.workload import OPTIMIZERS, UNKNOWN_LENGTH, ModelSpec, Precision, Workload, check_choice, check_seq_len

if TYPE_CHECKING:
    import optuna
    from torch import nn
    from transformers import PretrainedConfig

__all__ = ["BestTrial", "TuneResult", "tune"]

_FEWEST_STEPS = 4
_RECOMPUTE = {"both": (False, True), "on": (True,), "off": (False,)}


@dataclass(frozen=True, slots=True, kw_only=True)
class BestTrial:
    """The fastest configuration that fits."""

    record: TrialRecord
    workload: Workload
    cluster: Cluster
    study_folder: Path
    """Where the study keeps a model or functions that came as Python objects."""

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
        return write_job(Path(folder), self.record, self.workload, self.cluster, study_folder=self.study_folder)


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
    folder: Path
    """Where the study's files lie."""
    storage_url: str | None = None
    """Without its password; None for the default database."""

    @property
    def best(self) -> BestTrial | None:
        """The fastest complete trial; None when nothing completed."""
        record = best_of(self.trials)
        if record is None:
            return None
        return BestTrial(
            record=record, workload=self.manifest.workload, cluster=self.manifest.cluster, study_folder=self.folder
        )

    def to_dict(self) -> dict[str, Any]:
        """What `bo-tuner tune --json` prints."""
        candidates = self.manifest.space.candidates(self.manifest.cluster, DeepSpeedBackEnd())
        return study_to_dict(self.study_name, self.trials, candidates, budget=str(self.budget), spent=self.spent)

    def report(self, path: str | Path | None = None) -> Path:
        """Write the study as one HTML page, by default STUDY.html in this folder; returns the file.

        Raises:
            StoreError: The file cannot be written.
        """
        told = ReportedStudy(
            name=self.study_name,
            records=self.trials,
            manifest=self.manifest,
            spent=self.spent,
            budget=str(self.budget),
            stop_reason=self.stop_reason.value,
            storage_url=self.storage_url,
            started=begun(self.study),
        )
        return write_report(told, Path(path) if path is not None else None)


def tune(
    model: str | Path | PretrainedConfig | nn.Module | ModelSpec,
    *,
    budget: str | int | Budget = "20 trials",
    study: str | None = None,
    storage: str | None = None,
    ranks: int | None = None,
    device: str = "auto",
    memory_limit: str | float | MemoryLimit | None = None,
    memory_reserve: str | None = None,
    allow_shared_gpu: bool = False,
    global_batch: int | None = None,
    max_global_batch: int | None = None,
    data: str | Callable[..., Any] | None = None,
    data_timeout: float = 120.0,
    seq_len: int | None = None,
    precision: str = "auto",
    optimizer: str | Callable[..., Any] = "adamw",
    zero_stages: Sequence[int] = (0, 1, 2, 3),
    max_depth: int | None = None,
    balance: str = "time",
    recompute: str = "both",
    sampler: str = "tpe",
    precision_target: str | float = 0.02,
    max_steps: int | None = None,
    confirm: bool = True,
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
        model: A preset's name, a path to a Hugging Face config (folder or file), a transformers config object, a torch module
            whose forward gives a loss, or `FILE.py:FUNCTION`, a function without arguments that returns such a module or a pair
            (list of layers, loss function). A module travels without its weights, and is left as it is.
        budget: "20 trials", "15m", "2 gpu-h", several with commas (the first reached ends it), or a number of trials.
        study: Its name; None for one that follows from model, samples, precision and ranks.
        storage: Any URL of Optuna's RDB storage; None for SQLite in `./bo_tuner_studies/`.
        ranks: World size; None for all visible GPUs, or two CPU ranks.
        device: `auto`, `cpu` or `cuda`.
        memory_limit: Per rank, as a fraction of the device or as bytes ("3GiB"); None for 0.92. On a GPU all that the device
            holds counts, as nvidia-smi shows it.
        memory_reserve: Instead: bytes of each device that stay free ("2GiB").
        allow_shared_gpu: Measure also on GPUs that other processes use; otherwise these are named, and nothing runs.
        global_batch: Fixes the samples per optimizer step.
        max_global_batch: Bounds them.
        data: A function, or `FILE.py:FUNCTION`, that returns a data set of samples, or a loader of micro-batches. It may take any of
            micro_batch_size, rank, world_size (of the data-parallel replicas), seed and seq_len (where `seq_len` is given, or the
            model is one of transformers'). None for random samples, which can be made up for transformers models.
        data_timeout: Seconds that the data may take to give a micro-batch.
        seq_len: Tokens per sample; None for the model's longest, at most 2048, or for those of `data`.
        precision: `auto`, `fp32`, `bf16` or `fp16`; `auto` is fp32 on a CPU, else bf16 where the GPU has it, else fp16.
        optimizer: `adamw`, `adam`, or a function, or `FILE.py:FUNCTION`, that takes the parameters and returns a torch optimizer.
        zero_stages: ZeRO stages to try.
        max_depth: Most pipeline stages to try; None for as many as there are ranks and layers.
        balance: Stages are balanced by the measured `time` of layers, or by their `parameters`.
        recompute: Whether activations are recomputed: `both` tries it, `on`, `off`.
        sampler: `tpe`, `random` or `grid`.
        precision_target: A trial ends once the 95 % interval of its median step time is narrower than this fraction of it ("2%").
        max_steps: Optimizer steps of a trial at most, warm-up included; None for as many as 4 s hold, from 6 to 100.
        confirm: The first config that completes is repeated, to learn what launches differ by (in studies of eight trials or more), and
            the winner is run again, longer; where it does not hold what it promised, the next one is.
        seed: Of the sampler and the synthetic data.
        progress: Is told how it goes; None shows it live in a terminal or notebook and writes lines elsewhere,
            `bo_tuner.report.SilentProgress()` says nothing.

    Returns:
        The study: its best trial, all trials, the Optuna study.

    Raises:
        ConfigError: An argument cannot be used; among them ModelError, ClusterError, StudyMismatchError.
        StudyBusyError: Another process drives this study.
        DeviceBusyError: Somebody else uses a GPU, or does not give it back.
        StoreError: The storage does not answer, or the disk is full.
        LaunchError: Training processes cannot be started.
        KeyboardInterrupt: As usual; all ranks are gone by then, and the same call resumes.
    """
    started = time.monotonic()
    budget = Budget.parse(budget)
    spec = model_spec(model)
    check_choice("--precision", precision, ("auto", *get_args(Precision)))
    check_choice("--balance", balance, get_args(Balance))
    check_choice("--recompute", recompute, tuple(_RECOMPUTE))
    check_sampler_name(sampler)
    if not 0 <= seed < 2**32:
        raise ConfigError(f"--seed must be from 0 to {2**32 - 1}; got {seed}")
    precision_fraction = _checked_precision(precision_target, max_steps)
    if data_timeout <= 0:
        raise ConfigError(f"--data-timeout must be over 0 s; got {data_timeout:g}")
    is_length_known = spec.source == "config" and data is None
    length = seq_len if seq_len is not None else spec.usual_seq_len if is_length_known else UNKNOWN_LENGTH
    check_seq_len(spec, length)
    data_length = seq_len if seq_len is not None else spec.usual_seq_len if spec.source == "config" else None
    cluster = Cluster.detect(device=device, n_ranks=ranks)
    memory_bytes = MemoryLimit.of(memory_limit=memory_limit, memory_reserve=memory_reserve).bytes_on(cluster)
    space = SearchSpace(
        zero_stages=tuple(zero_stages),
        batch_rule=BatchRule.of(global_batch=global_batch, max_global_batch=max_global_batch),
        pipeline_depths=_depths(cluster, max_depth),
        recompute=_RECOMPUTE[recompute],
    )
    space.candidates(cluster, DeepSpeedBackEnd())  # says at once if there are none
    location = Location(storage)
    baseline = Baseline(allow_shared=allow_shared_gpu)
    with baseline.ready(cluster, limit_bytes=memory_bytes):
        pass  # says at once if somebody else uses the GPUs
    try:
        location.check_writable()
        with training_server(cluster) as server:
            workload = Workload(
                model=spec,
                n_parameters=0,  # known once the model was built, below
                seq_len=length,
                precision=cluster.usual_precision if precision == "auto" else precision,  # type: ignore[arg-type]  # checked
                optimizer=_optimizer_source(optimizer, server.run_dir),
                data=None if data is None else named("--data", data, server.run_dir),
                data_seq_len=None if data is None else data_length,
            )
            if spec.source == "object":
                _hand_over(model, server)
            name = study or f"{workload.label}_{cluster.label}"
            store = StudyStore(location, name)
            progress = SharedProgress(progress or default_progress(), store.folder)
            opening = Opening(
                wanted=Manifest(workload=workload, cluster=cluster, space=space, seed=seed),
                store=store,
                server=server,
                memory_bytes=memory_bytes,
                balance=balance,  # type: ignore[arg-type]  # checked above
                seq_len=seq_len,
                max_depth=max_depth,
                data_timeout_s=data_timeout,
                baseline=baseline,
            )
            manifest = opening.open()
            configs = manifest.space.candidates(cluster, DeepSpeedBackEnd())
            candidates = OpenCandidates(
                configs,
                space=manifest.space,
                n_ranks=cluster.n_ranks,
                limit_bytes=memory_bytes,
                longest_step_s=LONGEST_STEP_S,
            )
            print(
                introduction(store, manifest, budget, memory_bytes=memory_bytes, n_candidates=len(configs)),
                file=sys.stderr,
                flush=True,
            )
            with store.drive(n_ranks=cluster.n_ranks, budget=str(budget), since=started):
                engine = Engine(
                    store=store,
                    sampler=make_sampler(sampler, candidates, seed=seed),
                    candidates=candidates,
                    objective=opening.objective(manifest.workload, log_dir=store.folder / "logs"),
                    budget=budget,
                    limits=TrialLimits(
                        memory_bytes=memory_bytes, precision_target=precision_fraction, max_steps=max_steps
                    ),
                    n_ranks=cluster.n_ranks,
                    progress=progress,
                    confirms=confirm,
                )
                records = store.records()
                if candidates.open(records) and not budget.is_used_up(store.spent(records)):
                    start_server(server, cluster)
                stop_reason = engine.run()
                store.note_stop(str(budget), stop_reason.value)
                store.write_note()
                with contextlib.suppress(StoreError):  # figures are for lookers-on: the study is whole without them
                    store.write_figures(dashboard_figures(store.records(), n_ranks=cluster.n_ranks))
                return TuneResult(
                    study_name=name,
                    study=store.study,
                    trials=store.records(),
                    manifest=manifest,
                    budget=budget,
                    spent=store.spent(),
                    stop_reason=stop_reason,
                    folder=store.folder,
                    storage_url=None if store.location.is_default else store.location.shown_url,
                )
    except OSError as error:
        raise StoreError(
            f"files must be readable and the disk must have room; {error.filename or 'a file'} fails "
            f"({error.strerror or error}): mend that, or free some room, and run the same command again"
        ) from error


def _checked_precision(precision_target: str | float, max_steps: int | None) -> float:
    """The target as a fraction."""
    fraction = fraction_in(str(precision_target))
    if fraction is None or not 0 < fraction < 1:
        raise ConfigError(
            f'--precision-target must be over 0 and under 1, as in 0.02 or "2%"; got {precision_target!r}'
        )
    if max_steps is not None and max_steps < _FEWEST_STEPS:
        raise ConfigError(
            f"--max-steps must be at least {_FEWEST_STEPS}: one to warm up, and three to measure; got {max_steps}"
        )
    return fraction


def _depths(cluster: Cluster, max_depth: int | None) -> tuple[int, ...]:
    """Numbers of stages that divide the ranks."""
    if max_depth is not None and not 1 <= max_depth <= cluster.n_ranks:
        raise ConfigError(f"--max-depth must be from 1 to the {cluster.n_ranks} ranks; got {max_depth}")
    most = max_depth or cluster.n_ranks
    return tuple(depth for depth in range(1, most + 1) if cluster.n_ranks % depth == 0)


def _optimizer_source(optimizer: str | Callable[..., Any], folder: Path) -> str:
    """A known optimizer's name, or where the user's comes from."""
    if isinstance(optimizer, str) and optimizer in OPTIMIZERS:
        return optimizer
    return named("--optimizer", optimizer, folder)


def _hand_over(model: Any, server: ForkServer) -> None:
    """Write a module's structure where the ranks of this run find it."""
    from bo_tuner.objectives.training.job import JobError
    from bo_tuner.objectives.training.job.structure import structure_of

    try:
        write_object(structure_of(model), server.run_dir / MODEL_FILE, "a model")
    except JobError as error:
        raise ModelError(str(error)) from error
