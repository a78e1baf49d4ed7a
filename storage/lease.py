"""`Lease`: one process drives a study at a time."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import sys
import threading
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from bo_tuner.errors import StudyBusyError
from bo_tuner.storage import holder
from bo_tuner.storage.holder import HELD_HERE, HolderWatch, holder_entry
from bo_tuner.storage.lease_row import Row, entry_of

__all__ = ["Lease"]

_LONGEST_RENEWAL_S = 5.0
"""A renewal that hangs longer is left to itself when the lease is given back: it changes nothing any more."""


class Lease:
    """The right to drive a study: a lock file on this host, and a numbered, renewed entry in the storage.

    Every change of the entry names what it replaces, so of two that take the lease at the same time one is refused. Each holder's number is
    higher than the last one's: by it the storage refuses writes of one who was taken for dead and comes back.
    """

    def __init__(self, *, study_name: str, lock_file: Path, row: Row, on_renew: Callable[[], None]) -> None:
        """Describe the lease.

        Args:
            study_name: For messages.
            lock_file: On a file system of this host.
            row: The entry in the storage.
            on_renew: Called with every renewal, from the renewing thread.
        """
        self._study_name = study_name
        self._lock_file = lock_file
        self._row = row
        self._on_renew = on_renew
        self._id = uuid.uuid4().hex
        self._number = 0
        self._renewals = 0
        self._text: str | None = None
        """Of the entry, as we wrote it last."""
        self._lock: IO[str] | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.lost: Exception | None = None
        """Set when a renewal failed or another process took over; the driver looks at it between trials."""

    def acquire(self) -> None:
        """Take the lease and keep it renewed until `release`.

        Raises:
            StudyBusyError: Another process holds it.
        """
        self._lock_file.parent.mkdir(parents=True, exist_ok=True)
        lock = open(self._lock_file, "a+", encoding="ascii")  # noqa: SIM115  # held until release
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            pid = lock.read().strip()
            lock.close()
            raise self._busy({"host": socket.gethostname(), "pid": int(pid) if pid.isdigit() else 0}) from None
        self._lock = lock
        try:
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
            HELD_HERE.add(self._id)
            self._take()
            self._thread = threading.Thread(target=self._keep, name="bo_tuner-lease", daemon=True)
            self._thread.start()
        except BaseException:  # a Ctrl-C, too, leaves nothing behind
            with contextlib.suppress(Exception):
                self.release()
            raise

    def release(self) -> None:
        """Give the lease back."""
        if self._lock is None:
            return
        try:
            self._stop.set()
            if self._thread is not None:
                self._thread.join(_LONGEST_RENEWAL_S)
            while self._number and entry_of(text := self._row.read()).get("id") == self._id:
                self._row.swap(text, json.dumps({"number": self._number}))
        finally:
            HELD_HERE.discard(self._id)
            self._lock.close()
            self._lock = None

    def check(self, entry: Mapping[str, Any]) -> None:
        """Refuse to write when the entry is not ours any more.

        Args:
            entry: As it stands in the transaction of the write.

        Raises:
            StudyBusyError: Another process drives, or has driven, the study.
        """
        if entry.get("id") != self._id:
            self.lost = self._busy(entry)
            raise self.lost

    def _take(self) -> None:
        text, held_by = HolderWatch(self._row.read, on_wait=self._say_that_it_waits).look()
        if held_by is not None:
            raise self._busy(held_by)
        self._number = int(entry_of(text).get("number", 0)) + 1
        if not self._swap(text):
            raise self._busy(entry_of(self._row.read()))

    def _keep(self) -> None:
        while not self._stop.wait(holder.RENEW_EVERY_S):
            try:
                if not self._swap(self._text):
                    self.check(entry_of(self._row.read()))
                self._on_renew()
            except Exception as error:  # noqa: BLE001  # told to the driver, which decides
                self.lost = self.lost or error
                return

    def _swap(self, old: str | None) -> bool:
        self._renewals += 1
        entry = holder_entry(self._id, number=self._number, renewals=self._renewals, folder=self._lock_file.parent)
        new = json.dumps(entry)
        # A connection that broke may have carried the change out before.
        if not self._row.swap(old, new) and self._row.read() != new:
            return False
        self._text = new
        return True

    def _say_that_it_waits(self, entry: Mapping[str, Any]) -> None:
        print(
            f"study {self._study_name!r} was last tuned by process {entry['pid']} on {entry['host']}, which cannot be seen from here: "
            f"looking for up to {holder.LAPSES_AFTER_S:.0f} s whether it still does",
            file=sys.stderr,
            flush=True,
        )

    def _busy(self, entry: Mapping[str, Any]) -> StudyBusyError:
        host, pid = str(entry.get("host", "unknown")), int(entry.get("pid", 0))
        if "pid" not in entry:
            return StudyBusyError(
                f"study {self._study_name!r} was driven by another process meanwhile: run the same command again",
                host=host,
                pid=pid,
            )
        return StudyBusyError(
            f"study {self._study_name!r} is being tuned by process {pid} on {host}: wait for it, stop it, "
            "or start another study with --study NAME",
            host=host,
            pid=pid,
        )
