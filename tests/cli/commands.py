"""Runs commands one after another, each in a process of its own, forked from this one, which has imported them.

Started with pipes as stdin and stdout. A request is a line of JSON; it is answered by a line with the id of the process, and at
its end by one with its exit code. In that process this program ends as the installed script does.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from bo_tuner.cli import main

LATE = (
    "alembic.config",
    "jinja2",
    "optuna.storages._rdb.models",
    "optuna.storages._rdb.storage",
    "optuna_dashboard",
    "plotly.graph_objects",
    "pydantic.type_adapter",
    "pydantic.types",
    "rich.live",
    "sqlalchemy.dialects.sqlite",
)
"""What most commands import when they come to need it. Not torch, which many must do without."""


def become(request: dict[str, Any]) -> None:
    """Take on what the process of a command has: arguments, folder, environment and files."""
    sys.argv = request["command"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for fd, file in enumerate((os.devnull, request["stdout"], request["stderr"])):
        opened = os.open(file, os.O_WRONLY if fd else os.O_RDONLY)
        os.dup2(opened, fd)
        os.close(opened)


for name in LATE:
    importlib.import_module(name)
gc.freeze()  # what is not looked through stays shared
for line in sys.stdin:
    pid = os.fork()
    if not pid:
        become(json.loads(line))
        sys.exit(main())
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
