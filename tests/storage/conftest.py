"""Databases and disks for the tests of the store: SQLite, a real PostgreSQL server, and a disk small enough to fill."""

from __future__ import annotations

import contextlib
import getpass
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bo_tuner.cluster import Cluster
from bo_tuner.outcome import Measurement, Outcome, TrialResult
from bo_tuner.space import SearchSpace
from bo_tuner.storage import Location, Manifest
from bo_tuner.workload import ModelSpec, Workload

_MIB = 2**20
_POSTGRES_STARTS_S = 30.0
_COMMAND_S = 60.0
_numbers = itertools.count()


class PostgresServer:
    """A PostgreSQL server of this test run alone, on a socket in its own folder."""

    def __init__(self, binaries: Path) -> None:
        self._binaries = binaries
        self._user = _unprivileged_user()
        self._folder = Path(tempfile.mkdtemp(prefix="bo_tuner-postgres-", dir="/tmp"))  # reachable by any user
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        if self._user is not None:
            shutil.chown(self._folder, self._user)
        self._folder.chmod(0o755)
        with open(self._folder / "log", "wb") as output:
            subprocess.run(
                [
                    self._binaries / "initdb",
                    "-D",
                    self._folder / "data",
                    "-U",
                    "tuner",
                    "-A",
                    "trust",
                    "--no-sync",
                    "-E",
                    "UTF8",
                ],
                check=True,
                user=self._user,
                cwd=self._folder,
                stdout=output,
                stderr=output,
            )
        self.go_on()

    def go_on(self) -> None:
        """Start it, or start it again after `halt`."""
        log = self._folder / "log"
        with open(log, "ab") as output:
            self._process = subprocess.Popen(
                [
                    self._binaries / "postgres",
                    "-D",
                    self._folder / "data",
                    "-k",
                    self._folder,
                    "-F",
                    "-c",
                    "listen_addresses=",
                ],
                user=self._user,
                cwd=self._folder,
                stdout=output,
                stderr=output,
            )
        deadline = time.monotonic() + _POSTGRES_STARTS_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"PostgreSQL did not start: {log.read_text(encoding='utf-8')}")
            time.sleep(0.05)

    def halt(self) -> None:
        """Shut it down, with all connections; its data stay."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)  # a fast shutdown
            self._process.wait()

    def stop(self) -> None:
        self.halt()
        shutil.rmtree(self._folder)

    def url(self, database: str = "postgres") -> str:
        return f"postgresql+psycopg://tuner@/{database}?host={self._folder}"

    def new_database(self) -> str:
        """The URL of an empty database."""
        name = f"studies{next(_numbers)}"
        subprocess.run(
            [self._binaries / "createdb", "-h", self._folder, "-U", "tuner", name], check=True, timeout=_COMMAND_S
        )
        return self.url(name)

    def _answers(self) -> bool:
        ready = [str(self._binaries / "pg_isready"), "-q", "-h", str(self._folder)]
        return subprocess.run(ready, check=False, timeout=_COMMAND_S).returncode == 0


class SmallDisk:
    """A file system of a few MiB in a mount namespace of its own, so that it goes away with its process."""

    def __init__(self, path: Path, *, size_bytes: int) -> None:
        """Mount it at `path`.

        Raises:
            OSError: This user may not mount anything.
        """
        is_root = os.geteuid() == 0
        self.path = path
        path.mkdir()
        self._holder = subprocess.Popen(
            ["unshare", "-m" if is_root else "-rm", "sh", "-c", _MOUNT, "sh", str(size_bytes), str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout is not None and self._holder.stderr is not None
        if self._holder.stdout.readline() != "mounted\n":
            why = self._holder.stderr.read().strip()
            self.close()
            raise OSError(why)
        enter = ["-m"] if is_root else ["-U", "--preserve-credentials", "-m"]
        self._enter = ["nsenter", "-t", str(self._holder.pid), *enter, "--"]

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command that sees the disk."""
        return subprocess.run([*self._enter, *command], check=False, capture_output=True, text=True, timeout=_COMMAND_S)

    def files(self) -> list[str]:
        """Names of all there is on it."""
        return sorted(self.run("find", str(self.path), "-mindepth", "1").stdout.splitlines())

    def close(self) -> None:
        self._holder.communicate()  # closes its stdin, which ends it


