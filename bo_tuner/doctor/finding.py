"""`Finding`: what one check saw."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Finding", "Status", "fail", "ok", "warn"]


class Status(enum.StrEnum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    """Trials run, perhaps not well."""
    FAIL = "fail"
    """Trials do not run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the doctor's report."""

    name: str
    """What was looked at."""
    status: Status
    found: str
    """One line."""
    mend: str = ""
    """What to do about it: a command where one does it. Empty when all is well, and only then."""
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The numbers in `found`, for programs; names carry units."""
    log_tail: str = ""
    """What the processes that failed printed last."""

    def __post_init__(self) -> None:
        assert (self.status is Status.OK) != bool(self.mend), f"{self.name}: a problem, and only one, has its mend"

    def to_dict(self) -> dict[str, Any]:
        """One entry of `doctor --json`."""
        return asdict(self)


def ok(name: str, found: str, /, **details: Any) -> Finding:
    """All is well."""
    return Finding(name=name, status=Status.OK, found=found, details=details)


def warn(name: str, found: str, mend: str, /, **details: Any) -> Finding:
    """Trials run, perhaps not well."""
    return Finding(name=name, status=Status.WARN, found=found, mend=mend, details=details)


def fail(name: str, found: str, mend: str, /, **details: Any) -> Finding:
    """Trials do not run."""
    return Finding(name=name, status=Status.FAIL, found=found, mend=mend, details=details)
