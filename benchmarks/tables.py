"""The measured tables that calibrate the models, and those that test them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from bo_tuner.errors import ConfigError
from bo_tuner.hardware import REACHED, Reached
from bo_tuner.models.choices import Choices, Constants, Flags, Floats, Problem
from bo_tuner.models.cost import times_of
from bo_tuner.models.memory import memory_of
from bo_tuner.models.software import Software, framework_of
from bo_tuner.objectives.prior import problem_of
from bo_tuner.objectives.table import MeasuredTable, group_sizes

__all__ = ["Compared", "Guess", "calibrates", "compared", "tables"]

MEASURED = Path(__file__).parent / "measured"
_CALIBRATION = {
    "ultrascale_playbook": (
        "1B-16xH100",
        "1B-64xH100",
        "1B-256xH100",
        "3B-16xH100",
        "3B-256xH100",
        "8B-16xH100",
        "80B-32xH100",
    ),
    "vtrain": ("single-h2048", "multi-h3072"),
}
"""By data set, beginnings of the names of its groups. All others test, and set no constant."""


def calibrates(table: MeasuredTable) -> bool:
    """A constant may have been fitted on it."""
    return table.name.startswith(_CALIBRATION.get(table.data_set, ("\0",)))


def tables(data_set: str, *, fewest: int = 10) -> list[MeasuredTable]:
    """Its groups of at least `fewest` lines, as far as they hold a complete run."""
    path = MEASURED / data_set / "runs.csv"
    found: list[MeasuredTable] = []
    for name, n_lines in group_sizes(path).items():
        if n_lines >= fewest:
            try:
                found.append(MeasuredTable.read(path, name))
            except ConfigError:
                continue
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Guess:
    """Constants of the models, to try others than the usual."""

    reached: Reached = REACHED
    constants: Constants = field(default_factory=Constants)
    software: dict[str, Software] | None = None
    """By name of the framework; None for the usual."""

    def problem(self, table: MeasuredTable) -> Problem | None:
        """What the models are told of a table; None where device or shape are not known."""
        software = framework_of(table.data_set)
        problem, _ = problem_of(table, reached=self.reached, software=(self.software or {}).get(software.name))
        return problem and replace(problem, constants=self.constants)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One table, expected and measured; one element a config."""

    table: MeasuredTable
    card_bytes: int
    expected_s: Floats
    """Of a step."""
    expected_bytes: Floats
    measured_s: Floats
    """NaN where it did not complete."""
    measured_bytes: Floats
    """NaN where the table does not tell."""
    global_batch: Floats
    is_complete: Flags

    @property
    def expected_per_sample(self) -> Floats:
        """Seconds."""
        return self.expected_s / self.global_batch

    @property
    def measured_per_sample(self) -> Floats:
        """Seconds; NaN where it did not complete."""
        return self.measured_s / self.global_batch


def compared(table: MeasuredTable, guess: Guess | None = None) -> Compared | None:
    """Expect every config of a table; None where device or shape are not known."""
    problem = (guess or Guess()).problem(table)
    if problem is None:
        return None
    choices = Choices.of(table.configs, table.n_ranks)
    return Compared(
        table=table,
        card_bytes=problem.hardware.memory_bytes,
        expected_s=times_of(problem, choices).total,
        expected_bytes=memory_of(problem, choices).total,
        measured_s=np.array([run.step_time_s or np.nan for run in table.runs]),
        measured_bytes=np.array([run.memory_bytes or np.nan for run in table.runs]),
        global_batch=choices.global_batch,
        is_complete=np.array([run.is_complete for run in table.runs]),
    )
