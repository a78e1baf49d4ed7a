"""A database server that goes away while a study is driven: it is waited for, nothing is lost, and nothing stays held."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bo_tuner.config import TrainConfig
from bo_tuner.errors import StoreError
from bo_tuner.outcome import TrialResult
from bo_tuner.space import distributions
from bo_tuner.storage import Location, Manifest, StudyStore
from tests.storage.conftest import PostgresServer, running_postgres

CONFIG = TrainConfig()
SPACE = distributions([CONFIG])


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """A server that these tests stop as they like."""
    yield from running_postgres()


@pytest.fixture
def store(server: PostgresServer, open_location: Callable[[str], Location], manifest: Manifest) -> StudyStore:
    store = StudyStore(open_location(server.new_database()), "mine")
    store.create(manifest)
    return store


def test_a_restart_is_waited_for_and_the_study_goes_on(
    store: StudyStore, server: PostgresServer, complete: TrialResult, capsys: pytest.CaptureFixture[str]
) -> None:
    with store.drive(n_ranks=1):
        record = store.begin(CONFIG, SPACE)
        server.halt()
        restart = threading.Timer(1.0, server.go_on)
        restart.start()
        store.finish(record, complete)
        restart.join()
        server.halt()  # also between two calls, when connections wait in the pool
        server.go_on()
        other = store.begin(CONFIG, SPACE)
        time.sleep(3.0)  # the lease is renewed meanwhile
        store.check_lease()
    told = capsys.readouterr().err
    assert set(told.splitlines()) == {
        "the storage does not answer: waiting for it, up to 5 min (Ctrl-C ends this run; the same command goes on with the study)",
        "the storage answers again",
    }
    assert [(kept.number, kept.result) for kept in store.records()] == [(0, complete), (other.number, None)]


def test_a_connection_that_breaks_within_a_write_has_it_written_once(
    store: StudyStore, complete: TrialResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sqlalchemy import event, text

    storage = store.location.open()
    broken: list[str] = []

    def breaks(connection: object, cursor: object, statement: str, *context: object) -> None:
        kind = statement.split()[0]
        if kind in ("INSERT", "UPDATE") and "trial" in statement and kind not in broken:
            broken.append(kind)
            with storage.engine.connect() as other:
                query = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid != pg_backend_pid() AND datname = current_database()"
                other.execute(text(query))

    with store.drive(n_ranks=1):
        event.listen(storage.engine, "before_cursor_execute", breaks)
        store.finish(store.begin(CONFIG, SPACE), complete)
        event.remove(storage.engine, "before_cursor_execute", breaks)
    assert broken == ["INSERT", "UPDATE"]
    assert [record.result for record in store.records()] == [complete]


def test_a_server_that_stays_away_ends_the_run_and_the_next_one_in_this_process_is_not_refused(
    store: StudyStore, server: PostgresServer, complete: TrialResult, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("bo_tuner.storage.patience.WAITS_S", 0.2)
    with pytest.raises(StoreError, match="must answer"), store.drive(n_ranks=1):
        record = store.begin(CONFIG, SPACE)
        server.halt()
        store.finish(record, complete)
    server.go_on()
    with store.drive(n_ranks=1):
        [unfinished] = store.settle()
        store.finish(unfinished, complete)
    assert [kept.result for kept in store.records()] == [complete]


def test_a_ctrl_c_while_the_server_is_away_does_not_wait_for_it(store: StudyStore, server: PostgresServer) -> None:
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt), store.drive(n_ranks=1), store.launches.counted(store.begin(CONFIG, SPACE)):
        server.halt()
        raise KeyboardInterrupt
    assert time.monotonic() - started < 60
    server.go_on()
    with store.drive(n_ranks=1):
        store.check_lease()
