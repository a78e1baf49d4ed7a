"""`TrainingObjective`: runs a config as real training steps in a process group of its own, and watches it from outside."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bo_tuner.cluster import Cluster
from bo_tuner.config import TrainConfig
from bo_tuner.objectives.base import EventSink, TrialEvent
from bo_tuner.objectives.launch import ForkServer, RankGroup
from bo_tuner.objectives.memory import HostProbe, MemoryGuard
from bo_tuner.objectives.training import extensions
from bo_tuner.objectives.training.deepspeed_backend import deepspeed_config
from bo_tuner.objectives.training.failures import RankFailure, kernel_oom_kills, of_exit
from bo_tuner.objectives.training.rank import PRELOAD
from bo_tuner.objectives.training.stopping import RankStep, StoppingRule
from bo_tuner.outcome import Measurement, Outcome, TrialLimits, TrialResult
from bo_tuner.text import gib
from bo_tuner.workload import Workload

__all__ = ["TrainingObjective", "rank_environment", "training_server"]

_POLL_S = 0.04
"""Between two looks at memory: 25 Hz."""
_LOG_LINES = 40


def training_server(cluster: Cluster) -> ForkServer:
    """A fork server whose ranks can train on `cluster`; not started yet."""
    environment = {
        **rank_environment(cluster),
        # ninja stands beside the interpreter, whether or not the environment is activated.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        # A CUDA probe by torch before the fork would break CUDA in every child; this one asks NVML.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    server = ForkServer(preload=PRELOAD, prepare="bo_tuner.objectives.training.rank:prepare", environment=environment)
    server.environment["TORCH_EXTENSIONS_DIR"] = str(extensions.private_copy(server.run_dir))
    return server


def rank_environment(cluster: Cluster) -> dict[str, str]:
    """Variables that a training process needs on `cluster`, here and in the exported launch script."""
    if cluster.device == "cuda":
        # NVML, which the devices were chosen by, counts in this order.
        return {"DS_ACCELERATOR": "cuda", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": str(cluster.threads_per_rank), "GLOO_SOCKET_IFNAME": "lo"}


class TrainingObjective:
    """Real training steps under DeepSpeed. Implements `Objective`."""

    def __init__(
        self, workload: Workload, cluster: Cluster, server: ForkServer, *, log_dir: Path, seed: int = 0
    ) -> None:
        """Measure `workload` on `cluster` with ranks of `server`.

        Args:
            workload: What to train.
            cluster: On what.
            server: From `training_server`.
            log_dir: The ranks' output goes here, one file per trial and rank.
            seed: Of the synthetic data.
        """
        self._workload = workload
        self._cluster = cluster
        self._server = server
        self._log_dir = log_dir
        self._seed = seed
        self._n_trials = 0

    def __call__(self, config: TrainConfig, *, limits: TrialLimits, on_event: EventSink) -> TrialResult:
        """Run `config`; see `Objective`."""
        self._server.start()
        self._n_trials += 1
        trial_dir = self._server.run_dir / f"trial-{self._n_trials}"
        trial_dir.mkdir(mode=0o700)
        try:
            return self._run(config, limits, on_event, trial_dir)
        finally:
            shutil.rmtree(trial_dir, ignore_errors=True)

    def _run(self, config: TrainConfig, limits: TrialLimits, on_event: EventSink, trial_dir: Path) -> TrialResult:
        n_ranks = self._cluster.n_ranks
        extensions.remove_locks(Path(self._server.environment["TORCH_EXTENSIONS_DIR"]))
        self._log_dir.mkdir(parents=True, exist_ok=True)
        logs = [self._log_dir / f"{config.name}.rank{rank}.log" for rank in range(n_ranks)]
        for log in logs:
            log.unlink(missing_ok=True)
        spec = trial_dir / "spec.json"
        spec.write_text(json.dumps(self._spec(config, limits, trial_dir)), encoding="utf-8")
        port = _free_port()
        started = time.monotonic()
        group = self._server.launch(
            "bo_tuner.objectives.training.rank:run_rank",
            spec=spec,
            environments=[self._environment(rank, port) for rank in range(n_ranks)],
            logs=logs,
            leftovers=[_shared_memory(port)],
        )
        watch = _Watch(group, config, limits, on_event, cluster=self._cluster, started=started)
        try:
            watch.run()
        finally:
            ended = time.monotonic()
            group.kill()
        now = time.monotonic()
        return watch.result(
            seq_len=self._workload.seq_len, teardown_s=now - ended, wall_s=now - started, log_tail=_tail(logs)
        )

    def _spec(self, config: TrainConfig, limits: TrialLimits, trial_dir: Path) -> dict[str, Any]:
        return {
            "architecture": dict(self._workload.model.architecture),
            "ds_config": deepspeed_config(config, self._workload, n_ranks=self._cluster.n_ranks),
            "seq_len": self._workload.seq_len,
            "seed": self._seed,
            "device": self._cluster.device,
            "n_ranks": self._cluster.n_ranks,
            "limit_bytes": limits.memory_bytes,
            "rendezvous": str(trial_dir / "rendezvous"),
        }

    def _environment(self, rank: int, port: int) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self._cluster.n_ranks),
            "LOCAL_WORLD_SIZE": str(self._cluster.n_ranks),
            "MASTER_ADDR": "127.0.0.1",
            # Ranks meet through a file; DeepSpeed names shared memory by this.
            "MASTER_PORT": str(port),
        }


class _Watch:
    """One running trial: collects what the ranks say until it is measured, has failed, or must be stopped."""

    def __init__(
        self,
        group: RankGroup,
        config: TrainConfig,
        limits: TrialLimits,
        on_event: EventSink,
        *,
        cluster: Cluster,
        started: float,
    ) -> None:
        self._group = group
        self._config = config
        self._limits = limits
        self._on_event = on_event
        self._cluster = cluster
        self._started = started
        self._rule = StoppingRule(limits, n_ranks=cluster.n_ranks)
        self._baselines: dict[int, int] = {}
        self._guard = MemoryGuard(
            HostProbe(dict(enumerate(group.pids)), self._baselines), limit_bytes=limits.memory_bytes
        )
        self._peaks = dict.fromkeys(range(cluster.n_ranks), 0)
        self._is_loss_finite = True
        self._failure: RankFailure | None = None
        self._failed_at = float("inf")
        self._oom_kills_before = kernel_oom_kills()
        self._train_began: float | None = None
        self._warm_at: float | None = None
        self._ended = started

    def run(self) -> None:
        """Watch until the end."""
        deadline = self._started + self._limits.deadline_s
        self._tell()
        while self._failure is None and not self._rule.is_done:
            for rank, message in self._group.poll(_POLL_S):
                self._take(rank, message)
            if self._failure is None:
                self._check_exits()
            if self._failure is None and not self._rule.is_done:
                self._check_memory()
                if time.monotonic() > deadline:
                    self._time_out()
        self._ended = time.monotonic()

    def _take(self, rank: int, message: Mapping[str, Any]) -> None:
        match message["event"]:
            case "baseline":
                self._baselines[rank] = int(message["bytes"])
            case "phase":
                if message["phase"] == "train" and self._train_began is None:
                    self._train_began = time.monotonic()
            case "step":
                self._take_step(rank, message)
            case _:
                # The rank that fails first is the cause; what its peers meet in their collectives follows from it.
                if message["at"] < self._failed_at:
                    self._failed_at = message["at"]
                    self._failure = RankFailure(
                        outcome=Outcome(message["outcome"]),
                        reason=f"rank {rank}: {message['reason']}",
                        requested_bytes=message["requested_bytes"],
                    )

    def _take_step(self, rank: int, message: Mapping[str, Any]) -> None:
        before = self._rule.n_finished
        self._rule.add(rank, RankStep(total_s=message["total_s"], engine_s=message["engine_s"]))
        self._is_loss_finite &= bool(message["is_loss_finite"])
        self._peaks[rank] = max(self._peaks[rank], int(message["peak_bytes"]))
        if self._peaks[rank] > self._limits.memory_bytes and self._cluster.device == "cpu":
            self._stop_for_memory(rank, self._peaks[rank])
        if self._rule.is_warm and self._warm_at is None:
            self._warm_at = time.monotonic()
        if self._rule.n_finished > before:
            self._tell()

    def _check_exits(self) -> None:
        for rank, code in self._group.exit_codes.items():
            if self._failure is None:
                kills = kernel_oom_kills() - self._oom_kills_before
                self._failure = of_exit(code, rank=rank, n_oom_kills=kills)

    def _check_memory(self) -> None:
        if self._cluster.device != "cpu":
            return  # torch's allocator holds the cap in the ranks themselves
        breach = self._guard.breach()
        if breach is not None:
            self._stop_for_memory(breach.rank, breach.used_bytes)

    def _stop_for_memory(self, rank: int, used_bytes: int) -> None:
        self._failure = RankFailure(
            outcome=Outcome.GUARDED,
            reason=f"rank {rank} used {gib(used_bytes)}, over the limit of {gib(self._limits.memory_bytes)}",
        )

    def _time_out(self) -> None:
        doing = f"in step {self._rule.n_finished + 1}" if self._train_began else "before its first step"
        self._failure = RankFailure(
            outcome=Outcome.TIMEOUT,
            reason=f"not done after {self._limits.deadline_s:.0f} s, still {doing}; stacks are in the trial's log",
        )
        for pid in self._group.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)  # faulthandler writes the stack to the log
        time.sleep(0.3)

    def _tell(self) -> None:
        phase = "measure" if self._rule.is_warm else ("warmup" if self._train_began else "start")
        memory = max([*self._peaks.values(), self._guard.peak_bytes or 0]) or None
        self._on_event(
            TrialEvent(phase=phase, step=self._rule.n_finished, n_steps=self._limits.max_steps, memory_bytes=memory)
        )

    def result(self, *, seq_len: int, teardown_s: float, wall_s: float, log_tail: str) -> TrialResult:
        """The trial as it ended."""
        failure = self._failure
        peak = max([*self._peaks.values(), self._guard.peak_bytes or 0]) or None
        measurement = None
        if failure is None:
            measured = self._rule.measured()
            measurement = Measurement(
                global_batch=self._config.global_batch(self._cluster.n_ranks),
                seq_len=seq_len,
                step_times_s=tuple(tuple(step.total_s for step in row) for row in measured),
                engine_times_s=tuple(tuple(step.engine_s for step in row) for row in measured),
                peak_memory_bytes=tuple(self._peaks[rank] for rank in range(self._cluster.n_ranks)),
                is_loss_finite=self._is_loss_finite,
            )
        began, warm = self._train_began or self._ended, self._warm_at or self._ended
        return TrialResult(
            outcome=failure.outcome if failure else Outcome.COMPLETE,
            reason=failure.reason if failure else ("" if self._is_loss_finite else "the loss was not finite"),
            measurement=measurement,
            peak_memory_bytes=peak,
            requested_bytes=failure.requested_bytes if failure else None,
            limit_bytes=self._limits.memory_bytes,
            wall_s=wall_s,
            phases_s={
                "start": began - self._started,
                "warmup": warm - began,
                "measure": self._ended - warm,
                "teardown": teardown_s,
            },
            log_tail=log_tail if failure else "",
        )


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
