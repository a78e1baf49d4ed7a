"""`Location`: which database holds the studies, and which folder holds their logs."""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bo_tuner.errors import ConfigError, StoreError
from bo_tuner.storage.address import Address

if TYPE_CHECKING:
    from bo_tuner.storage.patience import PatientStorage

__all__ = ["Location", "storage_answers"]

DEFAULT_FOLDER = Path("bo_tuner_studies")
_DATABASE = "studies.db"
_LONGEST_NAME = 100
_CONNECT_TIMEOUT_S = 10
_BUSY_TIMEOUT_S = 30
_SMALLEST_DATABASE = 200_000
"""Bytes that the tables of an empty study take."""


class Location:
    """A database of studies, by default SQLite in a folder that the user sees."""

    def __init__(self, url: str | None = None, *, folder: Path = DEFAULT_FOLDER) -> None:
        """Point at a database; nothing is opened or written yet.

        Args:
            url: Any URL that Optuna's RDB storage takes; None for `studies.db` in `folder`.
            folder: For logs and for the default database.

        Raises:
            ConfigError: The URL cannot be read, or needs a driver that is not installed.
        """
        self._folder = folder.resolve()
        self._file: Path | None = None
        """Of an SQLite database."""
        self._storage: PatientStorage | None = None
        self._url = f"sqlite:///{self._folder / _DATABASE}" if url is None else url
        self._address = Address.of(self._url)
        parsed = self._address.url
        if parsed.get_backend_name() == "sqlite":
            if parsed.database in (None, "", ":memory:") or "uri" in parsed.query:
                raise ConfigError(
                    f'--storage must be a plain file that outlives this process, as in "sqlite:///studies.db"; got {self._address.shown!r}'
                )
            self._file = Path(str(parsed.database)).resolve()
        self.shown_url = self._address.shown
        """For people, without passwords."""
        self.is_default = url is None
        """It is the default database in `folder`."""

    def study_folder(self, study_name: str) -> Path:
        """Where the logs of a study lie."""
        safe = "".join(char if char.isalnum() or char in "-_.+" else "_" for char in study_name)[:_LONGEST_NAME]
        safe = safe.lstrip(".") or "_"
        if safe != study_name or not self.is_default:
            # Other names, and other databases, may lead to the same text.
            identities = [study_name] if self.is_default else [self._address.identity, self._url]
            folders = [self._folder / f"{safe}-{_digest(identity, study_name)}" for identity in identities]
            # Once the password counted too: such a folder stays where it is.
            return next((folder for folder in reversed(folders) if folder.is_dir()), folders[0])
        return self._folder / safe

    @property
    def holds_anything(self) -> bool:
        """The database may hold studies; False for an SQLite file that is not there."""
        return self._file is None or self._file.exists()

    def check_writable(self) -> None:
        """Find out early that an SQLite file that is not there yet could not be made; leaves nothing behind.

        Raises:
            StoreError: Its folder cannot be written.
        """
        if self._file is None or self._file.exists():
            return
        nearest = next(parent for parent in self._file.parents if parent.exists())
        with storage_answers(self.shown_url), tempfile.TemporaryFile(dir=nearest) as trial:
            trial.write(b"x" * _SMALLEST_DATABASE)
            trial.flush()

    def open(self) -> PatientStorage:
        """Connect, and create the tables in a new database.

        Raises:
            StoreError: The database does not answer, or cannot be written.
        """
        if self._storage is not None:
            return self._storage
        import optuna

        from bo_tuner.storage.patience import PatientStorage

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        backend = self._address.url.get_backend_name()
        connect: dict[str, Any] = {"timeout": _BUSY_TIMEOUT_S} if backend == "sqlite" else {}
        if backend in ("postgresql", "mysql"):
            connect = {"connect_timeout": _CONNECT_TIMEOUT_S}
        with storage_answers(self.shown_url), _undone_on_failure(self._file):
            if self._file is not None:
                self._file.parent.mkdir(parents=True, exist_ok=True)
            self._storage = PatientStorage(self._url, connect_args=connect)
        return self._storage


@contextlib.contextmanager
def storage_answers(shown_url: str) -> Generator[None]:
    """Turn what goes wrong in a database or on its disk into a `StoreError` of one line."""
    import optuna
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except ImportError as error:
        extra = " (pip install 'bo_tuner[postgresql]' brings PostgreSQL's)" if "postgresql" in shown_url else ""
        raise ConfigError(
            f"--storage {shown_url} needs a driver that is not installed: {_first_line(error.__cause__ or error)}{extra}"
        ) from error
    except optuna.exceptions.UpdateFinishedTrialError as error:
        raise StoreError("another process finished this trial meanwhile: run the same command again") from error
    except RuntimeError as error:  # Optuna's way to say that another version made the tables
        raise StoreError(f"the storage {shown_url} cannot be used: {' '.join(str(error).split())}") from error
    except (SQLAlchemyError, optuna.exceptions.StorageInternalError, OSError) as error:
        cause = getattr(error, "orig", None) or getattr(error.__cause__, "orig", None) or error
        raise StoreError(
            f"the storage {shown_url} must answer and take writes, and does not: {_first_line(cause)}; "
            "mend it (or free some room) and run the same command again: what is stored is kept"
        ) from error


@contextlib.contextmanager
def _undone_on_failure(file: Path | None) -> Generator[None]:
    """Remove a new database file, and the folders made for it, when making it fails."""
    is_new = file is not None and not file.exists()
    new_folders = [parent for parent in file.parents if not parent.exists()] if file is not None else []
    try:
        yield
    except BaseException:
        if file is not None and is_new:
            with contextlib.suppress(OSError):
                for leftover in (file, Path(f"{file}-journal")):
                    leftover.unlink(missing_ok=True)
                for folder in new_folders:
                    folder.rmdir()
        raise


def _digest(identity: str, study_name: str) -> str:
    text = study_name if identity == study_name else f"{identity}\n{study_name}"
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
