"""Handing over: a DeepSpeed config, a script that trains with it, and the command that launches it."""

from __future__ import annotations

import json
import shlex
import sys
from importlib import resources
from pathlib import Path

from bo_tuner.cluster import Cluster
from bo_tuner.errors import StoreError
from bo_tuner.objectives.training import deepspeed_config
from bo_tuner.objectives.training.objective import rank_environment
from bo_tuner.trial import TrialRecord
from bo_tuner.workload import Workload

__all__ = ["launch_command", "write_job"]


def launch_command(cluster: Cluster) -> str:
    """What starts the exported train.py on `cluster`, for a shell where `job` is its folder and `PYTHON` the interpreter; without its own arguments."""
    environment = " ".join(f"{name}={shlex.quote(value)}" for name, value in rank_environment(cluster).items())
    run = f'-m torch.distributed.run --standalone --nproc-per-node {cluster.n_ranks} "$job/train.py"'
    return f'{environment} "$PYTHON" {run}'


def write_job(folder: Path, record: TrialRecord, workload: Workload, cluster: Cluster) -> list[Path]:
    """Write ds_config.json, model.json, train.py with the job it needs, and launch.sh.

    Returns:
        The files written, launch.sh last.

    Raises:
        StoreError: The folder cannot be written.
    """
    settings = deepspeed_config(record.config, workload, n_ranks=cluster.n_ranks)
    templates = resources.files("bo_tuner.report.templates")
    job = resources.files("bo_tuner.objectives.training").joinpath("job.py").read_text(encoding="utf-8")
    launch = templates.joinpath("launch.sh").read_text(encoding="utf-8").replace("@COMMAND@", launch_command(cluster))
    launch = launch.replace("@PYTHON@", shlex.quote(sys.executable))
    facts = {
        "architecture": dict(workload.model.architecture),
        "seq_len": workload.seq_len,
        "device": cluster.device,
        "measured": {
            "config": record.config.name,
            "samples_per_s": record.samples_per_s,
            "peak_memory_bytes": record.result.peak_memory_bytes if record.result else None,
            "on": str(cluster),
        },
    }
    files = {
        "ds_config.json": json.dumps(settings, indent=2) + "\n",
        "model.json": json.dumps(facts, indent=2) + "\n",
        "job.py": job,
        "train.py": templates.joinpath("train.py").read_text(encoding="utf-8"),
        "launch.sh": launch,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
        (folder / "launch.sh").chmod(0o755)
    except OSError as error:
        raise StoreError(f"--out must be a folder that can be written, and {folder} is not: {error}") from error
    return [folder / name for name in files]
