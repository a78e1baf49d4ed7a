"""The bench that all tests of the engine stand at."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine as Database
from sqlalchemy import event

from tests.engine.bench import Bench


@pytest.fixture(autouse=True, scope="module")
def the_disk_is_not_waited_for() -> Iterator[None]:
    """Nobody pulls the plug here, and a commit that reaches the disk costs 10 ms."""

    def on_connect(connection: Any, record: object) -> None:
        connection.execute("PRAGMA synchronous = OFF")

    event.listen(Database, "connect", on_connect)
    yield
    event.remove(Database, "connect", on_connect)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.close()
