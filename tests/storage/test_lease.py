"""`Lease`: one process drives a study at a time, on one host and on several."""

from __future__ import annotations

import contextlib
import json
import os
import signal
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
from bo_tuner.outcome import Outcome, TrialResult
from bo_tuner.storage import Location, Manifest, StudyStore
from bo_tuner.storage.holder import LAPSES_AFTER_S, HolderWatch
from bo_tuner.storage.lease import Lease
from bo_tuner.storage.lease_row import LeaseRow

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


def overtake(store: StudyStore) -> None:
    """Another process takes the lease from its holder."""
    row = LeaseRow(store.location.open(), store.id)
    while not row.swap(row.read(), json.dumps({"id": "another", "host": "elsewhere", "pid": 4711, "number": 99})):
        pass


def has_lost(store: StudyStore) -> bool:
    try:
        store.check_lease()
    except StudyBusyError:
        return True
    return False


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _LONGEST_WAIT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def soon_lapsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bo_tuner.storage.holder.LAPSES_AFTER_S", 0.3)


@contextlib.contextmanager
def renewed_elsewhere(store: StudyStore, **changes: Any) -> Generator[None]:
    """A process that cannot be seen from here holds the study's lease, and renews it."""
    stop = threading.Event()
    write_entry(store, **changes)

    def renew() -> None:
        renewals = 0
        while not stop.wait(0.05):
            write_entry(store, renewals=(renewals := renewals + 1), **changes)

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.fixture
def renewed_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bo_tuner.storage.holder.RENEW_EVERY_S", 0.02)


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
    with store.drive(n_ranks=1):
        seen_from = entry(store)["seen_from"]
    write_entry(store, pid=os.getppid(), process_started=1.5, seen_from=seen_from)
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
        assert entry(store) == {"number": len(ids)}
    assert len(set(ids)) == 2


def test_the_driver_of_a_study_is_known_by_host_process_and_folder(store: StudyStore) -> None:
    assert store.driver() is None
    with store.drive(n_ranks=1):
        driver = store.driver()
    assert driver is not None
    assert (driver["host"], driver["pid"]) == (socket.gethostname(), os.getpid())
    assert Path(driver["folder"]) == store.folder
    assert store.driver() is None


@pytest.mark.usefixtures("soon_lapsed")
def test_a_driver_on_another_host_is_known_by_its_renewals(store: StudyStore) -> None:
    write_entry(store)
    assert StudyStore(store.location, "mine").driver() is None
    looker = StudyStore(store.location, "mine")
    with renewed_elsewhere(store):
        assert (looker.driver() or {})["host"] == "elsewhere"
    wait_for(lambda: looker.driver() is None)


def test_a_drive_that_raises_releases_the_lease(store: StudyStore) -> None:
    with pytest.raises(KeyboardInterrupt), store.drive(n_ranks=1):
        raise KeyboardInterrupt
    assert entry(store) == {"number": 1}
    assert "bo_tuner-lease" not in [thread.name for thread in threading.enumerate()]


# -- on several hosts ----------------------------------------------------------------------------------------------


SKEW_S = 25.0


@pytest.mark.usefixtures("soon_lapsed")
@pytest.mark.parametrize("skew_s", [-SKEW_S, 0.0, SKEW_S])
def test_a_holder_elsewhere_blocks_as_long_as_it_renews_whatever_its_clock_says(
    skew_s: float, store: StudyStore
) -> None:
    """Also in a container of this host, with a host name and process numbers that mean something else here."""
    changes = {
        "host": socket.gethostname(),
        "pid": 99_999_999,
        "seen_from": "this boot, another namespace",
        "renewed_at": time.time() + skew_s,
    }
    with renewed_elsewhere(store, **changes):
        with pytest.raises(StudyBusyError) as caught, store.drive(n_ranks=1):
            raise AssertionError("two drive")
        assert (caught.value.host, caught.value.pid) == (socket.gethostname(), 99_999_999)
        assert entry(store)["id"] == "another"


