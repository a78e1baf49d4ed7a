"""`LiveProgress`: a study on a terminal, redrawn in place while it goes on."""

from __future__ import annotations

import sys
import time
from dataclasses import replace

from rich.console import Console
from rich.live import Live

from bo_tuner.engine import Snapshot
from bo_tuner.report.frame import StudyFrame
from bo_tuner.trial import TrialRecord, best_of

__all__ = ["LiveProgress"]

_REDRAWS_PER_S = 2


class LiveProgress:
    """Implements `Progress`; a thread of rich redraws, so that time goes on where nothing else does.

    When it is closed, the trials that ended meanwhile stay on the screen, however many they are.
    """

    def __init__(self, console: Console) -> None:
        """Draw on `console`, a terminal; nothing is drawn before the first snapshot."""
        self._console = console
        self._live: Live | None = None
        self._snapshot: Snapshot | None = None
        self._ended: set[int] = set()
        self._is_over = False

    def shows(self, snapshot: Snapshot) -> None:
        """Keep it for the next redraw."""
        self._snapshot = snapshot
        if self._live is None:
            self._start()

    def ended(self, record: TrialRecord, snapshot: Snapshot) -> None:
        """Keep its row."""
        self._ended.add(record.number)
        self.shows(snapshot)

    def ran_again(self, record: TrialRecord, snapshot: Snapshot) -> None:
        """Keep its row too."""
        self.ended(record, snapshot)

    def close(self) -> None:
        """Leave the rows and show the cursor again."""
        live, self._live = self._live, None
        if live is None:
            return
        try:
            self._is_over = True
            live.transient = not self._ended
            live.stop()
        finally:
            self._console.show_cursor()  # also when a second Ctrl-C comes

    def _start(self) -> None:
        self._is_over = False
        self._live = Live(
            get_renderable=self._frame,
            console=self._console,
            refresh_per_second=_REDRAWS_PER_S,
            redirect_stdout=sys.stdout.isatty(),  # else what others print would miss the file they print it to
        )
        self._live.start()  # the thread draws the first frame too: Ctrl-C in the midst of one would have rich draw it twice

    def _frame(self) -> StudyFrame:
        snapshot, now = self._snapshot, time.monotonic()
        assert snapshot is not None
        if not self._is_over:
            return StudyFrame(snapshot=snapshot, now=now, height=self._console.height)
        best = best_of(snapshot.records)
        kept = [record for record in snapshot.records if record.number in self._ended or record == best]
        return StudyFrame(snapshot=replace(snapshot, records=kept), now=now, is_over=True)
