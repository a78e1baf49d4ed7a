"""A rank that suffers what is planned for it, and is a usual one otherwise."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bo_tuner.objectives.launch.channel import Channel
from bo_tuner.objectives.training.rank import run_rank
from tests.faults.fault import Fault, Kind, planned

__all__ = ["run_faulty_rank"]

_WORK = "import time; end = time.monotonic() + {}\nwhile time.monotonic() < end: pass"
_kept: list[object] = []
"""Memory that is filled, ports that are open."""


def run_faulty_rank(channel: Channel, rank: int, spec_file: Path) -> None:
    """Run one rank; the faults are those of the run's folder, in which the trial's folder lies."""
    faults = [fault for fault in planned(spec_file.parent.parent) if fault.rank == rank]
    for fault in faults:
        if fault.group is not None:
            (Path(fault.group) / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
    faulty = _FaultyChannel(channel.detach(), faults)
    for fault in faults:
        if fault.step == 0:
            faulty.suffer(fault)
    run_rank(faulty, rank, spec_file)


class _FaultyChannel(Channel):
    """A step's message is where a fault is met: after the step, and before the next collective."""

    def __init__(self, fd: int, faults: Sequence[Fault]) -> None:
        super().__init__(socket.socket(fileno=fd))
        self._faults = faults

    def send(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        for fault in self._faults:
            if message["event"] == "step" and message["step"] == fault.step:
                self.suffer(fault)
        super().send(message, fds)

    def suffer(self, fault: Fault) -> None:
        match fault.kind:
            case Kind.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case Kind.CRASH:
                ctypes.string_at(0)
            case Kind.LEAVE:
                os._exit(0)
            case Kind.MOVE:
                os.setpgrp()
            case Kind.STOP:
                os.kill(os.getpid(), signal.SIGSTOP)
            case Kind.HANG:
                never_return()
            case Kind.COMPILE:
                subprocess.run([sys.executable, "-c", _WORK.format(fault.seconds)], check=True)
            case Kind.DELAY:
                time.sleep(fault.seconds)
            case Kind.ERROR:
                raise LookupError("on purpose")
            case Kind.REFUSE:
                import torch

                torch.empty(2**50, dtype=torch.uint8)
            case Kind.FILL:
                while True:
                    _kept.append(bytearray(os.urandom(1) * 2**24))
                    time.sleep(0.001)
            case Kind.DROP:
                self.close()
            case Kind.DROP_AND_WAIT:
                self.close()
                never_return()
            case Kind.DISOWN:
                subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
            case Kind.SHARE:
                os.environ["LOCAL_SIZE"] = os.environ["LOCAL_WORLD_SIZE"]
            case Kind.LITTER:
                tempfile.mkstemp(prefix="litter")
                listener = socket.create_server(("127.0.0.1", 0))
                _kept.append(listener)


def never_return() -> None:
    """Stand here; the stack shows it."""
    while True:
        time.sleep(3600)
