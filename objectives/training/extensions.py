"""Where DeepSpeed's compiled ops live.

torch compiles an op in a folder that it guards with a lock file, and a build that is killed leaves the lock behind: every
later rank then waits for ever, in silence. So each run compiles in its own private folder, which is copied from a cache
per user when there is one for these versions, and becomes the cache when there was none. Nobody ever builds in the cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
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
        shutil.copytree(cached, folder)
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
    """Make the ops in a private folder the cache, if there is none yet. A cache that cannot be written is done without."""
    cached = _cache()
    if cached.exists() or not any(folder.rglob("*.so")):
        return
    staging = cached.with_name(f"{cached.name}.{uuid.uuid4().hex}")
    try:
        shutil.copytree(folder, staging, ignore=shutil.ignore_patterns("lock"))
        os.replace(staging, cached)
    except OSError:
        pass  # full, read-only, or another run was first
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(staging)


def _cache() -> Path:
    """The cache folder for this interpreter, these versions and this CPU (ops are compiled for it)."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parts = [sys.version, platform.machine(), sys.prefix, _cpu_flags()]
    parts += [metadata.version(name) for name in ("torch", "deepspeed")]
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    return base / "bo_tuner" / "extensions" / key


def _cpu_flags() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("flags"):
                return line
    return ""
