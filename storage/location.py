"""`Location`: which database holds the studies, and which folder holds their logs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bo_tuner.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from optuna.storages import RDBStorage

__all__ = ["Location", "storage_answers"]

DEFAULT_FOLDER = Path("bo_tuner_studies")
_DATABASE = "studies.db"
_CONNECT_TIMEOUT_S = 10
_BUSY_TIMEOUT_S = 30


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
        self._file = folder.resolve() / _DATABASE if url is None else None
        self._url = url or f"sqlite:///{self._file}"
        self._folder = folder
        self._storage: RDBStorage | None = None
        from sqlalchemy.engine import make_url
        from sqlalchemy.exc import ArgumentError  # an unknown database is one too (NoSuchModuleError)

        try:
            parsed = make_url(self._url)
            parsed.get_dialect()
        except (ArgumentError, ImportError) as error:
            raise ConfigError(
                f'--storage must be a database URL, as in "sqlite:///studies.db" or "postgresql://user@host/name"; '
                f"got {url!r}: {_first_line(error)}"
            ) from error
        if parsed.get_backend_name() == "sqlite" and parsed.database in (None, "", ":memory:"):
            raise ConfigError(
                f'--storage must be a database that outlives this process, as in "sqlite:///studies.db"; got {url!r}'
            )
        if parsed.get_backend_name() == "sqlite" and self._file is None and parsed.database:
            self._file = Path(parsed.database).resolve()
        self.shown_url = parsed.render_as_string(hide_password=True)
        """For people, without the password."""
        self.is_default = url is None
        """It is the default database in `folder`."""

    def study_folder(self, study_name: str) -> Path:
        """Where the logs of a study lie."""
        safe = "".join(char if char.isalnum() or char in "-_.+" else "_" for char in study_name)
        return self._folder / (safe.lstrip(".") or "_")

    @property
    def holds_anything(self) -> bool:
        """The database may hold studies; False for an SQLite file that is not there."""
        return self._file is None or self._file.exists()

    def open(self) -> RDBStorage:
        """Connect, and create the tables in a new database.

        Raises:
            StoreError: The database does not answer, or cannot be written.
        """
        if self._storage is not None:
            return self._storage
        import optuna
        from sqlalchemy.engine import make_url

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        is_new = self._file is not None and not self._file.exists()
        made_folder = False
        try:
            if self._file is not None and is_new:
                made_folder = not self._file.parent.exists()
                self._file.parent.mkdir(parents=True, exist_ok=True)
            backend = make_url(self._url).get_backend_name()
            connect: dict[str, Any] = {"timeout": _BUSY_TIMEOUT_S} if backend == "sqlite" else {}
            if backend in ("postgresql", "mysql"):
                connect = {"connect_timeout": _CONNECT_TIMEOUT_S}
            with storage_answers(self.shown_url):
                self._storage = optuna.storages.RDBStorage(self._url, engine_kwargs={"connect_args": connect})
        except (StoreError, OSError):
            if self._file is not None and is_new:
                for leftover in (self._file, Path(f"{self._file}-journal")):
                    leftover.unlink(missing_ok=True)
                if made_folder:
                    with contextlib.suppress(OSError):
                        self._file.parent.rmdir()
            raise
        return self._storage


@contextlib.contextmanager
def storage_answers(shown_url: str) -> Iterator[None]:
    """Turn what goes wrong in a database or on its disk into a `StoreError` of one line."""
    import optuna
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"--storage {shown_url} needs a driver that is not installed: {_first_line(error)}"
        ) from error
    except (SQLAlchemyError, optuna.exceptions.StorageInternalError, OSError) as error:
        cause = getattr(error, "orig", None) or getattr(error.__cause__, "orig", None) or error
        raise StoreError(
            f"the storage {shown_url} must answer and take writes, and does not: {_first_line(cause)}; "
            "mend it and run the same command again: what is stored is kept"
        ) from error


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
