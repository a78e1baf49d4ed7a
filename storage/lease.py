"""`Lease`: one process drives a study at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from bo_tuner.errors import StudyBusyError

__all__ = ["Lease", "is_alive"]

RENEW_EVERY_S = 2.0
LAPSES_AFTER_S = 20.0
"""Holders on another host are given up on after this; one on this host as soon as its process is gone."""
_SETTLE_S = 0.1


class Lease:
    """The right to drive a study: a lock file on this host, and a renewed entry in the storage for all others.

    The entry is written, then read back after a moment: of two that write at the same time the last one holds it.
    """

    def __init__(
        self,
        *,
        study_name: str,
        lock_file: Path,
        read: Callable[[], Mapping[str, Any] | None],
        write: Callable[[Mapping[str, Any] | None], None],
        on_renew: Callable[[], None],
    ) -> None:
        """Describe the lease.

        Args:
            study_name: For messages.
            lock_file: On a file system of this host.
            read: The entry in the storage, None when there is none.
            write: Replaces the entry.
            on_renew: Called with every renewal, from the renewing thread.
        """
        self._study_name = study_name
        self._lock_file = lock_file
        self._read = read
        self._write = write
        self._on_renew = on_renew
        self._id = uuid.uuid4().hex
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
            raise self._busy(socket.gethostname(), int(pid) if pid.isdigit() else 0) from None
        self._lock = lock
        try:
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
            self._take()
        except BaseException:
            self._unlock()
            raise
        self._thread = threading.Thread(target=self._keep, name="bo_tuner-lease", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Give the lease back."""
        if self._lock is None:
            return
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        try:
            holder = self._read() if self.lost is None else None
            if holder is not None and holder["id"] == self._id:
                self._write(None)
        finally:
            self._unlock()

    def _take(self) -> None:
        holder = self._read()
        if holder is not None and is_alive(holder):
            raise self._busy(str(holder["host"]), int(holder["pid"]))
        self._write(self._entry())
        time.sleep(_SETTLE_S)
        holder = self._read()
        if holder is not None and holder["id"] != self._id:
            raise self._busy(str(holder["host"]), int(holder["pid"]))

    def _keep(self) -> None:
        while not self._stop.wait(RENEW_EVERY_S):
            try:
                holder = self._read()
                if holder is None:
                    self.lost = StudyBusyError(
                        f"study {self._study_name!r} was driven by another process meanwhile: run the same command again",
                        host="unknown",
                        pid=0,
                    )
                    return
                if holder["id"] != self._id:
                    self.lost = self._busy(str(holder["host"]), int(holder["pid"]))
                    return
                self._write(self._entry())
                self._on_renew()
            except Exception as error:  # noqa: BLE001  # told to the driver, which decides
                self.lost = error
                return

    def _entry(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "process_started": _process_started(os.getpid()),
            "renewed_at": time.time(),
            "folder": str(self._lock_file.parent),  # for those who look from elsewhere on this host
        }

    def _busy(self, host: str, pid: int) -> StudyBusyError:
        return StudyBusyError(
            f"study {self._study_name!r} is being tuned by process {pid} on {host}: wait for it, stop it, "
            "or start another study with --study NAME",
            host=host,
            pid=pid,
        )

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def is_alive(holder: Mapping[str, Any]) -> bool:
    """The process of a lease's entry still holds it."""
    if holder["host"] == socket.gethostname():
        started = _process_started(int(holder["pid"]))
        return started is not None and bool(started == holder["process_started"])
    renewed_at: float = holder["renewed_at"]
    return time.time() - renewed_at < LAPSES_AFTER_S


def _process_started(pid: int) -> str | None:
    """Which process it is, beyond its number: the boot and the clock ticks since then at which it started (proc(5)).

    Not a time of day: the kernel shifts all of those when the clock is set, and a holder would seem to be another process.
    """
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        if fields[0] not in ("Z", "X"):
            return f"{boot} {fields[19]}"
    return None
