"""Where compiled ops live: DeepSpeed's, and those of the user's model.

torch compiles an op in a folder that it guards with a lock file, and a build that is killed leaves the lock behind: every
later rank then waits for ever, in silence. So each run compiles in its own private folder. It is filled from a cache per user for
these versions, and with what the user's own TORCH_EXTENSIONS_DIR has beside that; what is built in it goes into the cache. Nobody ever
builds in the cache, or in the user's folder.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import uuid
from importlib import metadata
from pathlib import Path

__all__ = ["is_cached", "keep", "private_copy", "remove_locks"]


def private_copy(run_dir: Path) -> Path:
    """A folder for TORCH_EXTENSIONS_DIR inside `run_dir`, filled with what was built before."""
    folder = run_dir / "extensions"
    folder.mkdir(mode=0o700, parents=True)
    own = os.environ.get("TORCH_EXTENSIONS_DIR")
    try:
        for source in (_cache(), *([Path(own)] if own else [])):
            _add_ops(source, folder)
    except shutil.Error as error:
        raise OSError(errno.ENOSPC, "cannot be copied, is there room?", str(folder)) from error
    return folder


def remove_locks(folder: Path) -> None:
    """Remove build locks from a private folder; no build may be running there."""
    for lock in folder.rglob("lock"):
        lock.unlink(missing_ok=True)


def is_cached() -> bool:
    """Nothing needs compiling."""
    return _cache().is_dir()


def keep(folder: Path) -> None:
    """Put the ops that were built in a private folder into the cache. A cache that cannot be written is done without."""
    cached = _cache()
    if _built_at(folder).items() <= _built_at(cached).items():
        return
    staging, old = (cached.with_name(f"{cached.name}.{uuid.uuid4().hex}") for _ in range(2))
    with contextlib.suppress(OSError):  # full, read-only, or another run was first
        staging.mkdir(mode=0o700, parents=True)
        for source in (folder, cached):
            _add_ops(source, staging)
        with contextlib.suppress(FileNotFoundError):
            cached.rename(old)
        staging.rename(cached)
    for leftover in (staging, old):
        shutil.rmtree(leftover, ignore_errors=True)


def _add_ops(source: Path, folder: Path) -> None:
    """Copy the ops that `folder` has not."""
    for op in _ops(source):
        if not (folder / op.name).exists():
            shutil.copytree(op, folder / op.name)


def _ops(folder: Path) -> list[Path]:
    """The folders of ops that are built; the build of one with a lock goes on, or was killed."""
    if not folder.is_dir():
        return []
    return [op for op in folder.iterdir() if any(op.rglob("*.so")) and not any(op.rglob("lock"))]


def _built_at(folder: Path) -> dict[str, int]:
    """When each op was linked; copies keep that time."""
    return {
        f"{op.name}/{library.name}": library.stat().st_mtime_ns for op in _ops(folder) for library in op.rglob("*.so")
    }


def _cache() -> Path:
    """The cache folder for this interpreter, these versions and this CPU: whatever makes torch compile afresh."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parts = [sys.version, platform.machine(), sys.prefix, _cpu_flags()]
    parts += [metadata.version(name) for name in ("torch", "deepspeed", "ninja")]
    parts.append(_compiler())
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    return base / "bo_tuner" / "extensions" / key


def _compiler() -> str:
    compiler = os.environ.get("CXX", "c++")
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        told = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=10, check=True)
        return told.stdout
    return compiler


def _cpu_flags() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("flags"):
                return line
    return ""
