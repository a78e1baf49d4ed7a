"""`tune`: the Python entry."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bo_tuner.budget import Budget, Spent
from bo_tuner.cluster import Cluster, MemoryLimit
from bo_tuner.config import TrainConfig
from bo_tuner.dimension import Dimension
from bo_tuner.engine import Engine, Progress, StopReason
from bo_tuner.errors import NothingFitsError, StoreError
from bo_tuner.launcher import refuse_launchers
from bo_tuner.models.choices import Problem
from bo_tuner.models.misfit import misfit
from bo_tuner.models.outlook import outlook
from bo_tuner.objectives.simulated import Simulation
from bo_tuner.objectives.training import DeepSpeedBackEnd, deepspeed_config
from bo_tuner.objectives.training.dimensions import dimensions_found
from bo_tuner.open_candidates import OpenCandidates
from bo_tuner.opening import OPENINGS, StudyOpening, TuneOptions, introduction
from bo_tuner.origin import REAL, Origin
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
from bo_tuner.report.export import check_exportable
from bo_tuner.report.page import begun
from bo_tuner.samplers import asks_for_expectations, make_sampler
from bo_tuner.space import SearchSpace
from bo_tuner.storage import Manifest
from bo_tuner.trial import TrialRecord, best_of, pareto_front
from bo_tuner.workload import ModelSpec, Workload

if TYPE_CHECKING:
    import optuna
    from torch import nn
    from transformers import PretrainedConfig

__all__ = ["BestTrial", "TuneResult", "tune"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BestTrial:
    """The best configuration that fits, by the study's objective."""

    record: TrialRecord
    workload: Workload
    cluster: Cluster
    study_folder: Path
    """Where the study keeps a model or functions that came as Python objects."""
    space: SearchSpace
    """With the user's own dimensions."""
    origin: Origin = REAL
    """Whether anything was measured here."""
    environment: Mapping[str, str] | None = None
    """The user's variables that the trials ran with, as far as they are known."""

    @property
    def config(self) -> TrainConfig:
        """What to train with."""
        return self.record.config

    @property
    def measurement(self) -> Measurement:
        """What its confirmation showed, or its trial where there is none."""
        standing = self.record.standing
        assert standing is not None and standing.measurement is not None
        return standing.measurement

    def deepspeed_config(self) -> dict[str, Any]:
        """The DeepSpeed config to train with.

        Raises:
            ConfigError: DeepSpeed cannot run what a table measured, or the function of a dimension is gone.
        """
        check_exportable(self.config, self.space.dimensions)
        return deepspeed_config(
            self.config,
            self.workload,
            n_ranks=self.cluster.n_ranks,
            device=self.cluster.device,
            dimensions=self._dimensions(),
        )

    def export(self, folder: str | Path) -> list[Path]:
        """Write ds_config.json, train.py and launch.sh; returns the files.

        Raises:
            StoreError: The folder cannot be written.
            ConfigError: DeepSpeed cannot run what a table measured, the table does not hold the model, or the function of a
                dimension is gone.
        """
        return write_job(
            Path(folder),
            self.record,
            self.workload,
            self.cluster,
            study_folder=self.study_folder,
            origin=self.origin,
            dimensions=self._dimensions(),
            environment=self.environment,
        )

    def _dimensions(self) -> tuple[Dimension, ...]:
        return dimensions_found(self.space, self.workload, folder=self.study_folder)


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
    stopped_because: str
    """The same in words, with the figure behind it."""
    folder: Path
    """Where the study's files lie."""
    storage_url: str | None = None
    """Without its password; None for the default database."""

    @property
    def best(self) -> BestTrial | None:
        """The best complete trial by the objective; None when none has a value. Of two objectives the first decides."""
        record = best_of(self.trials)
        if record is None:
            return None
        return BestTrial(
            record=record,
            workload=self.manifest.workload,
            cluster=self.manifest.cluster,
            study_folder=self.folder,
            space=self.manifest.space,
            origin=self.manifest.origin,
            environment=self.manifest.environment,
        )

    @property
    def pareto(self) -> list[TrialRecord]:
        """Under two objectives the trials that no other one beats in one without being worse in the other, the fastest first; else none."""
        return pareto_front(self.trials)

    def to_dict(self) -> dict[str, Any]:
        """What `bo-tuner tune --json` prints."""
        candidates = self.manifest.space.candidates(self.manifest.cluster, DeepSpeedBackEnd())
        return study_to_dict(
            self.study_name,
            self.trials,
            candidates,
            budget=str(self.budget),
            spent=self.spent,
            origin=self.manifest.origin,
            goal=self.manifest.goal,
        )

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
            stop_reason=self.stopped_because,
            storage_url=self.storage_url,
            folder=self.folder,
            started=begun(self.study),
        )
        return write_report(told, Path(path) if path is not None else None)


