"""The live view: what it draws at which size, and that it leaves a terminal as it was."""

from __future__ import annotations

import io
import os
import pty
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TextIO

import pyte
import pytest
from pyte import modes
from rich.console import Console

from bo_tuner.budget import Budget, Spent
from bo_tuner.config import TrainConfig
from bo_tuner.engine import Snapshot
from bo_tuner.objectives import TrialEvent
from bo_tuner.outcome import Measurement, Outcome, TrialResult
from bo_tuner.report import LineProgress, default_progress
from bo_tuner.report.default import stream_progress
from bo_tuner.report.frame import StudyFrame
from bo_tuner.report.live import LiveProgress
from bo_tuner.trial import TrialRecord

GIB = 2**30
NOW = 1000.0
LONG = TrainConfig(zero_stage=1, pipeline_depth=2, grad_accum_steps=64, micro_batch_size=1024, recompute=True)
assert LONG.name == "z1_pp2_gas64_mbs1024_rc"


def complete(number: int, *, config: TrainConfig | None = None, step_s: float = 1.0) -> TrialRecord:
    """A trial on two ranks that took a minute and a half."""
    config = config or TrainConfig(micro_batch_size=number + 1)
    times = ((step_s, step_s), (step_s, step_s))
    measurement = Measurement(
        global_batch=config.global_batch(2),
        seq_len=16,
        step_times_s=times,
        engine_times_s=times,
        peak_memory_bytes=(GIB, GIB),
    )
    result = TrialResult(
        outcome=Outcome.COMPLETE, measurement=measurement, peak_memory_bytes=GIB, limit_bytes=4 * GIB, wall_s=90.0
    )
    return TrialRecord(number=number, config=config, result=result)


def ended(number: int, outcome: Outcome, reason: str) -> TrialRecord:
    result = TrialResult(outcome=outcome, reason=reason, peak_memory_bytes=5 * GIB, limit_bytes=4 * GIB, wall_s=90.0)
    return TrialRecord(number=number, config=TrainConfig(zero_stage=3, micro_batch_size=number + 1), result=result)


@pytest.fixture
def records() -> list[TrialRecord]:
    """Thirteen trials that ended, the third of them the best, and one that runs; the best and the running have long names."""
    return [
        complete(0),
        complete(1),
        complete(2, config=LONG),
        *(complete(number) for number in range(3, 10)),
        ended(10, Outcome.GUARDED, "rank 0 used [bold]5.00 GiB[/], over\x1b[31m\nthe limit of 4.00 GiB"),
        ended(11, Outcome.FAILED, "rank 1 crashed"),
        complete(12),
        TrialRecord(number=13, config=replace(LONG, zero_stage=0)),
    ]


def snapshot(records: Sequence[TrialRecord], *, memory_bytes: int | None = GIB) -> Snapshot:
    running = records[-1] if records and records[-1].result is None else None
    event = TrialEvent(phase="measure", step=3, n_steps=6, memory_bytes=memory_bytes)
    return Snapshot(
        records=records,
        budget=Budget.parse("20 trials, 1h"),
        spent=Spent(trials=13, seconds=1200.0, device_seconds=2400.0),
        taken_at=NOW - 5.0,
        running=running,
        running_since=NOW - 12.0 if running else None,
        event=event if running else None,
        memory_limit_bytes=4 * GIB,
    )


def drawn(
    shown: Snapshot, *, width: int = 80, height: int | None = 24, is_over: bool = False, has_colors: bool = False
) -> str:
    console = Console(
        file=io.StringIO(),
        width=width,
        height=24,
        force_terminal=True,
        color_system="standard",
        no_color=not has_colors,
    )
    console.print(StudyFrame(snapshot=shown, now=NOW, height=height, is_over=is_over))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    return text if has_colors else re.sub(r"\x1b\[[\d;]*m", "", text)


# -- what is drawn -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [120, 80, 60, 40])
@pytest.mark.parametrize("height", [40, 24, 10, 6, 3, 1])
def test_it_never_exceeds_the_terminal(records: list[TrialRecord], width: int, height: int) -> None:
    lines = drawn(snapshot(records), width=width, height=height).splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) <= height
    assert lines[-min(height, 5)].startswith("running  ")


