"""`ForkServer`: the supervisor's side of the fork server."""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bo_tuner.errors import LaunchError
from bo_tuner.objectives.launch.channel import MAX_FDS, Channel
from bo_tuner.objectives.launch.last_words import last_words

__all__ = ["ForkServer", "RankGroup"]

_LONGEST_START_S = 600.0
"""Importing takes 5-10 s; compiling an op on a loaded machine takes minutes."""


class ForkServer:
    """Starts groups of ranks in 0.03 s each, from a process that has imported everything.

    Use it as a context manager: leaving it ends every rank, the server, and the private folder.
    """

    def __init__(self, *, preload: Sequence[str], prepare: str | None, environment: Mapping[str, str]) -> None:
        """Describe the server; `start` starts it.

        Args:
            preload: Modules to import before the first fork; none may touch a device.
            prepare: `module:function` to call after that, or None.
            environment: Variables of the server and all ranks, over the caller's own.
        """
        self._preload = list(preload)
        self._prepare = prepare
        self.environment = dict(environment)
        """May be added to until the server starts."""
        self._process: subprocess.Popen[bytes] | None = None
        self._control: Channel | None = None
        self._n_spawned = 0
        self.run_dir = Path(tempfile.mkdtemp(prefix="bo_tuner-"))
        """Private to this run (mode 0700), gone when it ends."""
        self._log = self.run_dir / "server.log"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def is_started(self) -> bool:
        """It has imported everything and waits for requests."""
        return self._process is not None

    def start(self) -> None:
        """Start the server and wait until it has imported everything; a started one is left as it is.

        Raises:
            LaunchError: It died, could not import, or took over ten minutes.
        """
        if self._process is not None:
            return
        ours, theirs = Channel.pair()
        fd = theirs.detach()
        command = [sys.executable, "-m", "bo_tuner.objectives.launch.server", str(fd), str(os.getpid())]
        # The package may be importable only through the caller's sys.path (an uninstalled checkout).
        search_path = os.pathsep.join(entry for entry in sys.path if entry)
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                [*command, str(self.run_dir)],
                env={**os.environ, "PYTHONPATH": search_path, **self.environment},
                pass_fds=[fd],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        os.close(fd)
        self._control = ours
        ours.send({"preload": self._preload, "prepare": self._prepare})
        message = self._answer(deadline=time.monotonic() + _LONGEST_START_S)
        if message["event"] != "ready":
            raise LaunchError(f"the training stack cannot be imported: {message['reason']}")
        if message["touched"]:
            warnings.warn(
                f"importing the training stack touched a GPU ({message['touched']}), so ranks start as fresh "
                "interpreters; each trial takes some seconds more",
                RuntimeWarning,
                stacklevel=2,
            )

    def launch(
        self,
        target: str,
        *,
        spec: Path,
        environments: Sequence[Mapping[str, str]],
        logs: Sequence[Path],
        leftovers: Sequence[str] = (),
    ) -> RankGroup:
        """Start one process per environment, in a process group of their own.

        Args:
            target: `module:function`, called as function(channel, rank, spec).
            spec: File that tells the ranks what to do.
            environments: Variables of each rank.
            logs: Where each rank prints to.
            leftovers: Patterns of files that killed ranks leave behind. The server removes them when the last rank is gone,
                also when this process is not there any more.

        Raises:
            LaunchError: The server is gone, or there are over 250 ranks.
        """
        if len(environments) > MAX_FDS:
            raise LaunchError(f"one machine runs at most {MAX_FDS} ranks; got {len(environments)}")
        self.start()
        assert self._control is not None
        self._n_spawned += 1
        trial = self._n_spawned
        pairs = [Channel.pair() for _ in environments]
        request = {
            "op": "spawn",
            "trial": trial,
            "target": target,
            "spec": str(spec),
            "environments": [dict(environment) for environment in environments],
            "logs": [str(log) for log in logs],
            "leftovers": list(leftovers),
        }
        try:
            self._control.send(request, [theirs.fileno() for _, theirs in pairs])
        except OSError as error:
            raise LaunchError(f"the process that starts ranks is gone{self._last_words()}") from error
        finally:
            for _, theirs in pairs:
                theirs.close()
        message = self._answer(deadline=time.monotonic() + 60.0)
        return RankGroup(self._control, trial, [ours for ours, _ in pairs], message["pids"])

    def _answer(self, *, deadline: float) -> dict[str, Any]:
        assert self._control is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            if not selector.select(max(deadline - time.monotonic(), 0.0)):
                raise LaunchError(f"the process that starts ranks does not answer{self._last_words()}")
        message = self._control.receive()
        if message is None:
            raise LaunchError(f"the process that starts ranks died{self._last_words()}")
        return message

    def _last_words(self) -> str:
        return last_words(self._log, longest=None)

    def close(self) -> None:
        """End every rank and the server; returns when they are gone. May be called twice."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            # Busy importing or compiling, it does not see the hang-up but takes a signal; its group holds the compilers.
            for sent, patience_s in ((None, 1.0), (signal.SIGTERM, 2.5), (signal.SIGKILL, None)):
                with contextlib.suppress(ProcessLookupError):
                    if sent is signal.SIGTERM:
                        self._process.terminate()
                    elif sent is signal.SIGKILL:
                        os.killpg(self._process.pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout=patience_s)
                    break
            self._process = None
        shutil.rmtree(self.run_dir, ignore_errors=True)


class RankGroup:
    """The ranks of one trial, as their supervisor sees them."""

    def __init__(self, control: Channel, trial: int, channels: list[Channel], pids: list[int]) -> None:
        self._control = control
        self._trial = trial
        self._channels = channels
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ, None)
        for rank, channel in enumerate(channels):
            self._selector.register(channel, selectors.EVENT_READ, rank)
        self.pids = pids
        """By rank."""
        self.exit_codes: dict[int, int] = {}
        """By rank, of those that ended; a negative one is the signal that ended it."""
        self.hung_up: set[int] = set()
        """Ranks whose channel is closed: they have ended, are about to, or cannot be heard any more."""

    def poll(self, timeout_s: float) -> list[tuple[int, dict[str, Any]]]:
        """Messages of ranks as (rank, message) that come within `timeout_s`; those of one moment come together.

        Raises:
            LaunchError: The fork server died.
        """
        messages: list[tuple[int, dict[str, Any]]] = []
        for key, _ in self._selector.select(timeout_s):
            if key.data is None:
                self._note_exit()
                continue
            message = self._channels[key.data].receive()
            if message is None:
                self._selector.unregister(key.fileobj)
                self.hung_up.add(key.data)
            else:
                messages.append((key.data, message))
        return messages

    def _note_exit(self) -> None:
        message = self._control.receive()
        if message is None:
            raise LaunchError("the process that starts ranks died")
        if message["event"] == "exited" and message["trial"] == self._trial:
            self.exit_codes[int(message["rank"])] = int(message["code"])

    @property
    def is_gone(self) -> bool:
        """Every rank has ended."""
        return len(self.exit_codes) == len(self.pids)

    def kill(self, *, patience_s: float = 30.0) -> None:
        """End all ranks and wait until the last one is gone.

        Raises:
            LaunchError: A rank outlives SIGKILL, as one does that hangs in a driver.
        """
        deadline = time.monotonic() + patience_s
        try:
            if not self.is_gone:
                self._control.send({"op": "kill", "trial": self._trial})
            while not self.is_gone:
                if time.monotonic() > deadline:
                    left = [pid for rank, pid in enumerate(self.pids) if rank not in self.exit_codes]
                    raise LaunchError(
                        f"processes {left} do not end when killed; the driver may hang: reboot or reset it"
                    )
                self.poll(0.05)
        except OSError as error:
            raise LaunchError("the process that starts ranks is gone") from error
        finally:
            self.close()

    def close(self) -> None:
        """Hang up on the ranks; `kill` does so too."""
        self._selector.close()
        for channel in self._channels:
            channel.close()
