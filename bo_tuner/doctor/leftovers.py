"""What killed processes left behind: build locks that hang every later build, and shared memory.

Nothing is removed here: each finding gives the command.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Collection
from pathlib import Path

from bo_tuner.doctor.finding import Finding, ok, warn
from bo_tuner.doctor.machine import SHARED_BYTES_PER_RANK
from bo_tuner.text import count, gib

__all__ = ["extension_folders", "extension_locks", "in_use", "shared_segments"]


def extension_folders() -> list[Path]:
    """Where torch compiles extensions for this user, by its own rule, and where our compiled ops are kept."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    own = os.environ.get("TORCH_EXTENSIONS_DIR")
    return [Path(own) if own else caches / "torch_extensions", caches / "bo_tuner" / "extensions"]


def extension_locks(folders: Collection[Path]) -> Finding:
    """Build locks that no process holds.

    A build keeps its `lock` file open (torch/utils/file_baton.py). A build that is killed leaves it there, closed, and every
    later process that needs the same op waits for ever, in silence.
    """
    name = "extension locks"
    locks = {lock for folder in folders for lock in folder.rglob("lock") if lock.is_file()}
    stale = locks - in_use(locks)
    if stale:
        found = f"{count(len(stale), 'lock')} that no build holds: a program that needs the op waits there for ever"
        return warn(name, found, _remove(stale), locks=sorted(map(str, stale)))
    return ok(name, f"none that is stale in {' and '.join(map(str, folders))}")


def shared_segments(*, folder: Path = Path("/dev/shm"), uid: int | None = None) -> Finding:
    """Shared memory of DeepSpeed and NCCL whose processes are gone; their own exit would have removed it.

    Args:
        folder: Where shared memory shows as files.
        uid: Whose; None for this user's.
    """
    name = "shared segments"
    owner = os.getuid() if uid is None else uid
    segments = set(folder.glob(f"deepspeed_allreduce_buffer_{owner}_*"))
    segments |= {segment for segment in folder.glob("nccl-*") if _owner(segment) == owner}  # the name does not tell
    stale = segments - in_use(segments)
    if stale:
        n_bytes = sum(segment.stat().st_size for segment in stale)
        whose = " and ".join(
            program for program, begin in (("DeepSpeed", "deepspeed"), ("NCCL", "nccl")) if _any_begins(stale, begin)
        )
        found = f"{count(len(stale), 'segment')} of {whose}, {gib(n_bytes)}, that no process uses"
        return warn(name, found, _remove(stale), segments=sorted(map(str, stale)), used_bytes=n_bytes)
    return ok(name, f"none that DeepSpeed or NCCL left behind in {folder} ({gib(SHARED_BYTES_PER_RANK)} a rank)")


def _owner(file: Path) -> int | None:
    with contextlib.suppress(OSError):  # just removed
        return file.stat().st_uid
    return None


def _any_begins(files: Collection[Path], begin: str) -> bool:
    return any(file.name.startswith(begin) for file in files)


def in_use(files: Collection[Path]) -> set[Path]:
    """Those of `files` that some process has open or mapped, as far as this user may see (proc(5))."""
    wanted = {str(file.resolve()): file for file in files}
    used: set[Path] = set()
    for process in Path("/proc").glob("[0-9]*") if wanted else ():
        with contextlib.suppress(OSError):  # gone, or another user's
            for entry in os.scandir(process / "fd"):
                with contextlib.suppress(OSError):
                    used |= {wanted[target] for target in [os.readlink(entry.path)] if target in wanted}
            maps = (process / "maps").read_text(encoding="utf-8", errors="replace")
            used |= {file for target, file in wanted.items() if target in maps}
    return used


def _remove(files: Collection[Path]) -> str:
    return shlex.join(["rm", *sorted(map(str, files))])