_MOUNT = 'mount -t tmpfs -o size="$1" tmpfs "$2" && echo mounted && exec cat >/dev/null'


def _unprivileged_user() -> str | None:
    """Whom the server runs as: PostgreSQL refuses to run as root. None for the user that runs the tests."""
    if os.geteuid() != 0:
        return None
    known = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in known else "nobody"


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A running PostgreSQL server."""
    yield from running_postgres()


def running_postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server of its own."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    on_path = shutil.which("postgres")
    if not found and on_path is None:
        pytest.skip("no PostgreSQL server is installed")
    server = PostgresServer(found[-1].parent if found else Path(str(on_path)).parent)
    try:
        server.start()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def postgres_url(postgres: PostgresServer) -> str:
    """`postgresql+psycopg://...` of a database that answers."""
    return postgres.url()


@pytest.fixture(params=["sqlite", "postgresql"])
def storage_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database, on each kind of server; other processes reach it too."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/fresh.db"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.new_database()


@pytest.fixture
def open_location(tmp_path: Path) -> Iterator[Callable[[str], Location]]:
    """Gives further locations, as further processes would have them; their connections are closed at the end."""
    opened: list[Location] = []

    def make(url: str) -> Location:
        opened.append(Location(url, folder=tmp_path / "studies"))
        return opened[-1]

    yield make
    for location in opened:
        location.open().engine.dispose()


@pytest.fixture
def location(storage_url: str, open_location: Callable[[str], Location]) -> Location:
    """A fresh location, on each kind of database."""
    return open_location(storage_url)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """A disk of 2 MiB."""
    try:
        disk = SmallDisk(tmp_path / "disk", size_bytes=2 * _MIB)
    except OSError as error:
        pytest.skip(f"{getpass.getuser()} may not mount a tmpfs, nor make a namespace to do it in: {error}")
    with contextlib.closing(disk):
        yield disk


@pytest.fixture(scope="session")
def manifest() -> Manifest:
    """Of a made-up model on a made-up machine."""
    return Manifest(
        workload=Workload(
            model=ModelSpec(name="toy", architecture={"model_type": "bert", "layers": [1, 2], "hidden_size": 64}),
            n_parameters=1_000_000,
            seq_len=32,
        ),
        cluster=Cluster(device="cpu", n_ranks=2, device_name="made up", memory_bytes=8 * 2**30),
        space=SearchSpace(zero_stages=(0, 1, 3), max_micro_batch=16, max_grad_accum=2),
        seed=5,
        versions={"torch": "2.13", "python": "3.11"},
    )


@pytest.fixture(scope="session")
def complete() -> TrialResult:
    """A trial of 40 samples/s that used half of its memory limit."""
    return TrialResult(
        outcome=Outcome.COMPLETE,
        measurement=Measurement(
            global_batch=8,
            seq_len=32,
            step_times_s=((0.2, 0.2), (0.1, 0.2)),
            engine_times_s=((0.1, 0.1), (0.1, 0.1)),
            peak_memory_bytes=(400 * _MIB, 512 * _MIB),
        ),
        peak_memory_bytes=512 * _MIB,
        limit_bytes=1024 * _MIB,
        wall_s=1.5,
        phases_s={"start": 1.0, "measure": 0.5},
    )


@pytest.fixture(scope="session")
def out_of_memory() -> TrialResult:
    """A trial that was refused 512 MiB when it held 1 GiB of 1 GiB."""
    return TrialResult(
        outcome=Outcome.OOM,
        reason="rank 1 was refused 512 MiB",
        peak_memory_bytes=1024 * _MIB,
        requested_bytes=512 * _MIB,
        limit_bytes=1024 * _MIB,
        wall_s=0.5,
        log_tail="torch.OutOfMemoryError: \x00\nwith an odd byte",
    )


@pytest.fixture(scope="session")
def failed(complete: TrialResult) -> TrialResult:
    """A trial that a sick machine ended."""
    return replace(complete, outcome=Outcome.FAILED, measurement=None, reason="rank 0 crashed", wall_s=0.25)
