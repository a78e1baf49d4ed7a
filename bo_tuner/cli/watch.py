"""`bo-tuner watch`: a study as it goes on, from another terminal; reads only."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from bo_tuner.budget import Budget
from bo_tuner.cli.options import Debug, Storage, StudyName
from bo_tuner.engine import Snapshot
from bo_tuner.errors import StoreError
from bo_tuner.report.default import stream_progress
from bo_tuner.report.shared import read_running
from bo_tuner.storage import Location, StudyStore
from bo_tuner.trial import last_limit_bytes

__all__ = ["watch"]

_LOOK_EVERY_S = 1.0


def watch(
    study: StudyName,
    once: Annotated[bool, typer.Option("--once", help="Show how it stands, and end.")] = False,
    storage: Storage = None,
    debug: Debug = False,
) -> None:
    """Watch a study that another terminal tunes, until it stops or Ctrl-C.

    On a terminal it shows what `tune` shows there; elsewhere it prints one line for every trial that ends.
    """
    onlooker = _Onlooker(StudyStore.existing(Location(storage), study))
    if onlooker.store.origin.warning:
        print(onlooker.store.origin.warning, file=sys.stderr)
    driver = onlooker.store.driver()
    if once or driver is None:
        _print_frame(onlooker.look(driver), is_over=driver is None)
    else:
        print(f"{study} is tuned by process {driver['pid']} on {driver['host']}; Ctrl-C ends the view", file=sys.stderr)
        try:
            _follow(onlooker)
        except KeyboardInterrupt:
            return
    if not once or driver is None:
        print(onlooker.why_it_stands(), file=sys.stderr)


def _follow(onlooker: _Onlooker) -> None:
    """Show the study until nobody drives it."""
    first = onlooker.look(onlooker.store.driver())
    ended = {record.number for record in first.records if record.result is not None}
    with contextlib.closing(stream_progress(sys.stdout)) as progress:
        progress.shows(first)
        is_driven = True
        while is_driven:
            time.sleep(_LOOK_EVERY_S)
            driver = onlooker.store.driver()
            is_driven = driver is not None
            snapshot = onlooker.look(driver)
            for record in snapshot.records:
                if record.result is not None and record.number not in ended:
                    ended.add(record.number)
                    progress.ended(record, snapshot)
            progress.shows(snapshot)


def _print_frame(snapshot: Snapshot, *, is_over: bool) -> None:
    from rich.console import Console

    from bo_tuner.report.frame import StudyFrame

    Console().print(StudyFrame(snapshot=snapshot, now=snapshot.taken_at, is_over=is_over))


class _Onlooker:
    """Looks at a study from outside: at its storage, and at what its driver shares through a file."""

    def __init__(self, store: StudyStore) -> None:
        self.store = store
        self._spent_s = -1.0
        self._spent_at = 0.0
        self._first_seen: dict[int, float | None] = {}
        """When each running trial came up, of `time.monotonic`."""

    def look(self, driver: Mapping[str, Any] | None) -> Snapshot:
        """How the study stands now, driven by `driver`.

        Raises:
            StoreError: It has not begun.
        """
        budget = self.store.last_stop().get("budget")
        if not budget:
            name = self.store.name
            raise StoreError(f"study {name!r} has not begun; bo-tuner tune MODEL --study {name} starts it")
        records, now = self.store.records(), time.monotonic()
        spent = self.store.spent(records)
        if spent.seconds != self._spent_s:  # the driver saves it every two seconds
            self._spent_s, self._spent_at = spent.seconds, now
        snapshot = Snapshot(
            records=records,
            budget=Budget.parse(budget),
            spent=spent,
            taken_at=self._spent_at,
            memory_limit_bytes=last_limit_bytes(records) or 0,
        )
        return snapshot if driver is None else self._with_running(snapshot, driver, now)

    def _with_running(self, snapshot: Snapshot, driver: Mapping[str, Any], now: float) -> Snapshot:
        unfinished = {record.number: record for record in snapshot.records if record.result is None}
        folder = Path(driver.get("folder", self.store.folder))
        told = read_running(folder, host=driver["host"], pid=driver["pid"])
        candidates = {record.number: record for record in snapshot.records} if told and told.purpose else unfinished
        if told is not None and told.number in candidates:
            return replace(
                snapshot,
                running=candidates[told.number],
                running_since=now - (time.time() - told.began_at),
                event=told.event,
                memory_limit_bytes=told.memory_limit_bytes,
                purpose=told.purpose,
            )
        if not unfinished:
            return snapshot
        running = min(unfinished)
        # A trial that ran before we came began at a time of another host's clock and zone.
        since = self._first_seen.setdefault(running, now if self._first_seen else None)
        return replace(snapshot, running=unfinished[running], running_since=since)

    def why_it_stands(self) -> str:
        """Why nobody drives the study, in one line."""
        stop, name = self.store.last_stop(), self.store.name
        if stop.get("reason"):
            return f"{name} is not tuned now: {stop['reason']} ({stop['budget']})"
        return f"{name} is not tuned now: its last run was interrupted or failed; the same bo-tuner tune goes on"
