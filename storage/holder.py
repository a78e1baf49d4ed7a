"""Who holds a lease, and whether that process still lives, without comparing the clocks of two machines."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bo_tuner.storage.lease_row import entry_of

__all__ = ["HolderWatch", "holder_entry", "is_here"]

RENEW_EVERY_S = 2.0
LAPSES_AFTER_S = 20.0
"""A holder that cannot be seen from here is given up on after this time without a renewal, by the clock of the one who looks."""

HELD_HERE: set[str] = set()
"""Ids of the leases that this process holds, or is about to take."""


def holder_entry(lease_id: str, *, number: int, renewals: int, folder: Path) -> dict[str, Any]:
    """What the holder of a lease writes of itself.

    Args:
        lease_id: Of this holder alone.
        number: Of the lease, higher than any before in the study.
        renewals: How often it was renewed: what others see change.
        folder: For those who look from elsewhere on this host.
    """
    return {
        "id": lease_id,
        "number": number,
        "renewals": renewals,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "seen_from": _process_numbers(),
        "process_started": _process_started(os.getpid()),
        "renewed_at": time.time(),  # for people
        "folder": str(folder),
    }


class HolderWatch:
    """Looks whether a lease is held. A process among those of this kernel and namespace is looked for, any other must renew its entry."""

    def __init__(
        self,
        read: Callable[[], str | None],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        on_wait: Callable[[Mapping[str, Any]], None] = lambda entry: None,
    ) -> None:
        """Watch one row.

        Args:
            read: Its text.
            clock: Seconds, of this process alone.
            sleep: Waits.
            on_wait: Told of a holder that cannot be seen from here, once, before its renewals are waited for.
        """
        self._read = read
        self._clock = clock
        self._sleep = sleep
        self._on_wait = on_wait
        self._text: str | None = None
        self._since: float | None = None
        """When `_text` was first seen; None where nothing was seen yet."""

    def look(self) -> tuple[str | None, Mapping[str, Any] | None]:
        """The row's text, and its entry where the lease is held. Of a holder that is seen for the first time a renewal is waited for."""
        while True:
            text = self._read()
            entry = entry_of(text)
            if "id" not in entry:
                return text, None
            is_running = _is_running(entry)
            if is_running is not None:
                return text, entry if is_running else None
            if self._since is None:
                self._text, self._since = text, self._clock()
                self._on_wait(entry)
                self._wait_for_change(text)
            elif text != self._text:
                self._text, self._since = text, self._clock()
                return text, entry
            else:
                return text, entry if self._clock() - self._since < LAPSES_AFTER_S else None

    def _wait_for_change(self, text: str | None) -> None:
        assert self._since is not None
        while self._read() == text and self._clock() - self._since < LAPSES_AFTER_S:
            self._sleep(min(RENEW_EVERY_S, LAPSES_AFTER_S) / 4)


def is_here(entry: Mapping[str, Any]) -> bool:
    """The holder is among the processes that this one can see by their numbers."""
    numbers = _process_numbers()
    return numbers is not None and entry.get("seen_from") == numbers


def _is_running(entry: Mapping[str, Any]) -> bool | None:
    """The holder's process is there; None where that cannot be seen from here."""
    if not is_here(entry):
        return None
    pid = int(entry["pid"])
    if pid == os.getpid():
        return entry["id"] in HELD_HERE
    started = _process_started(pid)
    if started is None:
        with contextlib.suppress(ProcessLookupError, OverflowError):
            try:
                os.kill(pid, 0)
            except PermissionError:
                return None  # of a user whose processes are hidden
        return False
    return bool(started == entry["process_started"])


def _process_numbers() -> str | None:
    """What gives processes their numbers: the boot of this kernel, and the namespace. Containers have one of their own each."""
    with contextlib.suppress(OSError):
        return f"{_boot()} {os.readlink('/proc/self/ns/pid')}"
    return None


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _process_started(pid: int) -> str | None:
    """Which process it is, beyond its number: the boot and the clock ticks since then at which it started (proc(5)).

    Not a time of day: the kernel shifts all of those when the clock is set, and a holder would seem to be another process.
    """
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        if fields[0] not in ("Z", "X"):
            return f"{_boot()} {fields[19]}"
    return None