@pytest.mark.usefixtures("soon_lapsed")
@pytest.mark.parametrize("skew_s", [-SKEW_S, SKEW_S])
def test_a_holder_elsewhere_that_renews_no_more_is_followed_and_it_is_said_why_this_takes_time(
    skew_s: float, store: StudyStore, capsys: pytest.CaptureFixture[str]
) -> None:
    write_entry(store, renewed_at=time.time() + skew_s, number=6)
    with store.drive(n_ranks=1):
        assert entry(store)["host"] == socket.gethostname()
        assert entry(store)["number"] == 7
        store.check_lease()
    assert "last tuned by process 4711 on elsewhere, which cannot be seen from here" in capsys.readouterr().err


def test_a_driver_in_another_namespace_of_this_host_is_not_overtaken(
    store: StudyStore, storage_url: str, folder: Path, tmp_path: Path
) -> None:
    """Process numbers of a container mean other processes here, and none of its own."""
    inside = ["unshare", "--fork", "--pid", "--mount-proc"]
    if subprocess.run([*inside, "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("this user may not make a namespace of processes")
    command = [*inside, sys.executable, "-c", _DRIVE, storage_url, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "driving\n"
            elsewhere = StudyStore(Location(storage_url, folder=tmp_path / "other folder"), "mine")
            with pytest.raises(StudyBusyError), elsewhere.drive(n_ranks=1):
                raise AssertionError("two drive")
            elsewhere.location.open().engine.dispose()
        finally:
            process.kill()


@pytest.mark.usefixtures("soon_lapsed")
def test_a_refusal_frees_the_lock_of_this_host(store: StudyStore) -> None:
    with (
        renewed_elsewhere(store),
        pytest.raises(StudyBusyError),
        store.drive(n_ranks=1),
    ):
        raise AssertionError("two drive")
    with store.drive(n_ranks=1):
        store.check_lease()


# -- one who was taken for dead and comes back ---------------------------------------------------------------------

_DRIVE_AND_WRITE = """
import sys
from pathlib import Path
from bo_tuner.config import TrainConfig
from bo_tuner.errors import StudyBusyError
from bo_tuner.outcome import Outcome, TrialResult
from bo_tuner.space import distributions
from bo_tuner.storage import Location, StudyStore
config = TrainConfig()
store = StudyStore(Location(sys.argv[1], folder=Path(sys.argv[2])), "mine")
refused = 0
try:
    with store.drive(n_ranks=1):
        record = store.begin(config, distributions([config]))
        print("driving", flush=True)
        sys.stdin.readline()
        for write in (
            lambda: store.finish(record, TrialResult(outcome=Outcome.OOM)),
            lambda: store.add_attempt(record, TrialResult(outcome=Outcome.FAILED)),
            lambda: store.begin(config, distributions([config])),
            lambda: store.add_repeat(record, TrialResult(outcome=Outcome.OOM)),
            lambda: store.note_stop("1 trial", "done"),
            lambda: store.write_note(),
            lambda: store._save_spent(),
        ):
            try:
                write()
            except StudyBusyError:
                refused += 1
finally:
    print(refused, flush=True)
"""


def test_a_driver_that_was_stopped_and_overtaken_writes_nothing_any_more(
    store: StudyStore, storage_url: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-c", _DRIVE_AND_WRITE, storage_url, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stdout.readline() == "driving\n"
            os.kill(process.pid, signal.SIGSTOP)
            # As from another host: its process cannot be seen, and its lock file is another one.
            monkeypatch.setattr("bo_tuner.storage.holder._process_numbers", lambda: "elsewhere")
            monkeypatch.setattr("bo_tuner.storage.holder.LAPSES_AFTER_S", 0.3)
            successor = StudyStore(Location(storage_url, folder=tmp_path / "other folder"), "mine")
            with successor.drive(n_ranks=1, since=time.monotonic() - 1800):
                [record] = successor.settle()
                successor.add_attempt(record, TrialResult(outcome=Outcome.TIMEOUT))
                successor.check_lease()
                os.kill(process.pid, signal.SIGCONT)
                process.stdin.write("go on\n")
                process.stdin.flush()
                assert process.stdout.readline() == "7\n"
                successor.check_lease()
                [kept] = successor.records()
                assert kept.result is None
                assert [attempt.outcome for attempt in kept.attempts] == [Outcome.TIMEOUT]
            assert successor.spent().seconds >= 1800
            assert successor.last_stop()["reason"] == ""
            successor.location.open().engine.dispose()
        finally:
            process.kill()


@pytest.mark.parametrize("storage_url", ["postgresql"], indirect=True)
def test_the_lease_cannot_change_hands_between_the_look_at_it_and_the_write(
    store: StudyStore,
    storage_url: str,
    open_location: Callable[[str], Location],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A taker waits until the write is committed."""
    other = LeaseRow(open_location(storage_url).open(), store.id)
    order: list[str] = []
    look = Lease.check

    def take() -> None:
        is_taken = other.swap(other.read(), json.dumps({"number": 99, "id": "another"}))
        order.append(f"taken {is_taken}")

    taker = threading.Thread(target=take)

    def check(lease: Lease, found: Mapping[str, Any]) -> None:
        look(lease, found)
        if order == ["start"]:
            taker.start()
            time.sleep(0.5)
            order.append("written")

    monkeypatch.setattr(Lease, "check", check)
    monkeypatch.setattr("bo_tuner.storage.holder.RENEW_EVERY_S", 60.0)
    with store.drive(n_ranks=1):
        order.append("start")
        store.note_memory_limit(1)
        taker.join()
        assert order == ["start", "written", "taken True"]
        with pytest.raises(StudyBusyError):
            store.note_memory_limit(2)
    assert store.study.user_attrs["memory_limit_bytes"] == 1


@pytest.mark.usefixtures("renewed_often")
def test_of_two_that_take_a_study_at_the_same_time_one_is_refused(
    store: StudyStore, storage_url: str, tmp_path: Path, open_location: Callable[[str], Location]
) -> None:
    """Both have looked, and nobody held it, before either takes it."""
    both_looked = threading.Barrier(2, timeout=_LONGEST_WAIT_S)
    held = threading.Barrier(2, timeout=_LONGEST_WAIT_S)
    outcomes: list[str] = []

    def take(name: str) -> None:
        row = LeaseRow(open_location(storage_url).open(), store.id)
        slow = SlowRow(row, both_looked)
        lease = Lease(study_name="mine", lock_file=tmp_path / name / "lock", row=slow, on_renew=lambda: None)
        try:
            lease.acquire()
            outcomes.append("holds")
        except StudyBusyError:
            outcomes.append("refused")
        held.wait()
        lease.release()

    threads = [threading.Thread(target=take, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["holds", "refused"]


class SlowRow:
    """Waits between the first read and the first write until another one has read too."""

    def __init__(self, row: LeaseRow, meeting: threading.Barrier) -> None:
        self._row = row
        self._meeting: threading.Barrier | None = meeting

    def read(self) -> str | None:
        return self._row.read()

    def swap(self, old: str | None, new: str) -> bool:
        if self._meeting is not None:
            self._meeting.wait()
            self._meeting = None
        return self._row.swap(old, new)


@pytest.mark.usefixtures("renewed_often")
def test_a_held_lease_is_renewed(store: StudyStore) -> None:
    with store.drive(n_ranks=1):
        first = entry(store)
        wait_for(lambda: bool(entry(store)["renewed_at"] > first["renewed_at"]))
        renewed = {**entry(store), "renewed_at": first["renewed_at"], "renewals": first["renewals"]}
        assert renewed == first
        wait_for(lambda: store.study.user_attrs.get("spent", {}).get("seconds", 0.0) > 0)
        store.check_lease()


@pytest.mark.usefixtures("renewed_often")
def test_a_lease_that_another_took_over_is_noticed_and_left_to_it(
    store: StudyStore, storage_url: str, open_location: Callable[[str], Location]
) -> None:
    with store.drive(n_ranks=1):
        overtake(StudyStore(open_location(storage_url), "mine"))
        wait_for(lambda: has_lost(store))
        with pytest.raises(StudyBusyError) as caught:
            store.check_lease()
        assert (caught.value.host, caught.value.pid) == ("elsewhere", 4711)
    assert entry(store)["id"] == "another"


# -- the parts, with a dictionary for a storage -------------------------------------------------------------------


class FakeRow:
    """Holds one text; can be told to fail."""

    def __init__(self) -> None:
        self.text: str | None = None
        self.error: BaseException | None = None

    def read(self) -> str | None:
        if self.error is not None:
            raise self.error
        return self.text

    def swap(self, old: str | None, new: str) -> bool:
        is_same = self.read() == old
        if is_same:
            self.text = new
        return is_same


OTHER = json.dumps({"id": "another", "host": "elsewhere", "pid": 4711, "number": 9})


@pytest.fixture
def row() -> FakeRow:
    return FakeRow()


@pytest.fixture
def lease(row: FakeRow, tmp_path: Path) -> Iterator[Lease]:
    lease = Lease(study_name="mine", lock_file=tmp_path / "mine" / "lock", row=row, on_renew=lambda: None)
    yield lease
    row.error = None
    lease.release()


@pytest.mark.usefixtures("renewed_often")
def test_an_entry_that_another_took_and_released_means_the_lease_was_lost(lease: Lease, row: FakeRow) -> None:
    lease.acquire()
    row.text = json.dumps({"number": 2})
    wait_for(lambda: lease.lost is not None)
    assert isinstance(lease.lost, StudyBusyError)
    assert "was driven by another process meanwhile" in str(lease.lost)


@pytest.mark.usefixtures("renewed_often")
def test_a_storage_that_fails_a_renewal_is_told_to_the_driver(lease: Lease, row: FakeRow) -> None:
    lease.acquire()
    row.error = ConnectionError("gone")
    wait_for(lambda: lease.lost is row.error)


def test_a_release_leaves_the_entry_of_another_that_took_over(lease: Lease, row: FakeRow) -> None:
    lease.acquire()
    row.text = OTHER  # after a long sleep of this machine, before our next renewal
    lease.release()
    assert row.text == OTHER


def test_a_release_without_a_lease_changes_nothing(lease: Lease, row: FakeRow) -> None:
    row.text = OTHER
    lease.release()
    assert row.text == OTHER


def test_a_ctrl_c_while_the_lease_is_taken_leaves_nothing_held(lease: Lease, row: FakeRow, tmp_path: Path) -> None:
    class Interrupted(FakeRow):
        def swap(self, old: str | None, new: str) -> bool:
            row.swap(old, new)
            raise KeyboardInterrupt

    first = Lease(study_name="mine", lock_file=tmp_path / "mine" / "lock", row=Interrupted(), on_renew=lambda: None)
    with pytest.raises(KeyboardInterrupt):
        first.acquire()
    assert "id" in json.loads(row.text or ""), "the entry of this very process is still there"
    lease.acquire()
    assert json.loads(row.text or "")["number"] == 2


def test_the_lock_of_this_host_refuses_even_when_the_storage_has_no_entry(lease: Lease, tmp_path: Path) -> None:
    lease.acquire()
    other = FakeRow()
    second = Lease(study_name="mine", lock_file=tmp_path / "mine" / "lock", row=other, on_renew=lambda: None)
    with pytest.raises(StudyBusyError) as caught:
        second.acquire()
    assert caught.value.pid == os.getpid()
    assert other.text is None


def test_a_holder_is_waited_for_by_the_clock_of_the_one_who_looks() -> None:
    now = [0.0]
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    watch = HolderWatch(lambda: OTHER, clock=lambda: now[0], sleep=sleep)
    assert watch.look() == (OTHER, None)
    assert now[0] >= LAPSES_AFTER_S
    row = iter([OTHER, OTHER, f"{OTHER} ", f"{OTHER} "])
    watch = HolderWatch(lambda: next(row), clock=lambda: 0.0, sleep=lambda seconds: None)
    assert (watch.look()[1] or {})["host"] == "elsewhere"


def test_the_lock_file_names_the_holder(lease: Lease, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "lock").write_text("99999999 of an earlier holder", encoding="ascii")
    lease.acquire()
    assert (tmp_path / "mine" / "lock").read_text(encoding="ascii") == str(os.getpid())
