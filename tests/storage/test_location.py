"""`Location`: where studies lie, what is written when, and what is said when a database does not answer."""

from __future__ import annotations

import gc
import hashlib
import os
import socket
import sqlite3
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bo_tuner.cli.tune import command_to_go_on
from bo_tuner.errors import BoTunerError, ConfigError, StoreError
from bo_tuner.storage import Location, study_names

if TYPE_CHECKING:
    from tests.storage.conftest import SmallDisk

_LONGEST_FILE_NAME = 255
_OPEN = """
import sys
from pathlib import Path
from bo_tuner.errors import BoTunerError
from bo_tuner.storage import Location
try:
    Location(folder=Path(sys.argv[1])).open()
except BoTunerError as error:
    print(f"{type(error).__name__}: {error}")
"""


def refusal(url: str, folder: Path) -> BoTunerError:
    """What opening `url` raises; it must fit on one line."""
    with pytest.raises(BoTunerError) as caught:
        Location(url, folder=folder).open()
    assert len(str(caught.value).splitlines()) == 1
    return caught.value


def closed_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def test_studies_lie_in_a_folder_beside_the_user_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    location = Location()
    location.open().engine.dispose()
    assert location.is_default
    assert location.study_folder("mine") == tmp_path / "bo_tuner_studies" / "mine"
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == [
        "bo_tuner_studies",
        "bo_tuner_studies/studies.db",
    ]


def test_nothing_is_written_before_a_location_is_opened(tmp_path: Path) -> None:
    location = Location(folder=tmp_path / "new")
    assert not location.holds_anything
    assert study_names(location) == []
    location.study_folder("mine")
    assert list(tmp_path.iterdir()) == []


def test_an_opened_location_holds_something(location: Location) -> None:
    location.open()
    assert location.holds_anything
    assert study_names(location) == []


def test_a_location_is_opened_once(location: Location) -> None:
    assert location.open() is location.open()


def test_a_given_url_is_not_the_default(tmp_path: Path) -> None:
    location = Location(f"sqlite:///{tmp_path}/x.db", folder=tmp_path)
    assert not location.is_default
    assert location.shown_url == f"sqlite:///{tmp_path}/x.db"