def test_at_eighty_columns_everything_is_there(records: list[TrialRecord]) -> None:
    lines = drawn(snapshot(records), height=11).splitlines()
    assert lines == [
        "trial  config                   outcome   samples/s    memory  why",
        "  2 *  z1_pp2_gas64_mbs1024_rc  complete      65536  1.00 GiB",
        "  9    z0_gas1_mbs10            complete         20  1.00 GiB",
        " 10    z3_gas1_mbs11            guarded           -  5.00 GiB  rank 0 used [bol…",
        " 11    z3_gas1_mbs12            failed            -  5.00 GiB  rank 1 crashed",
        " 12    z0_gas1_mbs13            complete         26  1.00 GiB",
        "running  ━━━━━━━━────────  trial 13 z0_pp2_gas64_mbs1024_rc, measure 3/6, 12s",
        "memory   ━━━━────────────  1.00 GiB of 4.00 GiB, 25%",
        "best     trial 2 z1_pp2_gas64_mbs1024_rc, 65536/s +-0 %, 1.00 GiB",
        "budget   ━━━━━━━━━━──────  13 of 20 trials, 20m05s of 1h00m",
        "left     7 trials, 39m55s (about 10m18s), 20m05s spent",
    ]


def test_at_sixty_columns_reasons_and_bars_give_way_to_names_and_numbers(records: list[TrialRecord]) -> None:
    lines = drawn(snapshot(records), width=60, height=8).splitlines()
    assert lines == [
        "trial  config                   outcome   samples/s",
        "  2 *  z1_pp2_gas64_mbs1024_rc  complete      65536",
        " 12    z0_gas1_mbs13            complete         26",
        "running  trial 13 z0_pp2_gas64_mbs1024_rc, measure 3/6, 12s",
        "memory   ━━━─────────  1.00 GiB of 4.00 GiB, 25%",
        "best     trial 2 z1_pp2_gas64_mbs1024_rc, 65536/s +-0 %, 1.…",
        "budget   ━━━━━━━━────  13 of 20 trials, 20m05s of 1h00m",
        "left     7 trials, 39m55s (about 10m18s), 20m05s spent",
    ]


def test_what_is_cut_ends_in_an_ellipsis(records: list[TrialRecord]) -> None:
    lines = drawn(snapshot(records), width=40, height=8).splitlines()
    assert lines[1] == "  2 *  z1_pp2_gas6…  complete      65536"
    assert lines[3] == "running  trial 13 z0_pp2_gas64_mbs1024_…"


def test_a_reason_with_markup_or_control_characters_is_shown_as_plain_text(records: list[TrialRecord]) -> None:
    line = next(line for line in drawn(snapshot(records), width=140).splitlines() if "guarded" in line)
    assert line.endswith("rank 0 used [bold]5.00 GiB[/], over [31m the limit of 4.00 GiB")


def test_without_a_height_every_trial_has_a_row(records: list[TrialRecord]) -> None:
    text = drawn(snapshot(records), height=None)
    assert re.findall(r"^ *(\d+)[ *]+z\d", text, re.MULTILINE) == [str(number) for number in range(13)]


@pytest.mark.parametrize(("used", "color"), [(0.5, 32), (0.8, 33), (0.95, 31), (1.3, 31)])
def test_the_memory_bar_turns_yellow_then_red_near_the_limit(
    records: list[TrialRecord], used: float, color: int
) -> None:
    shown = snapshot(records, memory_bytes=int(used * 4 * GIB))
    line = next(line for line in drawn(shown, has_colors=True).splitlines() if "memory   " in line)
    assert re.search(rf"\x1b\[{color}m━+\x1b", line), line


