"""Faults that tests and benchmarks put into ranks, and the objective that does so: the library itself knows nothing of them."""

from __future__ import annotations

import enum
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bo_tuner.cluster import Cluster
from bo_tuner.objectives.launch import ForkServer
from bo_tuner.objectives.training import TrainingObjective
from bo_tuner.workload import Workload

__all__ = ["Fault", "Kind", "faulty_objective", "plan", "planned"]


class Kind(enum.StrEnum):
    """What a rank suffers."""

    KILL = "kill"
    """SIGKILL, from nowhere."""
    CRASH = "crash"
    """SIGSEGV, by reading where nothing is."""
    LEAVE = "leave"
    """It ends without a word, with exit code 0."""
    MOVE = "move"
    """It makes a process group of its own, which a signal to the group of the ranks does not reach."""
    STOP = "stop"
    """SIGSTOP: it lives, and does nothing ever again."""
    HANG = "hang"
    """Its own code never returns."""
    COMPILE = "compile"
    """It waits for a child process that works for `seconds`."""
    DELAY = "delay"
    """It is held up for `seconds`."""
    ERROR = "error"
    """A Python error, while the others wait in a collective."""
    REFUSE = "refuse"
    """The allocator refuses a request, while the others wait in a collective."""
    FILL = "fill"
    """It takes ever more memory, 16 MiB at a time."""
    DROP = "drop"
    """It closes its connection to the supervisor, and goes on."""
    DROP_AND_WAIT = "drop_and_wait"
    """It closes its connection to the supervisor, and says nothing more."""
    DISOWN = "disown"
    """It starts a process in a session of its own, which outlives it."""
    LITTER = "litter"
    """It leaves a temporary file, and listens on a port."""
    SHARE = "share"
    """DeepSpeed reduces through shared memory, which killed ranks leave behind; for all ranks at step 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault: in the given rank, when it has made the given step and before it says so."""

    kind: Kind
    rank: int = 1
    step: int = 2
    """1 is the first; 0 is before the rank joins the others."""
    seconds: float = 0.5
    """For DELAY and COMPILE."""
    group: str | None = None
    """A control group with a memory limit (its folder); the rank enters it before it does anything."""


def planned(run_dir: Path) -> list[Fault]:
    """The faults of the trials that run now."""
    file = run_dir / "faults.json"
    rows: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    return [Fault(kind=Kind(row.pop("kind")), **row) for row in rows]


def plan(run_dir: Path, faults: Sequence[Fault]) -> None:
    """What happens in the trials of a fork server from now on.

    Args:
        run_dir: Of the server.
        faults: None is no fault.
    """
    (run_dir / "faults.json").write_text(json.dumps([asdict(fault) for fault in faults]), encoding="utf-8")


def faulty_objective(
    workload: Workload, cluster: Cluster, server: ForkServer, *, log_dir: Path, least_silence_s: float = 60.0
) -> TrainingObjective:
    """An objective whose ranks suffer what is planned."""
    return TrainingObjective(
        workload,
        cluster,
        server,
        log_dir=log_dir,
        least_silence_s=least_silence_s,
        rank="tests.faults.rank:run_faulty_rank",
    )