def test_a_password_is_not_shown(tmp_path: Path) -> None:
    location = Location(f"postgresql+psycopg://user:secret@127.0.0.1:{closed_port()}/studies", folder=tmp_path)
    assert "secret" not in location.shown_url
    assert "user" in location.shown_url
    with pytest.raises(StoreError) as caught:
        location.open()
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        pytest.param("studies.db", id="a file's name"),
        pytest.param("", id="nothing"),
        pytest.param("postgresq://user@host/name", id="a database that is unknown"),
    ],
)
def test_a_url_that_cannot_be_read_is_refused_in_one_line(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Location(url, folder=tmp_path)
    text = str(caught.value)
    assert text.startswith("--storage must be a database URL")
    assert repr(url) in text
    assert len(text.splitlines()) == 1


def test_a_url_that_cannot_be_read_does_not_show_its_password(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Location("postgresq://user:secret@host/name", folder=tmp_path)
    assert "secret" not in str(caught.value)


def test_a_server_that_does_not_answer_is_told_in_one_line(tmp_path: Path) -> None:
    port = closed_port()
    error = refusal(f"postgresql+psycopg://user@127.0.0.1:{port}/studies", tmp_path / "new")
    assert isinstance(error, StoreError)
    assert f"postgresql+psycopg://user@127.0.0.1:{port}/studies must answer" in str(error)
    assert "Connection refused" in str(error)
    assert "run the same command again" in str(error)
    assert list(tmp_path.iterdir()) == []


def test_a_database_that_is_not_there_is_told_in_one_line(postgres_url: str, tmp_path: Path) -> None:
    error = refusal(postgres_url.replace("/postgres?", "/nowhere?"), tmp_path)
    assert isinstance(error, StoreError)
    assert '"nowhere" does not exist' in str(error)


def test_a_plain_postgresql_url_finds_the_driver_that_our_extra_installs(tmp_path: Path) -> None:
    error = refusal(f"postgresql://user@127.0.0.1:{closed_port()}/studies", tmp_path)
    assert isinstance(error, StoreError), error


def test_a_driver_that_is_not_installed_is_named(tmp_path: Path) -> None:
    error = refusal("postgresql+asyncpg://user:secret@127.0.0.1/name", tmp_path)
    assert isinstance(error, ConfigError)
    assert "needs a driver that is not installed" in str(error)
    assert "No module named 'asyncpg'" in str(error)
    assert "secret" not in str(error)


def test_a_missing_sqlite_driver_leaves_no_folder(tmp_path: Path) -> None:
    error = refusal(f"sqlite+pysqlcipher:///{tmp_path}/new/x.db", tmp_path)
    assert "needs a driver that is not installed" in str(error)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_database_is_refused_and_kept(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("not a database, and longer than the header of one" * 10, encoding="ascii")
    error = refusal(f"sqlite:///{file}", tmp_path)
    assert isinstance(error, StoreError)
    assert "file is not a database" in str(error)
    assert file.read_text(encoding="ascii").startswith("not a database")


# Optuna gives up inside its constructor and leaves the connection to the garbage collector, of which Python 3.13 warns.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_database_of_another_optuna_is_refused_in_one_line(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/old.db"
    Location(url, folder=tmp_path).open().engine.dispose()
    with sqlite3.connect(tmp_path / "old.db") as database:
        database.execute("UPDATE alembic_version SET version_num = 'v0.9.0.a'")
    database.close()
    assert isinstance(refusal(url, tmp_path), StoreError)
    gc.collect()


def test_a_folder_that_cannot_be_made_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way", encoding="ascii")
    location = Location(folder=tmp_path / "file" / "studies")
    with pytest.raises(StoreError) as caught:
        location.open()
    assert len(str(caught.value).splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_that_cannot_be_written_is_a_store_error_and_stays_empty(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    folder = tmp_path / "read-only"
    folder.mkdir(mode=0o555)
    assert isinstance(refusal(f"sqlite:///{folder}/studies.db", folder), StoreError)
    assert list(folder.iterdir()) == []


def test_a_full_disk_is_told_in_one_line(small_disk: SmallDisk) -> None:
    small_disk.run("sh", "-c", f"cat /dev/zero > {small_disk.path}/ballast")
    told = small_disk.run(sys.executable, "-c", _OPEN, f"{small_disk.path}/studies")
    assert told.stderr == ""
    assert told.stdout.startswith("StoreError: the storage sqlite:///")
    assert "full" in told.stdout
    assert len(told.stdout.splitlines()) == 1


@pytest.mark.parametrize("folder", ["studies", "several/folders/deep"])
def test_a_full_disk_is_left_as_it_was(small_disk: SmallDisk, folder: str) -> None:
    small_disk.run("sh", "-c", f"cat /dev/zero > {small_disk.path}/ballast")
    told = small_disk.run(sys.executable, "-c", _OPEN, f"{small_disk.path}/{folder}")
    assert "StoreError" in told.stdout
    assert small_disk.files() == [f"{small_disk.path}/ballast"]


def test_a_full_disk_does_not_take_a_folder_that_was_there(small_disk: SmallDisk) -> None:
    small_disk.run("mkdir", f"{small_disk.path}/studies")
    small_disk.run("sh", "-c", f"cat /dev/zero > {small_disk.path}/ballast")
    told = small_disk.run(sys.executable, "-c", _OPEN, f"{small_disk.path}/studies")
    assert "StoreError" in told.stdout
    assert small_disk.files() == [f"{small_disk.path}/ballast", f"{small_disk.path}/studies"]


@pytest.mark.parametrize(
    "name", ["..", ".", "", "/etc", "../../x", "a/b", "nul\x00", "~", "日本 語", "-", "a\nb", ".git"]
)
def test_the_folder_of_an_odd_name_is_one_folder_inside_ours(name: str, tmp_path: Path) -> None:
    folder = Location(folder=tmp_path).study_folder(name)
    folder.mkdir()
    assert folder.resolve().parent == tmp_path.resolve()
    assert not folder.name.startswith(".")


def test_the_folder_of_a_plain_name_is_that_name(tmp_path: Path) -> None:
    assert Location(folder=tmp_path).study_folder("gpt2_seq1024-v1.5+x") == tmp_path / "gpt2_seq1024-v1.5+x"


def test_the_folder_of_a_long_name_can_be_made(tmp_path: Path) -> None:
    folder = Location(folder=tmp_path).study_folder("é" * 300)
    assert len(os.fsencode(folder.name)) <= _LONGEST_FILE_NAME
    folder.mkdir()


def test_names_that_differ_in_odd_characters_only_have_different_folders(tmp_path: Path) -> None:
    location = Location(folder=tmp_path)
    assert len({location.study_folder(name) for name in ("a/b", "a b", "a_b", ".a_b")}) == 4


def test_two_locations_on_one_database_see_the_same_studies(
    storage_url: str, open_location: Callable[[str], Location]
) -> None:
    import optuna

    first, second = open_location(storage_url), open_location(storage_url)
    for name in ("one", "two"):
        optuna.create_study(study_name=name, storage=first.open())
    assert study_names(second) == ["one", "two"]


# -- passwords -----------------------------------------------------------------------------------------------------

SECRETS = [
    "postgres://u:sec/ret@h",
    "postgresql://u:sec:ret@h/name",
    "postgresql://u:sec@ret@h/name",
    "postgresql://u:sec@ret:w@h/name",
    "postgresql://u@h:sec-ret/name",
    "postgresql://u:sec-ret@h:port/name",
    "postgresql://h/name?user=u&password=sec-ret",
    "postgresql://h/name?sslpassword=sec-ret&host=/socket",
    "postgresq://u:sec-ret@h/name?passwd=sec-ret",
    "mysql+nothing://u:sec-ret@h/name",
    "u:sec-ret@h/name",
    "password=sec-ret host=h",
    "sqlite:///x.db?uri=true&password=sec-ret",
]


@pytest.mark.parametrize("url", SECRETS)
def test_no_part_of_a_password_is_shown_however_the_url_is_written(url: str, tmp_path: Path) -> None:
    try:
        told = Location(url, folder=tmp_path).shown_url
    except ConfigError as error:
        told = "".join(traceback.format_exception(error))
        assert "--storage must be" in str(error)
    assert "sec" not in told
    assert "ret@" not in told
    assert "-ret" not in told


def test_what_holds_no_password_is_shown(tmp_path: Path) -> None:
    url = "postgresql://u:secret@h/name?host=/socket&password=secret"
    assert Location(url, folder=tmp_path).shown_url == "postgresql://u:***@h/name?host=%2Fsocket&password=***"


def test_the_folder_of_a_study_does_not_depend_on_the_password(tmp_path: Path) -> None:
    folders = {
        Location(f"postgresql://u:{password}@h/name?password={password}", folder=tmp_path).study_folder("mine")
        for password in ("one", "two")
    }
    assert len(folders) == 1
    assert Location("postgresql://u@other/name", folder=tmp_path).study_folder("mine") not in folders


def test_a_study_whose_folder_was_named_with_the_password_keeps_it(tmp_path: Path) -> None:
    url = "postgresql://u:secret@h/name"
    digest = hashlib.sha256(f"{url}\nmine".encode()).hexdigest()[:8]  # as version 0.1.0 named it
    (tmp_path / f"mine-{digest}").mkdir()
    assert Location(url, folder=tmp_path).study_folder("mine") == tmp_path / f"mine-{digest}"


def test_the_folder_of_a_url_without_a_password_is_that_of_version_0_1_0(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/x.db"
    digest = hashlib.sha256(f"{url}\nmine".encode()).hexdigest()[:8]
    assert Location(url, folder=tmp_path).study_folder("mine") == tmp_path / f"mine-{digest}"


def test_the_command_that_goes_on_is_shown_without_the_password() -> None:
    url = "postgresql://u:secret@h/name"
    for words in (["--storage", url], [f"--storage={url}"]):
        told = command_to_go_on(["tune", "bert-tiny", *words], url)
        assert "secret" not in told
        assert "postgresql://u:***@h/name" in told
        assert "in the place of ***" in told
    assert command_to_go_on(["tune", "bert-tiny"], None) == ":\n  bo-tuner tune bert-tiny"
