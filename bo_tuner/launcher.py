"""Whether a launcher of distributed jobs (torchrun, srun, mpirun) started this process as one of several."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from bo_tuner.errors import ConfigError

__all__ = ["Launched", "launched", "refuse_launchers"]

_FIRST_UNREAL_STEP = 0xFFFFFFFA
"""Slurm numbers what is no step of `srun` from here on: shells that salloc opens, batch scripts, external processes (slurm.h)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """One process of several that were started alike."""

    by: str
    """The launcher, as the user calls it."""
    rank: int
    n_processes: int
    way_out: str

    def __str__(self) -> str:
        return f"process {self.rank + 1} of {self.n_processes} that {self.by} started"


_LAUNCHERS = (
    ("torchrun or deepspeed", "RANK", "WORLD_SIZE", "a launcher"),
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "mpirun"),
    ("mpirun", "PMI_RANK", "PMI_SIZE", "mpirun"),
)
"""Name, variables that tell rank and number of processes, and what to leave out."""


def launched(environment: Mapping[str, str] | None = None) -> Launched | None:
    """What a launcher says of this process; None where it was started by itself, or as the only one.

    In Slurm only a step that `srun` started has several processes: a batch script, or a shell of salloc, is one, whatever the
    number of tasks that its job asked for. A WORLD_SIZE without RANK is nobody's.

    Args:
        environment: Of the process; None for this one's.
    """
    variables = os.environ if environment is None else environment
    step = _number(variables, "SLURM_STEP_ID")
    if step is not None and step < _FIRST_UNREAL_STEP:
        n_tasks = _number(variables, "SLURM_STEP_NUM_TASKS") or _number(variables, "SLURM_NTASKS") or 1
        if n_tasks > 1:
            number = _number(variables, "SLURM_PROCID") or 0
            return Launched(by="srun", rank=number, n_processes=n_tasks, way_out="srun -n1 starts it once")
    for by, rank_name, number_name, what in _LAUNCHERS:
        rank, n_processes = _number(variables, rank_name), _number(variables, number_name)
        if rank is not None and n_processes is not None and n_processes > 1:
            return Launched(by=by, rank=rank, n_processes=n_processes, way_out=f"run it without {what}, once")
    return None


def refuse_launchers(environment: Mapping[str, str] | None = None) -> None:
    """A study is driven by one process, which starts its ranks itself.

    Raises:
        ConfigError: This is one of several; each would start a study of its own on the same devices.
    """
    found = launched(environment)
    if found is not None:
        raise ConfigError(
            f"a study must be started by one process, which starts its ranks itself, and this is {found}: {found.way_out} "
            "(--ranks N says how many ranks it starts)"
        )


def _number(variables: Mapping[str, str], name: str) -> int | None:
    value = variables.get(name, "")
    return int(value) if value.isdecimal() else None
