"""`last_words`: what a process that is gone, or silent, printed last."""

from __future__ import annotations

from pathlib import Path

__all__ = ["last_words"]


def last_words(log: Path, *, longest: int | None = 300) -> str:
    """The end of a sentence that tells the last line of `log`, or nothing where it has none.

    Args:
        log: Of the process; it may be missing.
        longest: Characters of that line at most; None for all.
    """
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"; it last printed: {last[:longest]}" if last else ""
