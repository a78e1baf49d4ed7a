"""The studies' database is asked, and left as it is."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import optuna
import pytest

from bo_tuner.doctor.database import database
from bo_tuner.doctor.finding import Status


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_default_database_that_is_not_there_yet_is_fine_and_not_made(tmp_path: Path) -> None:
    found = database(None)
    assert found.status is Status.OK
    assert "not made yet" in found.found
    assert list(tmp_path.iterdir()) == []


def test_studies_are_counted(tmp_path: Path) -> None:
    (tmp_path / "bo_tuner_studies").mkdir()
    storage = optuna.storages.RDBStorage(f"sqlite:///{tmp_path}/bo_tuner_studies/studies.db")
    optuna.create_study(study_name="one", storage=storage)
    storage.engine.dispose()
    assert database(None).found.endswith("answers, 1 study")
    optuna.create_study(study_name="two", storage=storage)
    storage.engine.dispose()
    assert database(f"sqlite:///{tmp_path}/bo_tuner_studies/studies.db").found.endswith("answers, 2 studies")


def test_an_empty_database_gets_no_tables(tmp_path: Path) -> None:
    sqlite3.connect(tmp_path / "empty.db").close()
    (tmp_path / "empty.db").touch()
    assert "no studies yet" in database(f"sqlite:///{tmp_path}/empty.db").found
    assert (tmp_path / "empty.db").stat().st_size == 0


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("nonsense", "--storage must be a database URL"),
        ("sqlite:///file/studies.db", "must answer and take writes"),
        ("sqlite:///file", "file is not a database"),
        ("postgresql+psycopg://user:secret@127.0.0.1:1/none", "connection failed"),
    ],
)
def test_a_database_that_does_not_answer_is_a_problem_in_one_line(tmp_path: Path, url: str, text: str) -> None:
    (tmp_path / "file").write_text("not a database, and long enough to be looked at by the library " * 20)
    found = database(url)
    assert found.status is Status.FAIL
    assert text in found.found
    assert "\n" not in found.found
    assert "secret" not in found.found
    assert "mend the URL" in found.mend
