"""`StudyFrame`: a study at one moment, drawn by rich to the width and height there are."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, OverflowMethod
from rich.text import Text

from bo_tuner.budget import Spent
from bo_tuner.engine import Snapshot
from bo_tuner.goal import Goal
from bo_tuner.outcome import Outcome
from bo_tuner.report.progress import ending
from bo_tuner.report.standing import remarks, without_value
from bo_tuner.text import duration, gib, rate
from bo_tuner.trial import TrialRecord, best_of

__all__ = ["StudyFrame"]

_GAP = 2
_LABEL = 9
_LEAST_NAME = 8
_LEAST_REASON = 12
_MEMORY_STYLES = ((0.9, "red"), (0.75, "yellow"), (0.0, "green"))
"""From this fraction of the limit on."""
_OUTCOME_STYLES = {Outcome.COMPLETE: "", Outcome.PRUNED: "dim", Outcome.FAILED: "red", Outcome.TIMEOUT: "red"}
_PURPOSES = {"": "trial", "repeat": "repeating trial", "confirm": "confirming trial"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyFrame:
    """A table of trials; under it what runs, its memory against the limit, the best, and the budget."""

    snapshot: Snapshot
    now: float
    """Of `time.monotonic`; times that run are shown as they stand then."""
    height: int | None = None
    """Lines there are: the newest trials fill what is left, the best always among them. None for all trials."""
    is_over: bool = False
    """Nothing runs, and nothing will."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        pen = _Pen(options.max_width, is_ascii=options.ascii_only)
        lines = self._lines(pen)
        ended = [record for record in self.snapshot.records if record.result is not None]
        if self.height is None:
            rows = ended
        else:
            rows = _newest(ended, self.height - len(lines) - 1)
            lines = lines[: self.height]
        if rows:
            yield from pen.table(rows, best_of(ended))
        yield from lines

    def _lines(self, pen: _Pen) -> list[Text]:
        """What stands under the table, the most needed first."""
        spent = self._spent
        lines = [] if self.is_over else [self._running(pen), self._memory(pen)]
        best = best_of(self.snapshot.records)
        if best is None:
            lines.append(pen.line("best", without_value(self.snapshot.records) or "nothing has completed yet"))
        else:
            lines.append(pen.line("best", f"trial {_name(best)}, {ending(best)}", style="bold"))
        budget = self.snapshot.budget
        lines.append(pen.line("budget", budget.used(spent), fraction=budget.fraction_used(spent), style="cyan"))
        if not self.is_over:
            about = f" (about {duration(self._to_go_s)})" if self._to_go_s else ""
            left = budget.left(spent).removesuffix(" left")
            lines.append(pen.line("left", f"{left}{about}, {duration(spent.seconds)} spent"))
        return lines

    @property
    def _spent(self) -> Spent:
        return self.snapshot.spent.later(self.now - self.snapshot.taken_at)

    @property
    def _running_s(self) -> float | None:
        since = self.snapshot.running_since
        return None if since is None else max(self.now - since, 0.0)

    def _running(self, pen: _Pen) -> Text:
        running, event = self.snapshot.running, self.snapshot.event
        if running is None:
            return pen.line("running", "choosing the next config")
        parts = [f"{_PURPOSES[self.snapshot.purpose]} {_name(running)}"]
        if running.attempts:
            parts.append(f"try {len(running.attempts) + 1}")
        if event is not None:
            parts.append("starting" if event.phase == "start" else f"{event.phase} {event.step}/{event.n_steps}")
            if event.micro_batch and event.n_micro_batches > 1:
                parts.append(f"micro-batch {event.micro_batch} of {event.n_micro_batches}")
        if self._running_s is not None:
            parts.append(duration(self._running_s))
        fraction = event.step / event.n_steps if event is not None and event.n_steps else None
        return pen.line("running", ", ".join(parts), fraction=fraction, style="cyan")

    def _memory(self, pen: _Pen) -> Text:
        limit, event = self.snapshot.memory_limit_bytes, self.snapshot.event
        if event is None or event.memory_bytes is None or not limit:
            return pen.line("memory", f"limit {gib(limit)} a rank" if limit else "no limit known yet")
        fraction = event.memory_bytes / limit
        style = next(style for least, style in _MEMORY_STYLES if fraction >= least)
        text = f"{gib(event.memory_bytes)} of {gib(limit)}, {fraction:.0%}"
        return pen.line("memory", text, fraction=fraction, style=style)

    @property
    def _to_go_s(self) -> float | None:
        """Until the budget is used up: its trials at the median time of those that ended, or its time where that is less; None
        when it is all time, or no trial has ended."""
        budget, spent = self.snapshot.budget, self._spent
        walls = [record.wall_s for record in self.snapshot.records if record.result is not None]
        if budget.trials is None or not walls:
            return None
        median = statistics.median(walls)
        done_s = min(self._running_s or 0.0, median)
        to_go_s, left_s = (budget.trials - spent.trials) * median - done_s, budget.seconds_left(spent)
        return max(to_go_s if left_s is None else min(to_go_s, left_s), 0.0)


