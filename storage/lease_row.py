"""`LeaseRow`: a study's lease as one row of the database, changed only by compare-and-set, and the fence that guards writes by it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection

    from bo_tuner.storage.patience import PatientStorage

__all__ = ["LeaseRow", "Row", "entry_of", "fenced"]

LEASE_KEY = "lease"
_HAS_LOOKED = "bo_tuner_has_looked"
_WRITES = ("INSERT", "UPDATE", "DELETE")


class Row(Protocol):
    """One text that several processes change."""

    def read(self) -> str | None:
        """The text; None where there is none yet."""
        ...

    def swap(self, old: str | None, new: str) -> bool:
        """Replace `old` by `new`, in one step; False, and nothing happens, where it is not `old` any more."""
        ...


class LeaseRow:
    """The row of a study's lease, which is a study attribute, so that Optuna's dashboard shows it too."""

    def __init__(self, storage: PatientStorage, study_id: int) -> None:
        """Point at it; nothing is read yet."""
        from sqlalchemy import Integer, Text, and_, column, table

        self._storage = storage
        self._study_id = study_id
        self._table = table(
            "study_user_attributes", column("study_id", Integer), column("key", Text), column("value_json", Text)
        )
        self._is_ours = and_(self._table.c.study_id == study_id, self._table.c.key == LEASE_KEY)

    def read(self) -> str | None:
        """The row's text, as last committed."""

        def read() -> str | None:
            with self._storage.engine.connect() as connection:
                return self._read(connection)

        found: str | None = self._storage.repeated(read)
        return found

    def read_locked(self, connection: Connection) -> str | None:
        """The same within a transaction, at whose end it still holds: nobody changes the row before."""
        return self._read(connection, is_locked=True)

    def _read(self, connection: Connection, *, is_locked: bool = False) -> str | None:
        from sqlalchemy import select

        query = select(self._table.c.value_json).where(self._is_ours)
        found = connection.execute(query.with_for_update() if is_locked else query).scalar_one_or_none()
        return None if found is None else str(found)

    def swap(self, old: str | None, new: str) -> bool:
        """Replace `old` by `new` in one transaction; False where it is not `old` any more, be it that a connection broke after we did it."""
        is_swapped: bool = self._storage.repeated(lambda: self._swap(old, new))
        return is_swapped

    def _swap(self, old: str | None, new: str) -> bool:
        from sqlalchemy.exc import IntegrityError

        values = {"study_id": self._study_id, "key": LEASE_KEY, "value_json": new}
        try:
            with self._storage.engine.begin() as connection:
                if old is None:
                    connection.execute(self._table.insert().values(values))
                    return True
                is_unchanged = self._table.c.value_json == old
                update = self._table.update().where(self._is_ours, is_unchanged).values(value_json=new)
                return connection.execute(update).rowcount == 1
        except IntegrityError:  # another one made the row
            return False


def entry_of(text: str | None) -> Mapping[str, Any]:
    """What the row says; nothing where there is none, or an earlier version has emptied it."""
    return (json.loads(text) if text else None) or {}


@contextlib.contextmanager
def fenced(storage: PatientStorage, row: LeaseRow, check: Callable[[Mapping[str, Any]], None]) -> Generator[None]:
    """Let `check` look at the lease in every transaction that writes through this storage, and refuse the write by raising.

    The row is read after the first write, when SQLite is locked, and stays locked itself on other servers: no other process takes the lease
    between the look and the commit.
    """
    from sqlalchemy import event

    def look(connection: Connection, cursor: object, statement: str, *context: object) -> None:
        if connection.info.get(_HAS_LOOKED) or not statement.lstrip().upper().startswith(_WRITES):
            return
        check(entry_of(row.read_locked(connection)))
        connection.info[_HAS_LOOKED] = True

    def forget(connection: Connection) -> None:
        connection.info.pop(_HAS_LOOKED, None)

    listeners: list[tuple[str, Callable[..., None]]] = [
        ("after_cursor_execute", look),
        ("commit", forget),
        ("rollback", forget),
    ]
    for name, listener in listeners:
        event.listen(storage.engine, name, listener)
    try:
        yield
    finally:
        for name, listener in listeners:
            event.remove(storage.engine, name, listener)
