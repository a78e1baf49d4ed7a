"""What only the driving process knows of a running trial, shared with those who watch from outside, through a small file."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bo_tuner.engine import Progress, Snapshot
from bo_tuner.objectives import TrialEvent
from bo_tuner.trial import TrialRecord

__all__ = ["RunningTrial", "SharedProgress", "read_running"]

_FILE = "live.json"
_WRITE_EVERY_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningTrial:
    """The trial that runs now."""

    number: int
    began_at: float
    """Of `time.time`: when its present try began."""
    memory_limit_bytes: int
    """Per rank."""
    event: TrialEvent
    purpose: str = ""
    """As in `Snapshot`."""


class SharedProgress:
    """Passes everything on to another progress, and writes what runs to `live.json` in `folder`.

    Written by a thread of its own, at most twice a second, so that no disk holds up a trial; removed by `close`.
    """

    def __init__(self, progress: Progress, folder: Path) -> None:
        self._progress = progress
        self._file = folder / _FILE
        self._newest: Snapshot | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def shows(self, snapshot: Snapshot) -> None:
        """Pass on, and keep for the next writing."""
        self._newest = snapshot
        if self._thread is None:
            self._stop.clear()
            self._thread = threading.Thread(target=self._keep_writing, name="bo_tuner-live", daemon=True)
            self._thread.start()
        self._progress.shows(snapshot)

    def ended(self, record: TrialRecord, snapshot: Snapshot) -> None:
        """Pass on."""
        self._progress.ended(record, snapshot)

    def ran_again(self, record: TrialRecord, snapshot: Snapshot) -> None:
        """Pass on."""
        self._progress.ran_again(record, snapshot)

    def close(self) -> None:
        """Remove the file."""
        self._progress.close()
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None
            with contextlib.suppress(OSError):
                self._file.unlink(missing_ok=True)

    def _keep_writing(self) -> None:
        written: Snapshot | None = None
        while True:
            newest = self._newest
            if newest is not None and newest is not written:
                written = newest
                with contextlib.suppress(OSError):  # on a full disk a view is poorer, and nothing is lost
                    self._write(newest)
            if self._stop.wait(_WRITE_EVERY_S):
                return

    def _write(self, snapshot: Snapshot) -> None:
        running, since, event = snapshot.running, snapshot.running_since, snapshot.event
        if running is None or since is None or event is None:
            return
        data = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "number": running.number,
            "began_at": time.time() - (time.monotonic() - since),
            "memory_limit_bytes": snapshot.memory_limit_bytes,
            "event": asdict(event),
            "purpose": snapshot.purpose,
        }
        draft = self._file.with_name(f"{_FILE}.new")
        draft.write_text(json.dumps(data), encoding="utf-8")
        draft.replace(self._file)


def read_running(folder: Path, *, host: str, pid: int) -> RunningTrial | None:
    """What the process `pid` on `host`, which drives the study of `folder`, last wrote; None when it wrote nothing.

    A file that another process left behind says nothing about this one.
    """
    try:
        data: dict[str, Any] = json.loads((folder / _FILE).read_text(encoding="utf-8"))
        if (data.pop("host"), data.pop("pid")) != (host, pid):
            return None
        event = TrialEvent(**data.pop("event"))
        return RunningTrial(**data, event=event)
    except (OSError, ValueError, TypeError, KeyError):
        return None
