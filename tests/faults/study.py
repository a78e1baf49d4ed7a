"""A study of short real trials in which faults happen, in a process that may die itself: `python -m tests.faults.study FOLDER [options]`.

At most one fault is drawn for a config, so that its second try succeeds; two configs run out of memory every time. What was
drawn is on disk before the trial begins. Says on stdout, as JSON, what the process held after its first trial and at its end.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from bo_tuner.budget import Budget
from bo_tuner.cluster import Cluster
from bo_tuner.config import TrainConfig
from bo_tuner.engine import Engine
from bo_tuner.objectives import EventSink, Objective
from bo_tuner.objectives.launch import ForkServer
from bo_tuner.objectives.training import training_server
from bo_tuner.open_candidates import OpenCandidates
from bo_tuner.outcome import TrialLimits, TrialResult
from bo_tuner.report import SilentProgress
from bo_tuner.samplers import make_sampler
from bo_tuner.space import SearchSpace
from bo_tuner.storage import Location, Manifest, StudyStore
from bo_tuner.trial import TrialRecord
from bo_tuner.workload import ModelSpec, Workload
from tests.faults.fault import Fault, Kind, faulty_objective, plan

__all__ = ["BEST", "GREEDY", "Soaked", "configs", "drive", "records", "soak"]

_STUDY = "soak"
_LIMIT_BYTES = 2**30
_LEAST_SILENCE_S = 2.0
_LONGEST_RUN_S = 3600.0
BEST = TrainConfig(micro_batch_size=16)
"""Several times as fast as any other of the first dozens."""
GREEDY = {
    TrainConfig.from_params({"recompute": True, "micro_batch_size": 2, "zero_stage": stage}): kind
    for stage, kind in ((0, Kind.REFUSE), (1, Kind.FILL))
}
"""Meets this every time. Nothing else has their layouts, which are ruled out by it."""
_PASSING = tuple(kind for kind in Kind if kind not in (Kind.SHARE, *GREEDY.values()))


def configs(n: int) -> list[TrainConfig]:
    """`n` different ones, the best and the greedy ones among them."""
    rest = [
        TrainConfig.from_params({"micro_batch_size": size, "grad_accum_steps": accum, "zero_stage": stage})
        for accum, size, stage in itertools.product(range(1, 33), range(1, 4), (0, 1, 2))
    ]
    return [*rest[: n - 1 - len(GREEDY)], *GREEDY, BEST]


class _Suffering:
    """An objective whose trials meet random faults, each config one at most."""

    def __init__(self, objective: Objective, run_dir: Path, folder: Path, *, seed: int, die_at: Sequence[int]) -> None:
        self._objective = objective
        self._run_dir = run_dir
        self._journal = folder / "faults"
        self._seed = seed
        self._die_at = die_at
        self.held: list[dict[str, int]] = []

    def __call__(self, config: TrainConfig, *, limits: TrialLimits, on_event: EventSink) -> TrialResult:
        drawn = self._journal.read_text(encoding="ascii").splitlines() if self._journal.exists() else []
        plan(self._run_dir, self._draw(config, drawn))
        with self._journal.open("a", encoding="ascii") as journal:
            journal.write(f"{config.name}\n")
        chance = random.Random(f"{self._seed} {len(drawn)}")
        death = threading.Timer(chance.uniform(0.1, 1.0), os.kill, (os.getpid(), signal.SIGKILL))
        death.daemon = True
        if len(drawn) + 1 in self._die_at:
            death.start()
        result = self._objective(config, limits=limits, on_event=on_event)
        if death.is_alive():
            death.join()  # it comes
        self.held.append(held())
        return result

    def _draw(self, config: TrainConfig, drawn: Sequence[str]) -> list[Fault]:
        chance = random.Random(f"{self._seed} {config.name}")
        if config in GREEDY:
            return [Fault(kind=GREEDY[config], rank=chance.randrange(2), step=chance.randrange(1, 4))]
        if config.name in drawn or chance.random() < 0.4:
            return []
        return [Fault(kind=chance.choice(_PASSING), rank=chance.randrange(2), step=chance.randrange(4))]


def held() -> dict[str, int]:
    """What this process and its children hold, apart from memory."""
    us = psutil.Process()
    children = us.children(recursive=True)
    return {
        "processes": len(children),
        "files": us.num_fds() + sum(child.num_fds() for child in children),
        "maps": sum("/trial-" in region.path for region in us.memory_maps()),
        "threads": us.num_threads(),
    }


def drive(
    folder: Path, server: ForkServer, cluster: Cluster, *, n: int, seed: int | None, die_at: Sequence[int] = ()
) -> list[dict[str, int]]:
    """Start the study or go on with it, to its end.

    Args:
        folder: Of the study.
        server: From `training_server`.
        cluster: Two CPU ranks.
        n: Configs.
        seed: Of the faults; None for no faults.
        die_at: At these trials, counted over all runs, this process ends by SIGKILL.

    Returns:
        What was held after every trial.
    """
    workload = Workload(model=ModelSpec.resolve("bert-tiny"), n_parameters=4_416_698, seq_len=16)
    space = SearchSpace(zero_stages=(0, 1, 2), max_micro_batch=16, max_grad_accum=64, recompute=(False, True))
    store = StudyStore(Location(folder=folder), _STUDY)
    if store.manifest() is None:
        store.create(Manifest(workload=workload, cluster=cluster, space=space, seed=0))
    objective: Objective = faulty_objective(
        workload, cluster, server, log_dir=store.folder / "logs", least_silence_s=_LEAST_SILENCE_S
    )
    suffering = None
    server.start()
    plan(server.run_dir, [])
    if seed is not None:
        objective = suffering = _Suffering(objective, server.run_dir, folder, seed=seed, die_at=die_at)
    candidates = OpenCandidates(
        configs(n), space=space, n_ranks=cluster.n_ranks, limit_bytes=_LIMIT_BYTES, longest_step_s=60.0
    )
    with store.drive(n_ranks=cluster.n_ranks):
        Engine(
            store=store,
            sampler=make_sampler("random", candidates, seed=0),
            candidates=candidates,
            objective=objective,
            budget=Budget(trials=n),
            limits=TrialLimits(memory_bytes=_LIMIT_BYTES, max_steps=5),
            n_ranks=cluster.n_ranks,
            progress=SilentProgress(),
            confirms=False,
        ).run()
    plan(server.run_dir, [])
    store.location.open().engine.dispose()
    return suffering.held if suffering is not None else []


def records(folder: Path) -> list[TrialRecord]:
    """The trials of a study, as stored."""
    store = StudyStore(Location(folder=folder), _STUDY)
    found = store.records()
    store.location.open().engine.dispose()
    return found


@dataclass(frozen=True, kw_only=True)
class Soaked:
    """A study that went through faults, and what it left behind on the machine."""

    records: list[TrialRecord]
    n_launches: int
    """Trials begun, those that a fault ended included."""
    n_deaths: int
    """Of the supervisor."""
    wall_s: float
    held: list[dict[str, int]]
    """After each trial of the last run."""
    processes: list[int]
    """That live on."""
    temporary: list[str]
    """Files and folders."""
    shared_memory: list[str]


def soak(folder: Path, *, n: int, seed: int, die_at: Sequence[int]) -> Soaked:
    """Drive the study to its end, in as many processes as it takes.

    Args:
        folder: Empty.
        n: Configs.
        seed: Of the faults.
        die_at: Trials at which the driving process dies.
    """
    temporary = folder / "tmp"
    temporary.mkdir()
    shared_before = set(os.listdir("/dev/shm"))
    command = [sys.executable, "-m", __name__, str(folder), "--trials", str(n), "--seed", str(seed)]
    began = time.monotonic()
    n_deaths = 0
    while True:
        ended = subprocess.run(
            [*command, "--die-at", *map(str, die_at)],
            # LOCAL_SIZE lets DeepSpeed reduce through shared memory, which it leaves behind when it is killed.
            env={**os.environ, "TMPDIR": str(temporary), "LOCAL_SIZE": "2"},
            capture_output=True,
            text=True,
            timeout=_LONGEST_RUN_S,
            check=False,
        )
        if ended.returncode != -signal.SIGKILL:
            break
        n_deaths += 1
    if ended.returncode != 0:
        raise RuntimeError(f"the study broke off: {ended.stderr}")
    wall_s = time.monotonic() - began
    _wait_for_ends(temporary)
    return Soaked(
        records=records(folder),
        n_launches=len((folder / "faults").read_text(encoding="ascii").splitlines()),
        n_deaths=n_deaths,
        wall_s=wall_s,
        held=json.loads(ended.stdout),
        processes=_processes_of(temporary),
        temporary=sorted(os.listdir(temporary)),
        shared_memory=sorted(name for name in set(os.listdir("/dev/shm")) - shared_before if "deepspeed" in name),
    )


def _wait_for_ends(temporary: Path) -> None:
    """A killed supervisor cannot wait for its own; the fork server takes a moment."""
    deadline = time.monotonic() + 60.0
    while (_processes_of(temporary) or os.listdir(temporary)) and time.monotonic() < deadline:
        time.sleep(0.1)


def _processes_of(temporary: Path) -> list[int]:
    """Processes that were given this folder for temporary files, or one inside."""
    found: list[int] = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR", "").startswith(str(temporary)):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--die-at", type=int, nargs="*", default=[])
    options = parser.parse_args()
    cluster = Cluster.detect(device="cpu", n_ranks=2)
    with training_server(cluster) as server:
        found = drive(options.folder, server, cluster, n=options.trials, seed=options.seed, die_at=options.die_at)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
