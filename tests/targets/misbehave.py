"""Rank targets for tests that do what a rank should not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bo_tuner.objectives.launch.channel import Channel


def sleep(channel: Channel, rank: int, spec: Path) -> None:
    """Say hello, then do nothing for ever."""
    channel.send({"event": "hello", "pid": os.getpid(), "rank": rank})
    time.sleep(3600)


def environment(channel: Channel, rank: int, spec: Path) -> None:
    """Tell what a rank sees, and end."""
    channel.send(
        {
            "mark": os.environ.get("MARK"),
            "group": os.getpgid(0),
            "spec": spec.read_text(encoding="utf-8"),
            "n_sockets": sum(
                "socket:" in os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if _is_open(entry)
            ),
        }
    )
    print(f"rank {rank} was here")


def _is_open(entry: os.DirEntry[str]) -> bool:
    try:
        os.readlink(entry.path)
    except OSError:
        return False
    return True


def raise_error(channel: Channel, rank: int, spec: Path) -> None:
    """Raise."""
    raise RuntimeError("on purpose")


def crash(channel: Channel, rank: int, spec: Path) -> None:
    """End by a segmentation fault."""
    os.kill(os.getpid(), signal.SIGSEGV)


def surroundings(channel: Channel, rank: int, spec: Path) -> None:
    """Tell what the kernel would kill, and where temporary files go."""
    channel.send(
        {
            "oom_score": Path("/proc/self/oom_score_adj").read_text(encoding="ascii").strip(),
            "temporary": tempfile.gettempdir(),
        }
    )
    time.sleep(3600)


def disown(channel: Channel, rank: int, spec: Path) -> None:
    """Start a process that a signal to the group does not reach, and tell which."""
    own = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
    channel.send({"pid": own.pid})
    time.sleep(3600)


def leave_group(channel: Channel, rank: int, spec: Path) -> None:
    """Rank 1 makes a process group of its own, rank 2 a session, each with a child; tell which, and go on."""
    if rank == 1:
        os.setpgrp()
    elif rank == 2:
        os.setsid()
    own = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    channel.send({"pid": own.pid})
    time.sleep(3600)


def hang_up(channel: Channel, rank: int, spec: Path) -> None:
    """Rank 0 closes its channel and lives on."""
    if rank == 0:
        channel.close()
    time.sleep(3600)


def meet_alone(channel: Channel, rank: int, spec: Path) -> None:
    """Rank 0 joins the doctor's group; no other rank comes."""
    from bo_tuner.doctor.ranks import join_and_reduce

    if rank == 0:
        join_and_reduce(channel, rank, spec)
    time.sleep(3600)


def meet_and_leave(channel: Channel, rank: int, spec: Path) -> None:
    """Say that the group is formed, then fail."""
    channel.send({"event": "formed", "seconds": 0.1})
    time.sleep(0.5)
    raise RuntimeError("on purpose")


def exchange_but_with_two(channel: Channel, rank: int, spec: Path) -> None:
    """Exchange in pairs, but for ranks 0 and 2, which hang once they have begun."""
    import json

    from bo_tuner.doctor.ranks import exchange_in_pairs

    told = json.loads(spec.read_text(encoding="utf-8"))
    if rank in (0, 2) and [0, 2] in [pair for pairs in told["rounds"] for pair in pairs]:
        channel.send({"event": "begun", "pair": [0, 2]})
        time.sleep(3600)
    exchange_in_pairs(channel, rank, spec)
