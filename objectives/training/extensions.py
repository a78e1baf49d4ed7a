"""Where DeepSpeed's compiled ops live.

torch compiles an op in a folder that it guards with a lock file, and a build that is killed leaves the lock behind: every
later rank then waits for ever, in silence. So each run compiles in its own private folder, which is copied from a cache
per user when there is one for these versions, and becomes the cache when there was none. Nobody ever builds in the cache.
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
    """A folder for TORCH_EXTENSIONS_DIR inside `run_dir`, filled from the cache where that is possible."""
    folder = run_dir / "extensions"
    cached = _cache()
    if cached.is_dir():
        try:
            shutil.copytree(cached, folder)
        except shutil.Error as error:
            raise OSError(errno.ENOSPC, "cannot be copied, is there room?", str(folder)) from error
        remove_locks(folder)
    else:
        folder.mkdir(mode=0o700)
    return folder


def remove_locks(folder: Path) -> None:
    """Remove build locks from a private folder; no build may be running there."""
    for lock in folder.rglob("lock"):
        lock.unlink(missing_ok=True)


def is_cached() -> bool:
    """Nothing needs compiling."""
    return _cache().is_dir()


def keep(folder: Path) -> None:
    """Make the ops in a private folder the cache, unless they came from there. A cache that cannot be written is done
    without."""
    cached = _cache()
    built = _built_at(folder)
    if not built or built == _built_at(cached):
        return
    staging, old = (cached.with_name(f"{cached.name}.{uuid.uuid4().hex}") for _ in range(2))
    with contextlib.suppress(OSError):  # full, read-only, or another run was first
        shutil.copytree(folder, staging, ignore=shutil.ignore_patterns("lock"))
        with contextlib.suppress(FileNotFoundError):
            cached.rename(old)
        staging.rename(cached)
    for leftover in (staging, old):
        shutil.rmtree(leftover, ignore_errors=True)


def _built_at(folder: Path) -> dict[str, int]:
    """When each op was linked; copies keep that time."""
    return {library.name: library.stat().st_mtime_ns for library in folder.rglob("*.so")}


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
