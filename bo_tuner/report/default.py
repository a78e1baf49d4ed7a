"""Which progress fits where a study runs."""

from __future__ import annotations

import sys
from typing import TextIO

from bo_tuner.engine import Progress
from bo_tuner.report.notebook import NotebookProgress, is_notebook
from bo_tuner.report.progress import LineProgress

__all__ = ["default_progress", "stream_progress"]


def default_progress() -> Progress:
    """A bar in a notebook, else what fits stderr."""
    return NotebookProgress() if is_notebook() else stream_progress(sys.stderr)


def stream_progress(stream: TextIO) -> Progress:
    """The live view on a terminal, plain lines where lines cannot be redrawn."""
    if stream.isatty():
        from rich.console import Console

        from bo_tuner.report.live import LiveProgress

        console = Console(file=stream)
        if console.is_interactive:  # not for TERM=dumb
            return LiveProgress(console)
    return LineProgress(stream)
