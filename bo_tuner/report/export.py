"""Handing over: a DeepSpeed config, a script that trains with it, and the command that launches it."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from bo_tuner.cluster import Cluster
from bo_tuner.config import TrainConfig
from bo_tuner.dimension import Dimension
from bo_tuner.errors import ConfigError, StoreError
from bo_tuner.objectives.training import DeepSpeedBackEnd, deepspeed_config
from bo_tuner.objectives.training.environment import rank_environment
from bo_tuner.objectives.training.sources import JobSources, job_of
from bo_tuner.origin import REAL, Origin
from bo_tuner.trial import TrialRecord, last_limit_bytes
from bo_tuner.workload import Workload

__all__ = ["check_exportable", "launch_command", "why_no_job", "write_job"]


def check_exportable(config: TrainConfig, dimensions: Sequence[Dimension] = ()) -> None:
    """Refuse what only a table has run.

    Raises:
        ConfigError: DeepSpeed, as we drive it, cannot run it.
    """
    if not DeepSpeedBackEnd(dimensions).legal(config):
        raise ConfigError(
            f"DeepSpeed must be able to run what is exported, and {config.name} has {_beyond(config)}: "
            "choose another config of the study with --rank"
        )


def _beyond(config: TrainConfig) -> str:
    if config.tensor_parallel > 1:
        return "tensor parallelism"
    if config.extra:
        return f"switches of its table's framework ({', '.join(name for name, _ in config.extra)})"
    return "a combination that it refuses"


def why_no_job(config: TrainConfig, workload: Workload, origin: Origin, dimensions: Sequence[Dimension] = ()) -> str:
    """Why no job can be written that trains with `config`; empty where it can."""
    try:
        check_exportable(config, dimensions)
    except ConfigError as error:
        return str(error)
    if origin.kind == "replay":
        return (
            f"a job needs the model itself, and the table only names {workload.model.name}: "
            "export without --out prints the DeepSpeed config"
        )
    return ""


def launch_command(cluster: Cluster, recorded: Mapping[str, str] | None) -> str:
    """What starts the exported train.py on `cluster`, for a shell where `job` is its folder and `PYTHON` the interpreter; without its own arguments.

    On several nodes it is to be run on each, where NODE_RANK counts them from 0 and MASTER_ADDR is the first.

    Args:
        cluster: On what.
        recorded: The user's variables when the study began, where they are known.
    """
    variables = rank_environment(cluster, recorded)
    environment = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
    where = "--standalone"
    if cluster.n_nodes > 1:
        rank, address = "${NODE_RANK:?counts the nodes from 0}", "${MASTER_ADDR:?is the address of node 0}"
        where = f'--nnodes {cluster.n_nodes} --node-rank "{rank}" --master-addr "{address}"'
    run = f'-m torch.distributed.run {where} --nproc-per-node {cluster.n_ranks // cluster.n_nodes} "$job/train.py"'
    return f'{environment} "$PYTHON" {run}'


def write_job(
    folder: Path,
    record: TrialRecord,
    workload: Workload,
    cluster: Cluster,
    *,
    study_folder: Path,
    origin: Origin = REAL,
    dimensions: Sequence[Dimension] = (),
    environment: Mapping[str, str] | None = None,
) -> list[Path]:
    """Write ds_config.json, model.json, train.py with the job package it needs, and launch.sh.

    Args:
        folder: Where to; made if missing.
        record: Of the config to hand over.
        workload: What the study trains.
        cluster: On what.
        study_folder: Where the study keeps models and functions that came as Python objects.
        origin: Whether anything was measured.
        dimensions: The user's own, with their functions.
        environment: The user's variables when the study began, as its manifest has them.

    Returns:
        The files written, launch.sh last.

    Raises:
        StoreError: The folder cannot be written, or the study's folder lacks the model.
        ConfigError: There is nothing that could train so.
    """
    reason = why_no_job(record.config, workload, origin, dimensions)
    if reason:
        raise ConfigError(reason)
    settings = deepspeed_config(
        record.config, workload, n_ranks=cluster.n_ranks, device=cluster.device, dimensions=dimensions
    )
    templates = resources.files("bo_tuner.report.templates")
    command = launch_command(cluster, environment)
    launch = templates.joinpath("launch.sh").read_text(encoding="utf-8").replace("@COMMAND@", command)
    launch = launch.replace("@PYTHON@", shlex.quote(sys.executable))
    if origin.warning:
        launch = launch.replace("#!/usr/bin/env bash\n", f"#!/usr/bin/env bash\n# {origin.warning}\n", 1)
    kept = JobSources.of(workload, study_folder)
    if workload.model.source == "function":  # called again where it trains, so that its own weights are there
        kept = replace(kept, model={"function": workload.model.function})
    missing = [file for file in kept.pickles if not file.is_file()]
    if missing:
        raise StoreError(
            f"{missing[0]} must hold what this study was given in Python, and is not there: run tune once more where it ran, "
            "or export from its result"
        )
    job = job_of(kept, record.config, workload, seed=0)
    facts = {
        "job": _with_names(job, kept),
        "device": cluster.device,
        "measured": {
            **({} if origin.is_real else {"warning": origin.warning}),
            "config": record.config.name,
            "samples_per_s": record.samples_per_s if origin.is_real else None,
            "objective": record.goal.to_dict(),
            "value": record.goal.value(record) if origin.is_real else None,
            "confirmed": record.is_confirmed,
            "peak_memory_bytes": record.peak_memory_bytes,
            "memory_limit_bytes": last_limit_bytes([record]),
            "on": str(cluster),
        },
    }
    files = {
        "ds_config.json": json.dumps(settings, indent=2) + "\n",
        "model.json": json.dumps(facts, indent=2) + "\n",
        **_job_package(),
        "train.py": templates.joinpath("train.py").read_text(encoding="utf-8"),
        "launch.sh": launch,
    }
    try:
        (folder / "job").mkdir(parents=True, exist_ok=True)
        kept.copied_to(folder)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
        (folder / "launch.sh").chmod(0o755)
    except OSError as error:
        raise StoreError(f"--out must be a folder that can be written, and {folder} is not: {error}") from error
    return [*(folder / file.name for file in kept.pickles), *(folder / name for name in files)]


def _job_package() -> dict[str, str]:
    """The code that was measured, by its place in the exported folder."""
    package = resources.files("bo_tuner.objectives.training.job")
    return {
        f"job/{entry.name}": entry.read_text(encoding="utf-8")
        for entry in sorted(package.iterdir(), key=lambda entry: entry.name)
        if entry.name.endswith(".py")
    }


def _with_names(job: dict[str, Any], sources: JobSources) -> dict[str, Any]:
    """The job with pickles by their bare names, which train.py looks for beside itself."""
    names = {str(file): file.name for file in sources.pickles}

    def named(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: named(part) for key, part in value.items()}
        return names.get(value, value) if isinstance(value, str) else value

    found: dict[str, Any] = named(job)
    return found
