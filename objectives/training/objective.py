"""`TrainingObjective`: runs a config as real training steps in a process group of its own, and watches it from outside."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bo_tuner.cluster import Cluster
from bo_tuner.config import TrainConfig
from bo_tuner.dimension import Dimension
from bo_tuner.errors import ConfigError
from bo_tuner.nvml import Device
from bo_tuner.objectives.base import EventSink
from bo_tuner.objectives.launch import ForkServer
from bo_tuner.objectives.memory import Baseline
from bo_tuner.objectives.training import extensions
from bo_tuner.objectives.training.deepspeed_backend import deepspeed_config
from bo_tuner.objectives.training.environment import rank_environment, recorded_environment
from bo_tuner.objectives.training.pulse import Pulses
from bo_tuner.objectives.training.rank import PRELOAD
from bo_tuner.objectives.training.silence import LEAST_S, Patience, SignsOfLife
from bo_tuner.objectives.training.sources import JobSources, job_of
from bo_tuner.objectives.training.watch import TrialWatch
from bo_tuner.outcome import Outcome, TrialLimits, TrialResult
from bo_tuner.workload import Workload

__all__ = ["TrainingObjective", "training_server"]

_LOG_LINES = 40
_RANK = "bo_tuner.objectives.training.rank:run_rank"
_KERNEL_CACHES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
"""Kernels compiled in one trial serve the next, and killed compilers harm nobody else."""
_DRAW_STRIDE = 7919
"""Between the seeds of two draws, so that draws of neighbouring seeds do not meet."""


def training_server(cluster: Cluster) -> ForkServer:
    """A fork server whose ranks can train on `cluster`; not started yet."""
    environment = {
        **rank_environment(cluster, recorded_environment(cluster)),
        # ninja stands beside the interpreter, whether or not the environment is activated.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        # A CUDA probe by torch before the fork would break CUDA in every child; this one asks NVML.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }
    server = ForkServer(preload=PRELOAD, prepare="bo_tuner.objectives.training.rank:prepare", environment=environment)
    try:
        server.environment["TORCH_EXTENSIONS_DIR"] = str(extensions.private_copy(server.run_dir))
        for name, folder in _KERNEL_CACHES.items():
            (server.run_dir / folder).mkdir(mode=0o700)
            server.environment[name] = str(server.run_dir / folder)
    except BaseException:
        server.close()
        raise
    return server


class TrainingObjective:
    """Real training steps under DeepSpeed. Implements `Objective`."""

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        server: ForkServer,
        *,
        log_dir: Path,
        seed: int = 0,
        sources: JobSources | None = None,
        longest_wait_s: float = 120.0,
        first_step_s: float | None = None,
        baseline: Baseline | None = None,
        dimensions: Sequence[Dimension] = (),
        least_silence_s: float = LEAST_S,
        rank: str = _RANK,
    ) -> None:
        """Measure `workload` on `cluster` with ranks of `server`.

        Args:
            workload: What to train.
            cluster: On what.
            server: From `training_server`.
            log_dir: The ranks' output goes here, one file per trial and rank.
            seed: Of the synthetic data.
            sources: Where ranks find model, data and optimizer; None follows from `workload`.
            longest_wait_s: Seconds that the user's data may take to give a micro-batch.
            first_step_s: Seconds of silence that are allowed before the first step is done; None for a minute, more for a large
                model or while something is compiled.
            baseline: Of the GPUs; None for one that is read before the first trial.
            dimensions: The user's own, which change DeepSpeed's config.
            least_silence_s: A rank that gives no sign of life for less than this is not taken for hung.
            rank: `module:function` that each rank runs; another than the default is for tests, which break it.
        """
        self._baseline = baseline or Baseline()
        self._sources = sources or JobSources.of(workload, server.run_dir)
        self._longest_wait_s = longest_wait_s
        self._workload = workload
        self._dimensions = dimensions
        self._cluster = cluster
        self._server = server
        self._log_dir = log_dir
        self._seed = seed
        self._rank = rank
        self._patience = Patience(
            workload,
            cluster,
            least_s=least_silence_s,
            longest_wait_s=longest_wait_s if self._sources.data else 0.0,
            first_step_s=first_step_s,
        )
        self._n_trials = 0

    def __call__(self, config: TrainConfig, *, limits: TrialLimits, on_event: EventSink) -> TrialResult:
        """Run `config`; see `Objective`.

        Raises:
            DeviceBusyError: A GPU is not free for it.
            DriverError: The GPU driver does not answer. Both end the study, which goes on once that is mended.
        """
        with self._baseline.ready(self._cluster, limit_bytes=limits.memory_bytes) as devices:
            return self._on_devices(config, limits, on_event, devices)

    def _on_devices(
        self, config: TrainConfig, limits: TrialLimits, on_event: EventSink, devices: Sequence[Device]
    ) -> TrialResult:
        self._server.start()
        self._n_trials += 1
        trial_dir = self._server.run_dir / f"trial-{self._n_trials}"
        (trial_dir / "tmp").mkdir(mode=0o700, parents=True)
        try:
            with contextlib.closing(Pulses(n_ranks=self._cluster.n_ranks, now=time.monotonic())) as pulses:
                return self._run(config, limits, on_event, trial_dir, devices, pulses)
        finally:
            shutil.rmtree(trial_dir, ignore_errors=True)

    def _run(
        self,
        config: TrainConfig,
        limits: TrialLimits,
        on_event: EventSink,
        trial_dir: Path,
        devices: Sequence[Device],
        pulses: Pulses,
    ) -> TrialResult:
        n_ranks = self._cluster.n_ranks
        extensions.remove_locks(Path(self._server.environment["TORCH_EXTENSIONS_DIR"]))
        self._log_dir.mkdir(parents=True, exist_ok=True)
        logs = [self._log_dir / f"{config.name}.rank{rank}.log" for rank in range(n_ranks)]
        for log in logs:
            log.unlink(missing_ok=True)
        try:
            told = self._spec(config, limits, trial_dir, pulses.file)
        except ConfigError as error:  # a change of the user's refuses what no other config had shown it
            return TrialResult(outcome=Outcome.REJECTED, reason=str(error), limit_bytes=limits.memory_bytes)
        spec = trial_dir / "spec.json"
        spec.write_text(json.dumps(told), encoding="utf-8")
        port = _free_port()
        started = time.monotonic()
        group = self._server.launch(
            self._rank,
            spec=spec,
            environments=[self._environment(rank, port, trial_dir) for rank in range(n_ranks)],
            logs=logs,
            leftovers=[_shared_memory(port)],
        )
        watch = TrialWatch(
            group,
            config,
            limits,
            on_event,
            cluster=self._cluster,
            started=started,
            devices=devices,
            life=SignsOfLife(pulses, self._patience, config, group.pids, _stack_files(trial_dir, n_ranks)),
        )
        try:
            watch.run()
        finally:
            ended = time.monotonic()
            group.kill()
            extensions.keep(Path(self._server.environment["TORCH_EXTENSIONS_DIR"]))
        now = time.monotonic()
        return watch.result(
            seq_len=self._workload.seq_len, teardown_s=now - ended, wall_s=now - started, log_tail=_tail(logs)
        )

    def _spec(self, config: TrainConfig, limits: TrialLimits, trial_dir: Path, pulse: Path) -> dict[str, Any]:
        return {
            "job": job_of(self._sources, config, self._workload, seed=self._seed_of(limits.data_draw)),
            "longest_of": limits.longest_of if self._sources.data else 0,
            "ds_config": deepspeed_config(
                config,
                self._workload,
                n_ranks=self._cluster.n_ranks,
                device=self._cluster.device,
                dimensions=self._dimensions,
            ),
            "longest_wait_s": self._longest_wait_s if self._sources.data else None,
            "device": self._cluster.device,
            "n_ranks": self._cluster.n_ranks,
            # torch's cap on each rank's GPU: what was there before is not the rank's to use.
            "cap_bytes": [limits.memory_bytes - n_bytes for n_bytes in self._baseline.held],
            "rendezvous": str(trial_dir / "rendezvous"),
            "pulse": str(pulse),
            "stacks": [str(file) for file in _stack_files(trial_dir, self._cluster.n_ranks)],
        }

    def _seed_of(self, draw: int) -> int:
        return (self._seed + draw * _DRAW_STRIDE) % 2**32  # users' random numbers take no larger ones

    def _environment(self, rank: int, port: int, trial_dir: Path) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self._cluster.n_ranks),
            "LOCAL_WORLD_SIZE": str(self._cluster.n_ranks),
            "MASTER_ADDR": "127.0.0.1",
            # Ranks meet through a file; DeepSpeed names shared memory by this.
            "MASTER_PORT": str(port),
            "TMPDIR": str(trial_dir / "tmp"),
        }


def _stack_files(trial_dir: Path, n_ranks: int) -> list[Path]:
    return [trial_dir / f"stack{rank}" for rank in range(n_ranks)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _shared_memory(port: int) -> str:
    """Segments that DeepSpeed leaves in /dev/shm when its ranks are killed; their names end in port and rank."""
    return f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_*_{port}_*"


def _tail(logs: list[Path]) -> str:
    lines: list[str] = []
    for log in logs:
        with contextlib.suppress(OSError):
            text = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
            lines += [f"[{log.stem.rpartition('.')[2]}] {line}" for line in text]
    return "\n".join(lines)
