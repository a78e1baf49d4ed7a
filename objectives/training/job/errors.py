"""`JobError`: what a user's model, data or optimizer does wrong."""

from __future__ import annotations

__all__ = ["JobError"]


class JobError(ValueError):
    """The user's model, data or optimizer cannot be used; the text is one line that says why."""
