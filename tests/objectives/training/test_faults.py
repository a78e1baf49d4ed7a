"""Every class of failure provoked for real, in two training ranks: the first failing rank decides, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from bo_tuner.cluster import Cluster
from bo_tuner.config import TrainConfig
from bo_tuner.doctor.leftovers import shared_segments
from bo_tuner.objectives import ignore_events
from bo_tuner.objectives.launch import ForkServer
from bo_tuner.outcome import Outcome, TrialLimits, TrialResult
from bo_tuner.workload import Workload
from tests.faults.fault import Fault, Kind, faulty_objective, plan

ROOMY = 4 * 2**30
SMALL = TrainConfig(micro_batch_size=2)
Run = Callable[..., TrialResult]


@pytest.fixture
def suffer(workload: Workload, cluster: Cluster, server: ForkServer, tmp_path: Path) -> Iterator[Run]:
    """`suffer(fault, ...)` runs a trial in which that happens."""

    def run(
        *faults: Fault, memory_bytes: int = ROOMY, least_silence_s: float = 60.0, max_steps: int = 5
    ) -> TrialResult:
        plan(server.run_dir, faults)
        objective = faulty_objective(workload, cluster, server, log_dir=tmp_path, least_silence_s=least_silence_s)
        limits = TrialLimits(memory_bytes=memory_bytes, max_steps=max_steps, deadline_s=240.0)
        return objective(SMALL, limits=limits, on_event=ignore_events)

    yield run
    plan(server.run_dir, [])


@pytest.mark.parametrize(
    ("rank", "kind", "outcome", "reason"),
    [
        (0, Kind.KILL, Outcome.FAILED, "rank {} was ended by SIGKILL"),
        (1, Kind.KILL, Outcome.FAILED, "rank {} was ended by SIGKILL"),
        (1, Kind.CRASH, Outcome.FAILED, "rank {} was ended by SIGSEGV"),
        (0, Kind.LEAVE, Outcome.FAILED, "rank {} ended with exit code 0 before it was done: its code calls exit"),
        (0, Kind.ERROR, Outcome.FAILED, "rank {}: LookupError in train: on purpose"),
        (1, Kind.ERROR, Outcome.FAILED, "rank {}: LookupError in train: on purpose"),
        (1, Kind.REFUSE, Outcome.OOM, "rank {}: the allocator refused a request of 1048576.00 GiB"),
        (0, Kind.DROP, Outcome.FAILED, "rank {} lost its connection to the supervisor and ended"),
        (1, Kind.DROP_AND_WAIT, Outcome.FAILED, "rank {} lost its connection to the supervisor and lives on"),
    ],
)
def test_the_rank_that_failed_first_decides(rank: int, kind: Kind, outcome: Outcome, reason: str, suffer: Run) -> None:
    result = suffer(Fault(kind=kind, rank=rank))
    assert result.outcome is outcome, result.reason
    assert result.reason.startswith(reason.format(rank)), result.reason
    assert result.measurement is None


def test_a_rank_that_is_held_up_completes(suffer: Run) -> None:
    result = suffer(Fault(kind=Kind.DELAY, seconds=0.7))
    assert result.outcome is Outcome.COMPLETE, result.reason


def test_a_compiler_at_work_is_a_sign_of_life_of_the_rank_that_waits_for_it(suffer: Run) -> None:
    result = suffer(Fault(kind=Kind.COMPILE, step=1, seconds=6.0), least_silence_s=3.0)
    assert result.outcome is Outcome.COMPLETE, result.reason


@pytest.mark.parametrize(
    ("kind", "where"),
    [(Kind.STOP, "it is stopped (SIGSTOP or a debugger)"), (Kind.HANG, "it is in never_return (tests/faults/rank.py:")],
)
def test_a_silent_rank_is_a_timeout_with_every_stack(kind: Kind, where: str, suffer: Run) -> None:
    result = suffer(Fault(kind=kind, rank=0), least_silence_s=3.0)
    assert result.outcome is Outcome.TIMEOUT, result.reason
    assert result.reason.startswith("rank 0 gave no sign of life for "), result.reason
    assert where in result.reason
    assert "[stack of rank1] it is in " in result.log_tail
    assert "[stack of rank1]   allreduce_gradients (deepspeed/runtime/engine.py:" in result.log_tail
    assert result.wall_s < 120


def test_memory_that_fills_up_meets_our_limit(suffer: Run) -> None:
    result = suffer(Fault(kind=Kind.FILL), memory_bytes=700 * 2**20)
    assert result.outcome is Outcome.GUARDED, result.reason
    assert "rank 1 used" in result.reason


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A control group that may hold 400 MiB."""
    limit = 400 * 2**20
    for parent, name in (("memory", "memory.limit_in_bytes"), ("", "memory.max")):
        group = Path("/sys/fs/cgroup") / parent / f"bo_tuner-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / name).write_text(str(limit), encoding="ascii")
            yield group
        except OSError:
            continue
        finally:
            while (group / "cgroup.procs").read_text(encoding="ascii"):
                time.sleep(0.05)
            group.rmdir()
        return
    pytest.skip("control groups with a memory limit cannot be made here")


