"""`NotebookProgress`: one bar under a notebook's cell."""

from __future__ import annotations

import sys
import time
from importlib import util
from typing import TYPE_CHECKING, NoReturn

from bo_tuner.engine import Snapshot
from bo_tuner.text import rate
from bo_tuner.trial import TrialRecord, best_of

if TYPE_CHECKING:
    from tqdm.std import tqdm

__all__ = ["NotebookProgress", "is_notebook"]

_REDRAWN_AFTER_S = 1.0
"""Where the words stay the same."""


def is_notebook() -> bool:
    """This process is the kernel of a notebook (Jupyter, VS Code, Colab)."""
    ipython = sys.modules.get("IPython")  # a kernel has imported it
    shell = ipython.get_ipython() if ipython is not None else None
    return any(base.__name__ == "ZMQInteractiveShell" for base in type(shell).__mro__)


class NotebookProgress:
    """Implements `Progress`: how much of the budget is used, the best so far, and what runs.

    With ipywidgets the bar is a widget, else text.
    """

    def __init__(self) -> None:
        self._bar: tqdm[NoReturn] | None = None
        self._words = ""
        self._drawn_at = 0.0

    def shows(self, snapshot: Snapshot) -> None:
        """Say what runs."""
        self._draw(snapshot)

    def ended(self, record: TrialRecord, snapshot: Snapshot) -> None:
        """Advance the bar."""
        self._draw(snapshot)

    def ran_again(self, record: TrialRecord, snapshot: Snapshot) -> None:
        """Nothing more is used of the budget's trials."""
        self._draw(snapshot)

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _draw(self, snapshot: Snapshot) -> None:
        if self._bar is None:
            self._bar = _new_bar(snapshot)
        best = best_of(snapshot.records)
        words = "no best yet"
        if best is not None:
            words = f"best {rate(best.standing_samples_per_s or 0.0)}{best.beside} {best.config.name}"
        if snapshot.running is not None:
            words += f", {snapshot.running.config.name} runs"
        now = time.monotonic()
        if words == self._words and now - self._drawn_at < _REDRAWN_AFTER_S:
            return
        self._words, self._drawn_at = words, now
        self._bar.n, _, _ = _used(snapshot)
        self._bar.set_postfix_str(words)


def _new_bar(snapshot: Snapshot) -> tqdm[NoReturn]:
    from tqdm import notebook, std

    kind: type[tqdm[NoReturn]] = notebook.tqdm if util.find_spec("ipywidgets") is not None else std.tqdm
    used, total, unit = _used(snapshot)
    layout = "{percentage:3.0f}%|{bar}| {n_fmt} of {total_fmt} {unit} [{elapsed}<{remaining}{postfix}]"
    return kind(total=total, initial=used, unit=unit, bar_format=layout, dynamic_ncols=True)


def _used(snapshot: Snapshot) -> tuple[float, float, str]:
    """Of the budget's first limit: what is used, what there is, its unit."""
    budget, spent = snapshot.budget, snapshot.spent
    if budget.trials is not None:
        return min(spent.trials, budget.trials), budget.trials, "trials"
    if budget.seconds is not None:
        return int(min(spent.seconds, budget.seconds)), int(budget.seconds), "s"
    assert budget.device_hours is not None
    return min(round(spent.device_seconds / 3600, 2), budget.device_hours), budget.device_hours, "gpu-h"
