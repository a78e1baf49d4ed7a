"""`MeasuredTable`: published measurements of one tuning problem, read from a table."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from bo_tuner.config import ExtraValue, TrainConfig
from bo_tuner.errors import ConfigError
from bo_tuner.objectives.lines import CellError, Line, Remarks, read_lines
from bo_tuner.objectives.measured_run import MeasuredRun, Reading, reading_of
from bo_tuner.text import count, did_you_mean

__all__ = ["MeasuredRun", "MeasuredTable", "group_sizes"]

_NEEDED = ("group", "model", "gpu", "num_gpus", "mbs", "status")
_COLUMNS = (
    *("dataset", "group", "model", "params_b", "gpu", "num_gpus", "nodes", "seq_len", "gbs"),
    *("dp", "tp", "pp", "mbs", "gas", "zero", "recompute", "extra", "status"),
    *("step_time_s", "tokens_per_s", "samples_per_s", "tflops_per_gpu", "mfu", "mem_gb", "trial_cost_s", "note"),
)
_NO_KNOBS = ("section", "experiments", "tuning_time_s", "best_exp", "iteration_s", "space")
"""Of `extra`: what was found, or where it stood; the rest are switches that somebody set."""
_MOST_NAMED = 8
_FEW = 8
"""Lines that may well have a value each of a switch."""
_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTable:
    """One group of a table: the same model on the same devices, each config once.

    The schema: a line a run with `group`, `model`, `params_b` (billions), `gpu`, `num_gpus`, `nodes`, `seq_len`, `gbs` (samples),
    the knobs `dp`, `tp`, `pp`, `mbs`, `gas`, `zero`, `recompute` and `extra` (`key=value;key=value`), `status` (ok, oom or fail),
    and `step_time_s`, `samples_per_s` or `tokens_per_s`, `mem_gb`, `trial_cost_s` where they are known.
    """

    path: Path
    data_set: str
    name: str
    """Of the group."""
    model: str
    """As the table calls it; several are joined by +."""
    n_parameters: int
    """0 where the table does not tell."""
    gpu: str
    """As the table calls it; several are joined by +, and it may not tell."""
    n_ranks: int
    n_nodes: int | None
    """None where the table does not tell."""
    seq_len: int | None
    """Tokens of a sample."""
    runs: tuple[MeasuredRun, ...]
    shape: Line | None
    """Of the model in `models.csv` beside the table; None where there is none."""
    notes: tuple[str, ...] = ()
    """What was left out or put together."""

    @classmethod
    def read(cls, path: Path, group: str | None = None) -> MeasuredTable:
        """Read one group.

        Args:
            path: A table in CSV.
            group: Its name; None where the table holds only one.

        Raises:
            ConfigError: The table cannot be read, lacks a column, or has no such group or none with a complete run.
        """
        lines = _lines(path)
        names = list(dict.fromkeys(line.text("group") for line in lines))
        wanted = names[0] if group is None else " ".join(group.split())
        if wanted not in names or (group is None and len(names) > 1):
            got = "" if group is None else f"; got {group!r}{did_you_mean(wanted, names)}"
            more = ", ..." if len(names) > _MOST_NAMED else ""
            raise ConfigError(
                f"--group must be one of the {count(len(names), 'group')} of {path}: {', '.join(names[:_MOST_NAMED])}{more}{got}"
            )
        return _table(path, wanted or path.stem, [line for line in lines if line.text("group") == wanted])

    @property
    def configs(self) -> tuple[TrainConfig, ...]:
        """In the order of the table."""
        return tuple(run.config for run in self.runs)

    @property
    def digest(self) -> str:
        """Tells the same problem with the same figures again, wherever the table lies."""
        rows = [self.model, self.gpu, self.n_ranks, self.n_nodes, self.seq_len, *self.runs]
        return hashlib.sha256("\n".join(map(repr, rows)).encode()).hexdigest()[:16]

    @property
    def best_samples_per_s(self) -> float:
        """Of the fastest run."""
        return max(rate for run in self.runs if (rate := self.samples_per_s(run)) is not None)

    def samples_per_s(self, run: MeasuredRun) -> float | None:
        """Of one of its runs; None unless it completed."""
        return run.config.global_batch(self.n_ranks) / run.step_time_s if run.step_time_s is not None else None


def group_sizes(path: Path) -> dict[str, int]:
    """Lines of every group of a table.

    Raises:
        ConfigError: The table cannot be read.
    """
    return dict(Counter(line.text("group") for line in _lines(path)))


def _lines(path: Path) -> list[Line]:
    try:
        lines = read_lines(path)
    except ConfigError as error:
        raise ConfigError(f"--replay must be a table in CSV; {error}") from error
    if not lines:
        raise ConfigError(f"--replay must be a table with a line for every run; {path} has none")
    missing = [name for name in _NEEDED if name not in lines[0].cells]
    if missing:
        raise ConfigError(f"--replay must be a table with the columns {', '.join(_NEEDED)}; {path} lacks {missing[0]}")
    return lines


def _table(path: Path, name: str, lines: Sequence[Line]) -> MeasuredTable:
    remarks = Remarks()
    read = list(_readings(lines, remarks))
    n_ranks = next((n for n, _ in Counter(reading.n_ranks for reading in read).most_common(1)), 1)
    runs = [reading.run for reading in read if reading.n_ranks == n_ranks]
    for reading in read:
        if reading.n_ranks != n_ranks:
            remarks.add("left out", reading.line.wrong("num_gpus", f"{n_ranks}, as in most lines"))
    seq_len = _first(reading.seq_len for reading in read)
    for reading in read:
        if reading.seq_len not in (None, seq_len):
            remarks.add("whose seq_len does not count", reading.line.wrong("seq_len", f"{seq_len}, as before"))
    best = _each_once(runs)
    n_nodes = _first(remarks.known(line, "nodes", Line.whole) for line in lines)
    billions = _first(remarks.known(line, "params_b", Line.positive) for line in lines)
    told = list(remarks.texts)
    if not any(run.is_complete for run in best):
        why = "".join(f"; {text}" for text in told)
        raise ConfigError(f"--group must be one with a complete run; {name} of {path} has none that can be used{why}")
    if len(best) < len(runs):
        unread = [
            cell for cell in lines[0].cells if cell not in _COLUMNS and len({line.text(cell) for line in lines}) > 1
        ]
        hint = f" (not read: {', '.join(unread)}; switches belong into extra)" if unread else ""
        n_repeated = count(len(runs) - len(best), "line")
        told.append(f"{n_repeated} of a config that stands there before: the faster counts{hint}")
    model = _joined(lines, "model")
    return MeasuredTable(
        path=path,
        data_set=lines[0].text("dataset") or path.parent.name,
        name=name,
        model=model,
        n_parameters=int((billions or 0) * 1e9),
        gpu=_joined(lines, "gpu"),
        n_ranks=n_ranks,
        n_nodes=n_nodes,
        seq_len=seq_len,
        runs=best,
        shape=_shape(path.with_name("models.csv"), model),
        notes=tuple(told),
    )


def _readings(lines: Iterable[Line], remarks: Remarks) -> Iterator[Reading]:
    for line in lines:
        try:
            yield reading_of(line, remarks)
        except CellError as error:
            remarks.add("left out", error)


def _first(values: Iterable[_Number | None]) -> _Number | None:
    """The first that is known."""
    return next((value for value in values if value is not None), None)


def _joined(lines: Iterable[Line], column: str) -> str:
    return "+".join(dict.fromkeys(filter(None, (line.text(column) for line in lines)))) or "unnamed"


def _each_once(runs: Sequence[MeasuredRun]) -> tuple[MeasuredRun, ...]:
    """The runs with the switches that tell them apart; of a config that stands there twice the faster."""
    switches = _switches(runs)
    best: dict[TrainConfig, MeasuredRun] = {}
    for place, run in enumerate(runs):
        config = replace(run.config, extra=tuple((name, values[place]) for name, values in switches.items()))
        before = best.get(config)
        if before is None or _is_better(run, before):
            best[config] = replace(run, config=config)
    return tuple(best.values())


def _is_better(run: MeasuredRun, before: MeasuredRun) -> bool:
    if run.step_time_s is None or before.step_time_s is None:
        return run.step_time_s is not None
    return run.step_time_s < before.step_time_s


def _switches(runs: Sequence[MeasuredRun]) -> dict[str, list[ExtraValue]]:
    """Of the pairs in `extra` those whose values differ, by name, with the value of each run; of several that always change together one.

    What is another in every line of many, where the knobs tell all lines apart, is no switch, but the number of a run, or a result.
    """
    given = [dict(run.config.extra) for run in runs]
    are_apart = _FEW < len({replace(run.config, extra=()) for run in runs}) == len(runs)
    found: dict[tuple[int, ...], tuple[str, list[ExtraValue]]] = {}
    for name in sorted({name for pairs in given for name in pairs} - set(_NO_KNOBS)):
        values = [pairs.get(name, "") for pairs in given]
        places = {value: place for place, value in enumerate(dict.fromkeys(values))}
        if len(places) > 1 and not (are_apart and len(places) == len(runs)):
            found.setdefault(tuple(places[value] for value in values), (name, _in_order(values)))
    return dict(found.values())


def _in_order(values: list[ExtraValue]) -> list[ExtraValue]:
    """As numbers, if all are and more than two differ; one below 0 stands for something else, as a rule."""
    if len(set(values)) <= 2:
        return values
    try:
        numbers = [float(value) for value in values]
    except ValueError:
        return values
    if not all(0 <= number < math.inf for number in numbers):
        return values
    return [*map(int, numbers)] if all(number.is_integer() for number in numbers) else [*numbers]


def _shape(path: Path, model: str) -> Line | None:
    if not path.is_file():
        return None
    return next((line for line in read_lines(path) if line.text("model").lower() == model.lower()), None)