def tune(
    model: str | Path | PretrainedConfig | nn.Module | ModelSpec | None = None,
    *,
    replay: str | Path | None = None,
    group: str | None = None,
    simulate: bool | Simulation = False,
    cluster: str | None = None,
    budget: str | int | Budget = "20 trials",
    objective: str = "throughput",
    price_per_gpu_hour: float | None = None,
    study: str | None = None,
    fork: str | None = None,
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
    first_step_timeout: float | None = None,
    seq_len: int | None = None,
    precision: str = "auto",
    optimizer: str | Callable[..., Any] = "adamw",
    zero_stages: Sequence[int] = (0, 1, 2, 3),
    max_depth: int | None = None,
    schedules: Sequence[str] = ("1f1b",),
    balance: str = "time",
    recompute: str = "both",
    dimensions: Sequence[Dimension | str] = (),
    sampler: str = "bo",
    min_gain: str | float = 0.01,
    precision_target: str | float = 0.02,
    max_steps: int | None = None,
    confirm: bool = True,
    insist: bool = False,
    retry_failed: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
) -> TuneResult:
    """Find the fastest training configuration that fits, or the best by another objective, by short real training steps; start a study or go on with it.

    With `simulate` or `replay` the steps are a cost model's or a table's: nothing runs, and the study says so wherever it is shown.

    The same call goes on where an earlier one stopped, however it stopped. Studies lie in `./bo_tuner_studies/` by default.
    Works from scripts, notebooks and tests; a script needs no `if __name__ == "__main__"` guard.

    Example:
        >>> result = tune("bert-tiny", budget="10 trials", seq_len=128)  # doctest: +SKIP
        >>> result.best.deepspeed_config()  # doctest: +SKIP

    Args:
        model: A preset's name, a path to a Hugging Face config (folder or file), a transformers config object, a torch module
            whose forward gives a loss, or `FILE.py:FUNCTION`, a function without arguments that returns such a module or a pair
            (list of layers, loss function). A module travels without its weights, and is left as it is. None only with `replay`.
        replay: A table of measured runs in CSV, which takes the place of training: its configs are the candidates, and model and
            devices are the table's, so that no option that tells of them goes with it.
        group: Which problem of the table; None where it holds only one.
        simulate: The cost model takes the place of training; a `Simulation` says how noisy it is, and how much goes wrong.
        cluster: What is simulated, as in "8x8xV100-16GB" (nodes, devices of each, device); None for this machine's devices.
        budget: "20 trials", "15m", "2 gpu-h", several with commas (the first reached ends it), or a number of trials. Times of trials
            that nobody ran are those that they would have taken.
        objective: What the best is the best of: `throughput` (samples/s), `latency` (seconds a step, under a fixed `global_batch`), `energy`
            (tokens a joule, on GPUs that tell their power), `cost` (of a million tokens), or `throughput,memory`, both at once.
        price_per_gpu_hour: Of one rank, GPU or CPU, in any currency; for `cost` alone.
        study: Its name; None for one that follows from model, samples, precision, ranks and objective, or from the group.
        fork: Name of a new study, which begins with the best configs of `study` and takes over nothing that was measured but how fast the
            machine is: for code that changed.
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
        first_step_timeout: Seconds that a rank may take for its first step without getting on, whatever it does; None for 60, more for a
            large model, and 600 while it compiles (`torch.compile`, ops that are built when they are first used).
        seq_len: Tokens per sample; None for the model's longest, at most 2048 on GPUs and 128 on a CPU, or for those of `data`.
        precision: `auto`, `fp32`, `bf16` or `fp16`; `auto` is fp32 on a CPU, else bf16 where the GPU has it, else fp16.
        optimizer: `adamw` or `adam` (torch's, fused on GPUs), `fused_adam` (DeepSpeed's, compiled at its first use), or a function, or `FILE.py:FUNCTION`, that takes the parameters and returns a torch optimizer.
        zero_stages: ZeRO stages to try.
        max_depth: Most pipeline stages to try; None for as many as there are ranks and layers.
        schedules: Of pipelines, by name: some that the back end runs (DeepSpeed: `1f1b`, and what an installed package adds to it).
        balance: Stages are balanced by the measured `time` of layers, or by their `parameters`.
        recompute: Whether activations are recomputed: `both` tries it, `on`, `off`.
        dimensions: What else to try: each a `Dimension`, `NAME=VALUE,VALUE:PATH`, or `FILE.py:FUNCTION`, which returns one or a list.
        sampler: Who chooses the next config: `bo`, Bayesian optimization over what the cost model expects; `tpe`, `gp`, `random`, `grid`, or by rule
            `climb`, `doubling` or `deepspeed` (see the manual).
        min_gain: The study ends before its budget once the probability that any remaining config is faster than the best by more than this
            fraction ("1%") is under 5 %, which only `bo` can tell; 0 goes on to the end of the budget.
        precision_target: A trial ends once the 95 % interval of its median step time is narrower than this fraction of it ("2%").
        max_steps: Optimizer steps of a trial at most, warm-up included; None for as many as 4 s hold, from 6 to 100.
        confirm: The first config that completes is repeated, to learn what launches differ by (in studies of eight trials or more), and
            the winner is run again, longer; where it does not hold what it promised, the next one is.
        insist: Start also where every config is expected to need far more memory than a device has.
        retry_failed: Configs whose trials failed or timed out may run again, once each.
        seed: Of the sampler and the synthetic data.
        progress: Is told how it goes; None shows it live in a terminal or notebook and writes lines elsewhere,
            `bo_tuner.report.SilentProgress()` says nothing.

    Returns:
        The study: its best trial, all trials, the Optuna study.

    Raises:
        ConfigError: An argument cannot be used; among them ModelError, ClusterError, StudyMismatchError. Or a launcher (torchrun, srun,
            mpirun) started this process as one of several.
        StudyBusyError: Another process drives this study.
        DeviceBusyError: Somebody else uses a GPU, or does not give it back.
        StoreError: The storage does not answer, or the disk is full.
        LaunchError: Training processes cannot be started.
        NothingFitsError: No config is expected to fit by far.
        KeyboardInterrupt: As usual; all ranks are gone by then, and the same call resumes.
    """
    options = TuneOptions(**locals())
    started = time.monotonic()
    refuse_launchers()
    limit = Budget.parse(budget)
    options.check()
    try:
        with OPENINGS[options.kind](options) as opening:
            return _driven(opening, options, limit, started)
    except OSError as error:
        raise StoreError(
            f"files must be readable and the disk must have room; {error.filename or 'a file'} fails "
            f"({error.strerror or error}): mend that, or free some room, and run the same command again"
        ) from error