def test_no_color_means_no_color(records: list[TrialRecord], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    stream = io.StringIO()
    Console(file=stream, width=80, height=24, force_terminal=True).print(
        StudyFrame(snapshot=snapshot(records), now=NOW)
    )
    assert not re.search(r"\x1b\[[\d;]*3\d", stream.getvalue())
    assert "━" in stream.getvalue()


def test_a_terminal_without_unicode_gets_ascii(records: list[TrialRecord]) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    Console(file=stream, width=80, height=24, force_terminal=True).print(
        StudyFrame(snapshot=snapshot(records), now=NOW)
    )
    stream.flush()
    stream.seek(0)
    assert "####" in stream.read()


def test_a_second_try_and_a_start_are_said() -> None:
    failed = TrialResult(outcome=Outcome.FAILED)
    shown = replace(
        snapshot([TrialRecord(number=0, config=LONG, attempts=(failed,))]),
        event=TrialEvent(phase="start", n_steps=7),
        spent=Spent(seconds=4.0),
    )
    lines = drawn(shown).splitlines()
    assert lines[0] == "running  ────────────────  trial 0 z1_pp2_gas64_mbs1024_rc, try 2, starting, 12s"
    assert lines[1:] == [
        "memory   limit 4.00 GiB a rank",
        "best     nothing has completed yet",
        "budget   ────────────────  0 of 20 trials, 9s of 1h00m",
        "left     20 trials, 59m51s, 9s spent",
    ]


def test_the_running_micro_batch_is_said_where_steps_take_long_enough_to_tell(records: list[TrialRecord]) -> None:
    event = TrialEvent(phase="warmup", step=1, n_steps=6, memory_bytes=GIB, micro_batch=3, n_micro_batches=64)
    shown = replace(snapshot(records), event=event)
    assert "warmup 1/6, micro-batch 3 of 64, 12s" in drawn(shown, width=120)
    assert "micro-batch" not in drawn(replace(shown, event=replace(event, micro_batch=0)), width=120)
    assert "micro-batch" not in drawn(replace(shown, event=replace(event, n_micro_batches=1)), width=120)


def test_between_two_trials_it_says_that_one_is_chosen(records: list[TrialRecord]) -> None:
    assert "running  choosing the next config\n" in drawn(snapshot(records[:-1]))


def test_a_study_that_is_over_shows_neither_a_running_trial_nor_what_is_left(records: list[TrialRecord]) -> None:
    lines = drawn(snapshot(records[:-1]), is_over=True).splitlines()
    assert [line.split()[0] for line in lines[-3:]] == ["12", "best", "budget"]


@pytest.mark.parametrize(
    ("budget", "about"),
    [
        ("20 trials", "10m18s"),  # seven trials of 90 s, of which 12 s are over
        ("13 trials", None),
        ("20 trials, 21m", "55s"),  # the time ends before the trials do
        ("20 trials, 0.68 gpu-h", "19s"),  # on two devices
        ("1h", None),
    ],
)
def test_the_time_left_is_told_where_trials_limit_it(
    records: list[TrialRecord], budget: str, about: str | None
) -> None:
    last = drawn(replace(snapshot(records), budget=Budget.parse(budget))).splitlines()[-1]
    found = re.search(r"\(about (\w+)\)", last)
    assert (found[1] if found else None) == about


# -- on a terminal -------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    """A terminal of 80 by 24 that keeps what scrolls off, with a live view on it."""

    def __init__(self) -> None:
        super().__init__()
        self.screen = pyte.HistoryScreen(80, 24, history=1000)
        self.screen.set_mode(modes.LNM)  # as a terminal's driver does: a new line begins at the left
        self._pyte = pyte.Stream(self.screen)
        self._lock = threading.Lock()
        self.on_frame: Callable[[], None] | None = None
        """Called once, after a frame was drawn."""
        self.progress = LiveProgress(Console(file=self, width=80, height=24, force_terminal=True))

    def write(self, text: str, /) -> int:
        with self._lock:
            self._pyte.feed(text)
        if "running" in text and self.on_frame is not None:
            on_frame, self.on_frame = self.on_frame, None
            on_frame()
        return len(text)

    @property
    def lines(self) -> list[str]:
        """What was left on it, the oldest first; without empty lines."""
        with self._lock:
            above = ["".join(line[column].data for column in range(80)) for line in self.screen.history.top]
            return [line.rstrip() for line in [*above, *self.screen.display] if line.strip()]


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    terminal = Terminal()
    yield terminal
    terminal.progress.close()


def interrupt_the_main_thread() -> None:
    """As Ctrl-C does."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_nothing_is_drawn_before_there_is_something_to_show(terminal: Terminal) -> None:
    terminal.progress.close()
    assert terminal.lines == []


def test_time_goes_on_while_nothing_happens(terminal: Terminal, records: list[TrialRecord]) -> None:
    now = time.monotonic()
    terminal.progress.shows(replace(snapshot(records), running_since=now, taken_at=now))
    wait_for(lambda: len(terminal.lines) >= 5)
    assert re.search(r"measure 3/6, \ds", terminal.lines[-5])
    assert terminal.screen.cursor.hidden
    wait_for(lambda: "measure 3/6, 2s" in terminal.lines[-5])
    assert "20m02s spent" in terminal.lines[-1]


def test_showing_a_snapshot_costs_next_to_nothing(terminal: Terminal, records: list[TrialRecord]) -> None:
    shown = snapshot(records)
    terminal.progress.shows(shown)
    started = time.perf_counter()
    for _ in range(1000):
        terminal.progress.shows(shown)
    assert (time.perf_counter() - started) / 1000 < 0.0005


def test_closing_leaves_every_trial_that_ended_meanwhile_and_the_cursor(terminal: Terminal) -> None:
    trials = [complete(number) for number in range(40)]
    for number in range(5, 40):  # five ended in an earlier run
        running = TrialRecord(number=number, config=trials[number].config)
        terminal.progress.shows(snapshot([*trials[:number], running]))
        terminal.progress.ended(trials[number], snapshot(trials[: number + 1]))
    wait_for(lambda: any(line.startswith(" 39 *") for line in terminal.lines))
    terminal.progress.close()
    rows = [line.split()[0] for line in terminal.lines if "complete" in line]
    assert rows == [str(number) for number in range(5, 40)]
    assert terminal.lines[-2] == "best     trial 39 z0_gas1_mbs40, 80/s +-0 %, 1.00 GiB"
    assert not any(line.startswith("running") for line in terminal.lines)
    assert not terminal.screen.cursor.hidden


def test_closing_before_any_trial_ended_leaves_nothing(terminal: Terminal, records: list[TrialRecord]) -> None:
    terminal.progress.shows(snapshot(records))
    terminal.progress.close()
    assert terminal.lines == []
    assert not terminal.screen.cursor.hidden


def test_ctrl_c_as_soon_as_something_is_drawn_leaves_nothing(terminal: Terminal, records: list[TrialRecord]) -> None:
    terminal.on_frame = interrupt_the_main_thread
    with pytest.raises(KeyboardInterrupt):
        for _ in range(600):
            terminal.progress.shows(snapshot(records))
            time.sleep(0.1)
    terminal.progress.close()
    assert terminal.lines == []
    assert not terminal.screen.cursor.hidden


def test_what_others_print_to_stderr_stands_above(terminal: Terminal, records: list[TrialRecord]) -> None:
    terminal.progress.shows(snapshot(records))
    print("a warning", file=sys.stderr)
    terminal.progress.shows(snapshot(records))
    wait_for(lambda: terminal.lines[0] == "a warning")
    assert terminal.lines[-5].startswith("running")


# -- which progress ------------------------------------------------------------------------------------------------


@pytest.fixture
def tty() -> Iterator[TextIO]:
    """A real terminal's file."""
    master, slave = pty.openpty()
    with open(slave, "w", encoding="utf-8") as stream:
        yield stream
    os.close(master)


def test_a_terminal_gets_the_live_view(tty: TextIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(stream_progress(tty), LiveProgress)


def test_a_dumb_terminal_gets_lines(tty: TextIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(stream_progress(tty), LineProgress)


def test_a_stream_that_is_no_terminal_gets_lines_even_where_colors_are_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert isinstance(stream_progress(io.StringIO()), LineProgress)
    assert isinstance(default_progress(), LineProgress)  # stderr is captured here
