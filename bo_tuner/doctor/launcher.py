"""Whether `tune` would run when it is started as this command was."""

from __future__ import annotations

from bo_tuner.doctor.finding import Finding, fail, ok
from bo_tuner.launcher import launched

__all__ = ["started_by"]


def started_by() -> Finding:
    """One process drives a study; a launcher that starts several would start as many studies."""
    found = launched()
    if found is None:
        return ok("started by", "no launcher of several processes")
    return fail("started by", f"{found.by}, as {found.rank + 1} of {found.n_processes}", found.way_out)