def test_a_rank_that_the_kernel_kills_for_memory_is_told_from_one_that_somebody_kills(
    suffer: Run, memory_group: Path
) -> None:
    result = suffer(Fault(kind=Kind.FILL, group=str(memory_group)), memory_bytes=2**40)
    assert result.outcome is Outcome.HOST_OOM, result.reason
    assert result.reason == "the kernel killed rank 1: the machine is out of memory, or its control group is"
    killed = suffer(Fault(kind=Kind.KILL, group=str(memory_group)))
    assert killed.outcome is Outcome.FAILED, killed.reason
    assert "SIGKILL" in killed.reason


def footprint(server: ForkServer) -> dict[str, object]:
    """All that a trial could leave behind, of this process, the server, and everything that they started."""
    us = psutil.Process()
    family = [us, *us.children(recursive=True)]
    return {
        "processes": sorted(process.pid for process in family),
        "listening": sorted(
            connection.laddr.port
            for process in family
            for connection in process.net_connections()
            if connection.status == psutil.CONN_LISTEN
        ),
        "files of the run": sorted(path.name for path in server.run_dir.iterdir()),
        "open files here": us.num_fds(),
        "open files of the server": sum(child.num_fds() for child in us.children()),
        "maps here": sum("/trial-" in region.path for region in us.memory_maps()),
    }


def litter() -> set[str]:
    """Files that lie where those of others lie too, so that only new ones count: shared memory that nobody uses, temporary files."""
    segments: list[str] = shared_segments().details.get("segments", [])
    return {*segments, *(name for name in os.listdir(tempfile.gettempdir()) if name.startswith(("litter", "pymp")))}


def test_trials_leave_nothing_behind_however_they_end(suffer: Run, server: ForkServer) -> None:
    suffer()  # logs and caches of a first trial are there to stay
    before, litter_before = footprint(server), litter()
    share = [Fault(kind=Kind.SHARE, rank=rank, step=0) for rank in (0, 1)]
    ends = {
        "completed": (
            suffer(Fault(kind=Kind.MOVE, step=0), Fault(kind=Kind.LITTER, step=1), Fault(kind=Kind.DISOWN, step=1)),
            Outcome.COMPLETE,
        ),
        "was killed": (
            suffer(*share, Fault(kind=Kind.LITTER, step=1), Fault(kind=Kind.DISOWN, step=1), Fault(kind=Kind.KILL)),
            Outcome.FAILED,
        ),
        "crashed": (suffer(Fault(kind=Kind.LITTER, step=0), Fault(kind=Kind.CRASH)), Outcome.FAILED),
        "hung": (suffer(Fault(kind=Kind.DISOWN, step=1), Fault(kind=Kind.STOP), least_silence_s=3.0), Outcome.TIMEOUT),
        "ran out of memory": (suffer(Fault(kind=Kind.LITTER, step=1), Fault(kind=Kind.REFUSE)), Outcome.OOM),
    }
    for how, (result, expected) in ends.items():
        assert result.outcome is expected, f"{how}: {result.reason}"
    assert footprint(server) == before
    assert litter() - litter_before == set()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL, "only ranks dump their stacks"