class _Pen:
    """Draws on lines of `width`, and lets nothing wrap."""

    def __init__(self, width: int, *, is_ascii: bool) -> None:
        self._width = width
        self._bar = 24 if width >= 100 else 16 if width >= 72 else 12  # the same in all lines, so that bars align
        self._done, self._rest = ("#", "-") if is_ascii else ("━", "─")
        self._overflow: OverflowMethod = "crop" if is_ascii else "ellipsis"

    def line(self, label: str, words: str, *, fraction: float | None = None, style: str = "") -> Text:
        """A label, a bar where there is room for it, and words."""
        line = Text(label.ljust(_LABEL), style="dim", no_wrap=True, overflow=self._overflow)
        if fraction is not None and _LABEL + self._bar + _GAP + cell_len(words) <= self._width:
            n_done = min(max(round(fraction * self._bar), 0), self._bar)
            line.append(self._done * n_done, style=f"not dim {style}").append(self._rest * (self._bar - n_done))
            line.append(" " * _GAP)
        line.append(words, style=f"not dim {style}")
        return line

    def table(self, rows: Sequence[TrialRecord], best: TrialRecord | None) -> Iterator[Text]:
        """One line a trial under a heading; columns that find no room are left out.

        Drawn by hand: this costs a third of rich's own table, beside ranks whose speed is being measured.
        """
        marked = [(record, best is not None and best.number == record.number) for record in rows]
        cells = [_header(rows[0].goal), *(_cells(record, is_best=is_best) for record, is_best in marked)]
        styles = ["dim", *("bold green" if is_best else _outcome_style(record) for record, is_best in marked)]
        widths = self._widths(cells)
        for row, style in zip(cells, styles, strict=True):
            line = Text(style=style, no_wrap=True)
            for column, (cell, width) in enumerate(zip(row, widths, strict=False)):
                is_number = column == 0 or 3 <= column < len(row) - 1
                text = Text(cell.rjust(width) if is_number else cell)
                text.truncate(width, overflow=self._overflow, pad=True)
                line.append(text).append(" " * _GAP)
            line.rstrip()
            yield line

    def _widths(self, rows: Sequence[Sequence[str]]) -> list[int]:
        """Of the columns there is room for: reasons are left out first, then memory; then names are cut."""
        *widths, reason = (max(map(cell_len, column)) for column in zip(*rows, strict=True))
        room = self._width - sum(widths) - _GAP * len(widths)
        if room >= _LEAST_REASON:
            return [*widths, min(room, reason)]
        if room + _GAP < 0:
            room += widths.pop() + _GAP
        widths[1] = max(widths[1] + min(room + _GAP, 0), _LEAST_NAME)
        return widths


def _name(record: TrialRecord) -> str:
    return f"{record.number} {record.config.name}"


def _newest(ended: Sequence[TrialRecord], n_rows: int) -> list[TrialRecord]:
    """The last `n_rows`; the best stands in for the first of them where it is older."""
    rows = list(ended[-n_rows:]) if n_rows > 0 else []
    best = best_of(ended)
    if rows and best is not None and best.number < rows[0].number:
        rows[0] = best
    return rows


def _header(goal: Goal) -> tuple[str, ...]:
    own = [goal.measure.heading] if goal.has_own_value else []
    return ("trial", "config", "outcome", "samples/s", *own, "memory", "why")


def _cells(record: TrialRecord, *, is_best: bool) -> tuple[str, ...]:
    result, value = record.result, record.samples_per_s
    assert result is not None
    return (
        f"{record.number}{' *' if is_best else '  '}",
        record.config.name,
        result.outcome.value,
        rate(value).removesuffix("/s") if value is not None else "-",
        *([record.goal.cell(record)] if record.goal.has_own_value else []),
        gib(record.peak_memory_bytes) if record.peak_memory_bytes else "-",
        "".join(char if char.isprintable() else " " for char in remarks(record)),
    )


def _outcome_style(record: TrialRecord) -> str:
    assert record.result is not None
    return _OUTCOME_STYLES.get(record.result.outcome, "yellow")
