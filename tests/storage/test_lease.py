"""`Lease`: one process drives a study at a time, on one host and on several."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from bo_tuner.errors import StudyBusyError
from bo_tuner.storage import Location, Manifest, StudyStore
from bo_tuner.storage.lease import LAPSES_AFTER_S, Lease

_LONGEST_WAIT_S = 10.0
_DRIVE = """
import sys
from pathlib import Path
from bo_tuner.storage import Location, StudyStore
with StudyStore(Location(sys.argv[1], folder=Path(sys.argv[2])), "mine").drive(n_ranks=1):
    print("driving", flush=True)
    sys.stdin.read()
"""
_TRY = """
import json, sys
from pathlib import Path
from bo_tuner.errors import StudyBusyError
from bo_tuner.storage import Location, StudyStore
try:
    with StudyStore(Location(sys.argv[1], folder=Path(sys.argv[2])), "mine").drive(n_ranks=1):
        print(json.dumps("driving"))
except StudyBusyError as error:
    print(json.dumps({"text": str(error), "host": error.host, "pid": error.pid}))
"""


@pytest.fixture
def store(location: Location, manifest: Manifest) -> StudyStore:
    store = StudyStore(location, "mine")
    store.create(manifest)
    return store


@pytest.fixture
def folder(store: StudyStore) -> Path:
    """Where this machine keeps its lock files."""
    return store.folder.parent


def attempt(url: str, folder: Path) -> Any:
    """What another process gets when it tries to drive the study: "driving", or a refusal."""
    command = [sys.executable, "-c", _TRY, url, str(folder)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, timeout=200).stdout)


@contextlib.contextmanager
def other_driver(url: str, folder: Path) -> Generator[subprocess.Popen[str]]:
    """Another process that drives the study until its stdin closes."""
    command = [sys.executable, "-c", _DRIVE, url, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "driving\n"
            yield process
        finally:
            process.kill()


def entry(store: StudyStore) -> Any:
    """The holder as the storage has it."""
    return store.study.user_attrs.get("lease")


def write_entry(store: StudyStore, **changes: Any) -> dict[str, Any]:
    """Another host's process takes the study."""
    holder = {
        "id": "another",
        "host": "elsewhere",
        "pid": 4711,
        "process_started": 1.5,
        "renewed_at": time.time(),
        **changes,
    }
    store.study.set_user_attr("lease", holder)
    return holder


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _LONGEST_WAIT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def renewed_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bo_tuner.storage.lease.RENEW_EVERY_S", 0.02)


# -- on this host --------------------------------------------------------------------------------------------------


def test_a_second_driver_is_refused_by_host_and_process(store: StudyStore, storage_url: str, folder: Path) -> None:
    with store.drive(n_ranks=1):
        refused = attempt(storage_url, folder)
    assert refused["host"] == socket.gethostname()
    assert refused["pid"] == os.getpid()
    assert refused["text"] == (
        f"study 'mine' is being tuned by process {os.getpid()} on {socket.gethostname()}: wait for it, stop it, "
        "or start another study with --study NAME"
    )
    assert attempt(storage_url, folder) == "driving"


def test_a_second_driver_with_another_folder_is_refused_and_leaves_the_holder_alone(
    store: StudyStore, storage_url: str, tmp_path: Path
) -> None:
    with store.drive(n_ranks=1):
        held = entry(store)
        refused = attempt(storage_url, tmp_path / "other folder")
        assert (refused["host"], refused["pid"]) == (socket.gethostname(), os.getpid())
        assert entry(store)["id"] == held["id"]
        store.check_lease()


def test_after_a_kill_the_next_driver_starts_at_once(store: StudyStore, storage_url: str, folder: Path) -> None:
    with other_driver(storage_url, folder) as process:
        with pytest.raises(StudyBusyError) as caught, store.drive(n_ranks=1):
            raise AssertionError("two drive")
        assert caught.value.pid == process.pid
        assert caught.value.host == socket.gethostname()
        process.kill()
        started = time.monotonic()
        wait_for(lambda: not psutil.pid_exists(process.pid) or process.poll() is not None)
        with store.drive(n_ranks=1):
            assert time.monotonic() - started < LAPSES_AFTER_S / 4
            assert entry(store)["pid"] == os.getpid()


