"""The fork server: a process that has imported everything, touched no device, and forks ranks on request.

Started as `python -m bo_tuner.objectives.launch.server CONTROL_FD PARENT_PID RUN_DIR`. It holds nothing that a trial could
spoil: every rank is a fresh child in its trial's own process group. When the supervisor goes, so do all ranks, this
process and the run's private folder. Where importing has touched a GPU it says so and starts fresh interpreters instead.
"""

from __future__ import annotations

import gc
import glob
import importlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from bo_tuner.objectives.launch.channel import MAX_FDS, Channel
from bo_tuner.objectives.launch.process import (
    adopt_orphans,
    die_first,
    die_with_parent,
    end_group,
    end_orphans,
    held_devices,
)

__all__ = ["main"]

_MOST_SWEEPS = 20
_BETWEEN_SWEEPS_S = 0.05


class _Server:
    def __init__(self, control: Channel, run_dir: Path) -> None:
        self._control = control
        self._run_dir = run_dir
        self._is_fresh = False
        self._children: dict[int, tuple[int, int]] = {}
        """pid -> (trial, rank)."""
        self._leaders: dict[int, int] = {}
        """trial -> process group."""
        self._leftovers: dict[int, list[str]] = {}
        """trial -> patterns of files that its ranks may leave behind."""
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> None:
        start = self._control.receive()
        if start is None:
            return
        gc.disable()  # importing makes next to no garbage, and looking for it takes a sixth of the time
        try:
            for name in start["preload"]:
                importlib.import_module(name)
            if start["prepare"] is not None:
                _resolve(start["prepare"])()
        except BaseException as error:  # noqa: BLE001  # importing a broken stack may raise anything
            traceback.print_exc()
            self._control.send({"event": "unfit", "reason": f"{type(error).__name__}: {error}"})
            return
        gc.freeze()  # what stays is not looked through again, here or in a rank, whose pages so remain shared
        gc.enable()
        reason = held_devices()
        self._is_fresh = reason is not None
        self._control.send({"event": "ready", "touched": reason})
        adopt_orphans()
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._serve()

    def _serve(self) -> None:
        while True:
            readable, _, _ = select.select([self._control.fileno(), self._wake_read], [], [])
            if self._wake_read in readable:
                os.read(self._wake_read, 4096)
                self._reap()
            if self._control.fileno() in readable:
                request, fds = self._control.receive_with_fds(MAX_FDS)
                if request is None:
                    return
                if request["op"] == "spawn":
                    self._spawn(request, fds)
                else:
                    self._kill(int(request["trial"]))

    def _spawn(self, request: Mapping[str, Any], fds: list[int]) -> None:
        trial = int(request["trial"])
        self._leftovers[trial] = request["leftovers"]
        pids: list[int] = []
        for rank, fd in enumerate(fds):
            start = self._start_fresh if self._is_fresh else self._fork
            pid = start(request, rank, fd, fds, pids[0] if pids else None)
            pids.append(pid)
            self._children[pid] = (trial, rank)
        self._leaders[trial] = pids[0]
        for fd in fds:
            os.close(fd)
        self._control.send({"event": "spawned", "trial": trial, "pids": pids})

    def _fork(self, request: Mapping[str, Any], rank: int, fd: int, fds: list[int], leader: int | None) -> int:
        server_pid = os.getpid()
        pid = os.fork()
        if pid:
            os.setpgid(pid, leader or pid)
            return pid
        code = 1
        try:
            os.setpgid(0, leader or 0)
            die_with_parent(server_pid, with_signal=signal.SIGKILL)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._control.close()
            for other in {*fds, self._wake_read, self._wake_write} - {fd}:
                os.close(other)
            log = os.open(request["logs"][rank], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ.update(request["environments"][rank])
            tempfile.tempdir = None  # found anew: the rank may have a folder of its own
            die_first()
            _resolve(request["target"])(Channel.from_fd(fd), rank, Path(request["spec"]))
            code = 0
        except BaseException:  # noqa: BLE001  # a forked child must never return into the server's loop
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _start_fresh(self, request: Mapping[str, Any], rank: int, fd: int, fds: list[int], leader: int | None) -> int:
        command = [sys.executable, "-m", "bo_tuner.objectives.launch.fresh", str(fd), str(os.getpid()), str(rank)]
        with open(request["logs"][rank], "ab") as log:
            process = subprocess.Popen(
                [*command, request["target"], request["spec"]],
                env={**os.environ, **request["environments"][rank]},
                pass_fds=[fd],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=leader or 0,
            )
        return process.pid

    def _kill(self, trial: int) -> None:
        leader = self._leaders.get(trial)
        if leader is None:
            return
        end_group(leader)
        for pid, (of_trial, _) in self._children.items():
            if of_trial == trial:  # its own code may have put it into another group; nobody else reaps it
                os.kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        while self._children:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid not in self._children:
                continue
            trial, rank = self._children.pop(pid)
            if all(other != trial for other, _ in self._children.values()):
                end_group(self._leaders.pop(trial))
                if not self._children:
                    end_orphans()  # what ranks started in groups of its own
                _remove(self._leftovers.pop(trial))
            code = os.waitstatus_to_exitcode(status)
            self._control.send({"event": "exited", "trial": trial, "rank": rank, "code": code})

    def on_terminate(self, signum: int, frame: FrameType | None) -> None:
        """The supervisor died, perhaps while we import or compile: take everything along."""
        self.clean_up()
        os.killpg(0, signal.SIGKILL)

    def clean_up(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a dead supervisor hangs up and signals: one is enough
        for leader in self._leaders.values():
            end_group(leader)
        end_orphans()
        for patterns in self._leftovers.values():
            _remove(patterns)
        for _ in range(_MOST_SWEEPS):  # a rank that is just being killed may still write there
            shutil.rmtree(self._run_dir, ignore_errors=True)
            if not self._run_dir.exists():
                break
            time.sleep(_BETWEEN_SWEEPS_S)


def _remove(patterns: list[str]) -> None:
    for pattern in patterns:
        for path in glob.glob(pattern):
            Path(path).unlink(missing_ok=True)


def _resolve(target: str) -> Callable[..., Any]:
    module, _, name = target.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def main(arguments: list[str]) -> None:
    """Serve until the supervisor hangs up."""
    control_fd, parent_pid, run_dir = arguments
    server = _Server(Channel.from_fd(int(control_fd)), Path(run_dir))
    signal.signal(signal.SIGTERM, server.on_terminate)
    die_with_parent(int(parent_pid), with_signal=signal.SIGTERM)
    try:
        server.run()
    except OSError:
        pass  # the supervisor is gone
    finally:
        server.clean_up()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # taking all of torch down in order would keep the supervisor waiting


if __name__ == "__main__":
    main(sys.argv[1:])
