"""The kernel's count of kills is read in the group of the process, in both versions; the files are laid out as the kernel does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bo_tuner.objectives.training.oom_kills import OomKills, counter_of

PID = 77


class Machine:
    """A made-up /proc and /sys/fs/cgroup."""

    def __init__(self, folder: Path, *, cgroup: str, mounts: list[tuple[str, str, str, str]]) -> None:
        """`mounts` are (root, point, type, options)."""
        self.proc = folder / "proc"
        self.folder = folder
        (self.proc / str(PID)).mkdir(parents=True)
        (self.proc / "self").mkdir()
        (self.proc / str(PID) / "cgroup").write_text(cgroup)
        rows = [
            f"30 25 0:26 {root} {folder / point} rw,nosuid shared:9 - {kind} {kind} {options}\n"
            for root, point, kind, options in mounts
        ]
        (self.proc / "self" / "mountinfo").write_text("22 1 254:0 / / rw - ext4 /dev/root rw\n" + "".join(rows))

    def count(self, file: str, n_kills: int) -> None:
        path = self.folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        before = "oom 9\n" if path.name == "memory.events" else "oom_kill_disable 0\nunder_oom 0\n"
        path.write_text(f"{before}oom_kill {n_kills}\noom_group_kill 0\n")


V2 = ("/", "sys/cgroup", "cgroup2", "rw,nsdelegate")
V1 = ("/", "sys/cgroup/memory", "cgroup", "rw,memory")


@pytest.mark.parametrize(
    ("cgroup", "mount", "file"),
    [
        pytest.param("0::/user.slice/job\n", V2, "sys/cgroup/user.slice/job/memory.events", id="version 2"),
        pytest.param(
            "5:cpu,cpuacct:/elsewhere\n4:memory:/job\n0::/\n",
            V1,
            "sys/cgroup/memory/job/memory.oom_control",
            id="version 1",
        ),
        pytest.param(
            "4:memory:/docker/abc\n",
            ("/docker/abc", "sys/cgroup/memory", "cgroup", "rw,memory"),
            "sys/cgroup/memory/memory.oom_control",
            id="version 1 in a container that is mounted as the root",
        ),
        pytest.param(
            "4:memory:/docker/abc\n",
            V1,
            "sys/cgroup/memory/memory.oom_control",
            id="version 1 in a container with a name from outside",
        ),
    ],
)
def test_kills_are_counted_in_the_groups_own_file(
    tmp_path: Path, cgroup: str, mount: tuple[str, str, str, str], file: str
) -> None:
    machine = Machine(tmp_path, cgroup=cgroup, mounts=[mount])
    machine.count(file, 3)
    kills = OomKills(proc=machine.proc)
    kills.note(PID)
    assert kills.since() == 0
    machine.count(file, 5)
    kills.note(PID)  # again: nothing is forgotten
    assert kills.since() == 2


def test_the_machines_count_serves_where_the_group_has_none(tmp_path: Path) -> None:
    machine = Machine(tmp_path, cgroup="0::/\n", mounts=[V2])
    (machine.proc / "vmstat").write_text("pgfault 12\noom_kill 4\n")
    kills = OomKills(proc=machine.proc)
    kills.note(PID)
    (machine.proc / "vmstat").write_text("pgfault 99\noom_kill 5\n")
    assert kills.since() == 1


def test_a_process_that_is_gone_and_a_kernel_that_does_not_count_are_no_kills(tmp_path: Path) -> None:
    assert counter_of(1, proc=tmp_path) is None
    kills = OomKills(proc=tmp_path)
    kills.note(1)
    assert kills.since() == 0


def test_this_machine_counts_somewhere() -> None:
    kills = OomKills()
    kills.note(os.getpid())
    assert kills.since() == 0