def _driven(opening: StudyOpening, options: TuneOptions, budget: Budget, started: float) -> TuneResult:
    """Open the study, and go on with it until it ends."""
    store = opening.store
    progress = SharedProgress(options.progress or default_progress(), store.folder)
    manifest = opening.open()
    cluster, origin = manifest.cluster, manifest.origin
    configs = manifest.space.candidates(cluster, DeepSpeedBackEnd())
    candidates_for = functools.partial(
        OpenCandidates,
        configs,
        space=manifest.space,
        n_ranks=cluster.n_ranks,
        limit_bytes=opening.memory_bytes,
        longest_step_s=opening.longest_step_s,
        goal=manifest.goal,
    )
    retried = store.retry_failed() if options.retry_failed else frozenset()
    print(
        introduction(
            store,
            manifest,
            budget,
            memory_bytes=opening.memory_bytes,
            n_candidates=len(configs),
            longest_step_s=opening.longest_step_s,
            notes=opening.notes,
        ),
        file=sys.stderr,
        flush=True,
    )
    with store.drive(n_ranks=cluster.n_ranks, budget=str(budget), since=started):
        records, problem = store.records(), None
        if candidates_for(retried=retried).open(records) and not budget.is_used_up(store.spent(records)):
            opening.start()
            if asks_for_expectations(options.sampler):
                problem = opening.problem(manifest)
        if problem is not None:
            longest_step_s = math.inf if manifest.space.batch_rule.kind == "fixed" else opening.longest_step_s
            line = outlook(problem, configs, limit_bytes=opening.memory_bytes, longest_step_s=longest_step_s)
            print(line, file=sys.stderr, flush=True)
            if origin.is_real and not options.insist and not any(record.has_run for record in records):
                _check_fits(problem, configs, cluster)
        candidates = candidates_for(problem=problem, retried=retried)
        engine = Engine(
            store=store,
            sampler=make_sampler(options.sampler, candidates, seed=options.seed, problem=problem),
            candidates=candidates,
            objective=opening.objective(manifest.workload, log_dir=store.folder / "logs"),
            budget=budget,
            limits=TrialLimits(
                memory_bytes=opening.memory_bytes,
                precision_target=options.precision_fraction,
                max_steps=options.max_steps,
            ),
            n_ranks=cluster.n_ranks,
            progress=progress,
            confirms=options.confirm and origin.can_confirm,
            min_gain=options.min_gain_fraction,
            first=manifest.fork.first if manifest.fork else (),
        )
        stop_reason = engine.run()
        why = _why(stop_reason, engine.chance_of_gain, options.min_gain_fraction)
        store.note_stop(str(budget), why)
        store.write_note()
        with contextlib.suppress(StoreError):  # figures are for lookers-on: the study is whole without them
            store.write_figures(dashboard_figures(store.records(), n_ranks=cluster.n_ranks))
        return TuneResult(
            study_name=store.name,
            study=store.study,
            trials=store.records(),
            manifest=manifest,
            budget=budget,
            spent=store.spent(),
            stop_reason=stop_reason,
            stopped_because=why,
            folder=store.folder,
            storage_url=None if store.location.is_default else store.location.shown_url,
        )


def _check_fits(problem: Problem, configs: Sequence[TrainConfig], cluster: Cluster) -> None:
    """Refuse to start what would only end with the machine.

    Raises:
        NothingFitsError: Every config is expected to need far more memory than there is.
    """
    why = misfit(problem, configs, device_bytes=cluster.memory_bytes)
    if why is not None:
        raise NothingFitsError(
            f"{why}: lower --seq-len, take a smaller model, more --ranks or larger devices (bo-tuner plan tells which), or try all the "
            "same with --insist"
        )


def _why(reason: StopReason, chance: float | None, min_gain: float) -> str:
    """Why a study ended, with the figure where there is one."""
    if reason is not StopReason.CONVERGED or chance is None:
        return reason.value
    percent = f"under {math.floor(chance * 100) + 1} %"  # rounded, one of 4.6 % would read as the 5 % that it is under
    return f"{reason.value}: the chance that one is, by more than {min_gain * 100:g} %, is {percent}"
