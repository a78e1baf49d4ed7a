"""`OomKills`: how many processes the kernel killed for memory where a trial's ranks run.

The kernel counts in the control group of the process that it kills, whether the group's own limit was met or the machine was
full; a count for the machine as a whole also rises with what others did.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

__all__ = ["OomKills", "counter_of"]

_FIELD = "oom_kill"
"""The name of the count in all three places."""


class OomKills:
    """Counts kills in the groups of processes, each from the moment that it was first noted."""

    def __init__(self, *, proc: Path = Path("/proc")) -> None:
        """Know no process yet; `proc` is where proc(5) is mounted."""
        self._proc = proc
        self._before: dict[Path, int] = {}

    def note(self, pid: int) -> None:
        """Count in the group that a living process is in now, too."""
        counter = counter_of(pid, proc=self._proc) or self._proc / "vmstat"
        self._before.setdefault(counter, _read(counter) or 0)

    def since(self) -> int:
        """Processes killed so far."""
        return sum((_read(counter) or before) - before for counter, before in self._before.items())


def counter_of(pid: int, *, proc: Path = Path("/proc")) -> Path | None:
    """The file with the count of the control group of a process: `memory.oom_control` of version 1 or `memory.events` of
    version 2 (cgroups(7)); None where neither is readable, as in the root group of version 2."""
    try:
        groups = (proc / str(pid) / "cgroup").read_text(encoding="utf-8")
        mounts = list(_mounts((proc / "self" / "mountinfo").read_text(encoding="utf-8")))
    except OSError:
        return None
    for line in groups.splitlines():
        number, controllers, group = line.split(":", 2)
        if "memory" in controllers.split(","):
            kind, name = "cgroup", "memory.oom_control"
        elif number == "0" and not controllers:
            kind, name = "cgroup2", "memory.events"
        else:
            continue
        for type_, options, root, point in mounts:
            if type_ != kind or (kind == "cgroup" and "memory" not in options):
                continue
            # A container may see its own group as the root of the mount.
            inside = PurePosixPath(group)
            if inside.is_relative_to(root):
                inside = inside.relative_to(root)
            for folder in (point / str(inside).lstrip("/"), point):
                if _read(folder / name) is not None:
                    return folder / name
    return None


def _mounts(mountinfo: str) -> Iterator[tuple[str, set[str], str, Path]]:
    """(type, options of the file system, its root, mount point) of every mount; the columns stand in proc(5)."""
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        root, point = left.split()[3:5]
        type_, _, options = right.split(maxsplit=2)
        yield type_, set(options.split(",")), root, Path(point)


def _read(counter: Path) -> int | None:
    with contextlib.suppress(OSError):
        for line in counter.read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(" ")
            if name == _FIELD:
                return int(value)
    return None