def test_after_a_kill_a_driver_with_another_folder_starts_at_once(
    store: StudyStore, storage_url: str, tmp_path: Path
) -> None:
    with other_driver(storage_url, tmp_path / "other folder") as process:
        process.kill()
        process.wait()
        assert entry(store)["pid"] == process.pid
        with store.drive(n_ranks=1):
            assert entry(store)["pid"] == os.getpid()


def test_a_process_with_the_number_of_a_dead_driver_is_not_that_driver(store: StudyStore) -> None:
    write_entry(store, host=socket.gethostname(), pid=os.getpid(), process_started=1.5)
    with store.drive(n_ranks=1):
        assert entry(store)["process_started"] != 1.5


def test_the_same_name_in_another_database_is_another_study(
    store: StudyStore, manifest: Manifest, tmp_path: Path, open_location: Callable[[str], Location]
) -> None:
    other = StudyStore(open_location(f"sqlite:///{tmp_path}/other.db"), "mine")
    other.create(manifest)
    with store.drive(n_ranks=1), other.drive(n_ranks=1):
        assert entry(store)["id"] != entry(other)["id"]


def test_a_released_lease_leaves_no_entry_and_can_be_taken_again(store: StudyStore) -> None:
    ids: list[str] = []
    for _ in range(2):
        with store.drive(n_ranks=1):
            ids.append(entry(store)["id"])
        assert entry(store) is None
    assert len(set(ids)) == 2


def test_the_driver_of_a_study_is_known_by_host_process_and_folder(store: StudyStore) -> None:
    assert store.driver() is None
    with store.drive(n_ranks=1):
        driver = store.driver()
    assert driver is not None
    assert (driver["host"], driver["pid"]) == (socket.gethostname(), os.getpid())
    assert Path(driver["folder"]) == store.folder
    assert store.driver() is None


@pytest.mark.parametrize(("age_s", "is_driven"), [(LAPSES_AFTER_S / 2, True), (LAPSES_AFTER_S + 1, False)])
def test_a_driver_on_another_host_is_gone_when_its_lease_lapsed(
    store: StudyStore, age_s: float, is_driven: bool
) -> None:
    holder = write_entry(store, renewed_at=time.time() - age_s)
    assert store.driver() == (holder if is_driven else None)


def test_a_drive_that_raises_releases_the_lease(store: StudyStore) -> None:
    with pytest.raises(KeyboardInterrupt), store.drive(n_ranks=1):
        raise KeyboardInterrupt
    assert entry(store) is None
    assert "bo_tuner-lease" not in [thread.name for thread in threading.enumerate()]


# -- on several hosts ----------------------------------------------------------------------------------------------


def test_a_holder_on_another_host_blocks(store: StudyStore) -> None:
    holder = write_entry(store, renewed_at=time.time() - LAPSES_AFTER_S / 2)
    with pytest.raises(StudyBusyError) as caught, store.drive(n_ranks=1):
        raise AssertionError("two drive")
    assert (caught.value.host, caught.value.pid) == ("elsewhere", 4711)
    assert "process 4711 on elsewhere" in str(caught.value)
    assert entry(store) == holder


def test_a_holder_on_another_host_that_lapsed_is_followed(store: StudyStore) -> None:
    write_entry(store, renewed_at=time.time() - LAPSES_AFTER_S - 1)
    with store.drive(n_ranks=1):
        assert entry(store)["host"] == socket.gethostname()
        store.check_lease()


def test_a_refusal_frees_the_lock_of_this_host(store: StudyStore) -> None:
    write_entry(store)
    with pytest.raises(StudyBusyError), store.drive(n_ranks=1):
        raise AssertionError("two drive")
    write_entry(store, renewed_at=0.0)
    with store.drive(n_ranks=1):
        store.check_lease()


@pytest.mark.usefixtures("renewed_often")
def test_a_held_lease_is_renewed(store: StudyStore) -> None:
    with store.drive(n_ranks=1):
        first = entry(store)
        wait_for(lambda: bool(entry(store)["renewed_at"] > first["renewed_at"]))
        renewed = {**entry(store), "renewed_at": first["renewed_at"]}
        assert renewed == first
        wait_for(lambda: store.study.user_attrs.get("spent", {}).get("seconds", 0.0) > 0)
        store.check_lease()


