"""A rank in a fresh interpreter, for when forking is not safe: `python -m ...fresh FD PARENT_PID RANK TARGET SPEC`."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path

from bo_tuner.objectives.launch.channel import Channel
from bo_tuner.objectives.launch.process import die_first, die_with_parent

__all__ = ["main"]


def main(arguments: list[str]) -> None:
    """Run one rank."""
    fd, parent_pid, rank, target, spec = arguments
    die_with_parent(int(parent_pid), with_signal=signal.SIGKILL)
    die_first()
    module, _, name = target.partition(":")
    getattr(importlib.import_module(module), name)(Channel.from_fd(int(fd)), int(rank), Path(spec))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
