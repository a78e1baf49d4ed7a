"""The real command in a folder of its own, and one finished study that the tests of this folder read."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import select
import shutil
import signal
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from subprocess import PIPE, CompletedProcess, Popen, TimeoutExpired

import pyte
import pytest

from bo_tuner.cluster import Cluster
from bo_tuner.objectives.training import extensions, training_server


@pytest.fixture(scope="session", autouse=True)
def compiled_ops(cluster: Cluster) -> None:
    """What a machine compiles once is compiled before the first command, which is given less time than that may take."""
    if not extensions.is_cached():
        with training_server(cluster) as server:
            server.start()


@pytest.fixture(scope="session")
def program() -> str:
    """The installed command."""
    return str(Path(sys.executable).with_name("bo-tuner"))


class Commands:
    """Runs commands to their end, one at a time, in processes forked from one that has imported what they import."""

    def __init__(self, program: str, folder: Path) -> None:
        self._program = program
        self._output = [folder / "stdout", folder / "stderr"]
        self._server = Popen(
            [sys.executable, str(Path(__file__).with_name("commands.py"))], bufsize=0, stdin=PIPE, stdout=PIPE
        )

    def __call__(self, *arguments: str, cwd: Path, timeout_s: float = 500.0) -> CompletedProcess[str]:
        for file in self._output:
            file.write_bytes(b"")
        command = [self._program, *arguments]
        request = {
            "command": command,
            "folder": str(cwd),
            "environment": {**os.environ, "COLUMNS": "100"},
            "stdout": str(self._output[0]),
            "stderr": str(self._output[1]),
        }
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps(request).encode() + b"\n")
        pid = int(self._server.stdout.readline())
        is_late = not select.select([self._server.stdout], [], [], timeout_s)[0]
        if is_late:
            os.kill(pid, signal.SIGKILL)
        code = int(self._server.stdout.readline())
        if is_late:
            raise TimeoutExpired(command, timeout_s)
        stdout, stderr = (file.read_text(encoding="utf-8") for file in self._output)
        return CompletedProcess(command, code, stdout, stderr)

    def close(self) -> None:
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait()
        self._server.stdout.close()


@pytest.fixture(scope="session")
def run(program: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., CompletedProcess[str]]]:
    """`run(*arguments, cwd=...)` runs the command to its end, without the half second that importing it takes."""
    with contextlib.closing(Commands(program, tmp_path_factory.mktemp("commands"))) as run:
        yield run


@pytest.fixture(scope="session")
def small() -> list[str]:
    """Options that make a trial of bert-tiny take about a second, the first of them the default config."""
    return ["--device", "cpu", "--ranks", "2", "--seq-len", "16", "--max-global-batch", "8", "--sampler", "tpe"]


@pytest.fixture(scope="session")
def tune_command(small: list[str]) -> list[str]:
    """The arguments that made the shared study. So few steps end no trial early, which might run again, and be one more."""
    return ["tune", "bert-tiny", *small, "--max-steps", "4", "--budget", "3 trials", "--study", "shared"]


@pytest.fixture(scope="session")
def study_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Working folder of the shared study; tests only read it, and copy it to change it."""
    return tmp_path_factory.mktemp("shared") / "copy"


@pytest.fixture(scope="session")
def tuned(
    run: Callable[..., CompletedProcess[str]],
    tune_command: list[str],
    study_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    worker_id: str,
) -> CompletedProcess[str]:
    """The run that made the study `shared` in `study_folder`, and the folder `job` beside it; all workers copy what the first makes."""
    base = tmp_path_factory.getbasetemp()
    made = (base if worker_id == "master" else base.parent) / "tuned"
    made.mkdir(exist_ok=True)
    told = made / "told.json"
    with open(made / "lock", "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not told.exists():
            (made / "study").mkdir()
            ended = run(*tune_command, "--json", "--out", "job", cwd=made / "study")
            assert ended.returncode == 0, ended.stderr
            told.write_text(json.dumps([ended.args, ended.returncode, ended.stdout, ended.stderr]), encoding="utf-8")
    shutil.copytree(made / "study", study_folder)
    return CompletedProcess(*json.loads(told.read_text(encoding="utf-8")))


_OWN_TERMINAL = "import os, sys; os.open(os.ttyname(0), os.O_RDWR); os.execv(sys.argv[1], sys.argv[1:])"
"""The first terminal that the leader of a session opens is its own: Ctrl-C there reaches it."""


class Terminal:
    """A terminal of 80 by 24 with one command in it."""

    def __init__(self, command: list[str], *, cwd: Path, term: str = "xterm-256color") -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self._screen = pyte.HistoryScreen(80, 24, history=1000)
        self._stream = pyte.ByteStream(self._screen)
        self._lock = threading.Lock()
        self.raw = b""
        """All that the command wrote."""
        self.screens: list[str] = []
        """What was on the screen, whenever that changed."""
        self.process: Popen[bytes] = Popen(
            [sys.executable, "-c", _OWN_TERMINAL, *command],
            cwd=cwd,
            env={**{k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}, "TERM": term},
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._master, 65536)
            except OSError:  # Linux's way to say that nobody has it open any more
                return
            with self._lock:
                self.raw += data
                self._stream.feed(data)
                self.screens.append("\n".join(line.rstrip() for line in self._screen.display).rstrip())

    @property
    def has_cursor(self) -> bool:
        return not self._screen.cursor.hidden

    @property
    def text(self) -> str:
        """All that is left on it, with what scrolled off."""
        with self._lock:
            above = ["".join(line[column].data for column in range(80)) for line in self._screen.history.top]
            return "\n".join(line.rstrip() for line in [*above, *self._screen.display]).rstrip()

    def wait_for(self, words: str, *, timeout_s: float = 500.0) -> None:
        """Wait until `words` are on the screen."""
        deadline = time.monotonic() + timeout_s
        while words not in (self.screens[-1] if self.screens else ""):
            assert self.process.poll() is None, self.text
            assert time.monotonic() < deadline, self.text
            time.sleep(0.02)

    def type(self, keys: bytes) -> None:
        """As a user does."""
        os.write(self._master, keys)

    def wait(self, *, timeout_s: float = 500.0) -> int:
        """Wait for the end; returns the exit code."""
        code = self.process.wait(timeout_s)
        self._reader.join(timeout_s)
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reader.join()
        os.close(self._master)


@pytest.fixture(scope="session")
def terminal(program: str) -> Callable[..., AbstractContextManager[Terminal]]:
    """`terminal(*arguments, cwd=...)` runs the command in a terminal of its own."""

    @contextlib.contextmanager
    def terminal(*arguments: str, cwd: Path, term: str = "xterm-256color") -> Generator[Terminal]:
        opened = Terminal([program, *arguments], cwd=cwd, term=term)
        try:
            yield opened
        finally:
            opened.close()

    return terminal