@pytest.mark.usefixtures("renewed_often")
def test_a_lease_that_another_took_over_is_noticed_and_left_to_it(store: StudyStore) -> None:
    with store.drive(n_ranks=1):
        while entry(store)["id"] != "another":  # a renewal that is on its way overwrites the first try
            write_entry(store)
            time.sleep(0.1)
        with pytest.raises(StudyBusyError) as caught:
            store.check_lease()
        assert (caught.value.host, caught.value.pid) == ("elsewhere", 4711)
    assert entry(store)["id"] == "another"


# -- the parts, with a dictionary for a storage -------------------------------------------------------------------


class FakeStorage:
    """Holds one entry; can be told to fail, or to let another process write in between."""

    def __init__(self) -> None:
        self.entry: Mapping[str, Any] | None = None
        self.error: Exception | None = None
        self.overtaken_by: Mapping[str, Any] | None = None

    def read(self) -> Mapping[str, Any] | None:
        if self.error is not None:
            raise self.error
        return self.entry

    def write(self, entry: Mapping[str, Any] | None) -> None:
        self.entry = self.overtaken_by or entry


OTHER = {"id": "another", "host": "elsewhere", "pid": 4711, "process_started": 1.5, "renewed_at": 0.0}


@pytest.fixture
def storage() -> FakeStorage:
    return FakeStorage()


@pytest.fixture
def lease(storage: FakeStorage, tmp_path: Path) -> Iterator[Lease]:
    lease = Lease(
        study_name="mine",
        lock_file=tmp_path / "mine" / "lock",
        read=storage.read,
        write=storage.write,
        on_renew=lambda: None,
    )
    yield lease
    lease.release()


def test_of_two_that_write_at_the_same_time_the_last_one_holds_it(lease: Lease, storage: FakeStorage) -> None:
    storage.overtaken_by = OTHER
    with pytest.raises(StudyBusyError, match="process 4711 on elsewhere"):
        lease.acquire()
    assert storage.entry == OTHER


@pytest.mark.usefixtures("renewed_often")
def test_an_entry_that_another_took_and_released_means_the_lease_was_lost(lease: Lease, storage: FakeStorage) -> None:
    lease.acquire()
    deadline = time.monotonic() + 1.0
    while lease.lost is None and time.monotonic() < deadline:
        storage.entry = None
        time.sleep(0.03)
    assert isinstance(lease.lost, StudyBusyError)


@pytest.mark.usefixtures("renewed_often")
def test_a_storage_that_fails_a_renewal_is_told_to_the_driver(lease: Lease, storage: FakeStorage) -> None:
    lease.acquire()
    storage.error = ConnectionError("gone")
    wait_for(lambda: lease.lost is storage.error)


def test_a_release_leaves_the_entry_of_another_that_took_over(lease: Lease, storage: FakeStorage) -> None:
    lease.acquire()
    storage.entry = OTHER  # after a long sleep of this machine, before our next renewal
    lease.release()
    assert storage.entry == OTHER


def test_a_release_without_a_lease_changes_nothing(lease: Lease, storage: FakeStorage) -> None:
    storage.entry = OTHER
    lease.release()
    assert storage.entry == OTHER


def test_the_lock_of_this_host_refuses_even_when_the_storage_has_no_entry(lease: Lease, tmp_path: Path) -> None:
    lease.acquire()
    other = FakeStorage()
    second = Lease(
        study_name="mine",
        lock_file=tmp_path / "mine" / "lock",
        read=other.read,
        write=other.write,
        on_renew=lambda: None,
    )
    with pytest.raises(StudyBusyError) as caught:
        second.acquire()
    assert caught.value.pid == os.getpid()
    assert other.entry is None


def test_the_lock_file_names_the_holder(lease: Lease, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "lock").write_text("99999999 of an earlier holder", encoding="ascii")
    lease.acquire()
    assert (tmp_path / "mine" / "lock").read_text(encoding="ascii") == str(os.getpid())
