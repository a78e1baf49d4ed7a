"""`MeasuredTable`: published measurements of one tuning problem, read from a table."""

from __future__ import annotations

import csv
import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bo_tuner.config import ExtraValue, TrainConfig
from bo_tuner.errors import ConfigError
from bo_tuner.text import count, did_you_mean

__all__ = ["MeasuredRun", "MeasuredTable", "group_sizes"]

_NEEDED = ("group", "model", "gpu", "num_gpus", "mbs", "status")
_NO_KNOBS = ("section", "experiments", "tuning_time_s", "best_exp", "iteration_s", "space")
"""Of `extra`: what was found, or where it stood; the rest are switches that somebody set."""
_MOST_NAMED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """One config and how it ended."""

    config: TrainConfig
    status: str
    """As the table has it: `ok`, `oom`, or what else became of it, as `fail`."""
    step_time_s: float | None
    """Of an optimizer step; None unless it completed."""
    memory_bytes: int | None
    """Peak of a device, as the source states it."""
    trial_cost_s: float | None
    """What the source spent on it."""

    @property
    def is_complete(self) -> bool:
        """False where it ran out of memory, or failed for a reason that the table does not say."""
        return self.status == "ok"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTable:
    """One group of a table: the same model on the same devices, each config once.

    The schema: a line a run with `group`, `model`, `params_b` (billions), `gpu`, `num_gpus`, `nodes`, `seq_len`, `gbs` (samples),
    the knobs `dp`, `tp`, `pp`, `mbs`, `gas`, `zero`, `recompute` and `extra` (`key=value;key=value`), `status` (ok, oom or fail),
    and `step_time_s`, `samples_per_s`, `mem_gb`, `trial_cost_s` where they are known.
    """

    path: Path
    data_set: str
    name: str
    """Of the group."""
    model: str
    n_parameters: int
    """0 where the table does not tell."""
    gpu: str
    """As the table calls it; several are joined by +."""
    n_ranks: int
    n_nodes: int
    seq_len: int | None
    """Tokens of a sample."""
    runs: tuple[MeasuredRun, ...]
    shape: Mapping[str, str]
    """The line of `models.csv` beside the table; empty where there is none."""
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
        rows = _rows(path)
        names = list(dict.fromkeys(row["group"] for row in rows))
        if group is None and len(names) > 1:
            more = ", ..." if len(names) > _MOST_NAMED else ""
            raise ConfigError(
                f"--group must be one of the {len(names)} groups of {path}: {', '.join(names[:_MOST_NAMED])}{more}"
            )
        wanted = names[0] if group is None else group
        if wanted not in names:
            raise ConfigError(
                f"--group must be one of the {count(len(names), 'group')} of {path}; got {wanted!r}{did_you_mean(wanted, names)}"
            )
        return _table(path, wanted, [row for row in rows if row["group"] == wanted])

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
        return max(
            run.config.global_batch(self.n_ranks) / run.step_time_s for run in self.runs if run.step_time_s is not None
        )


def group_sizes(path: Path) -> dict[str, int]:
    """Lines of every group of a table.

    Raises:
        ConfigError: The table cannot be read.
    """
    return dict(Counter(row["group"] for row in _rows(path)))


def _rows(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"--replay must be a table in CSV; {path} cannot be read: {error}") from error
    if not rows:
        raise ConfigError(f"--replay must be a table with a line for every run; {path} has none")
    missing = [name for name in _NEEDED if name not in rows[0]]
    if missing:
        raise ConfigError(f"--replay must be a table with the columns {', '.join(_NEEDED)}; {path} lacks {missing[0]}")
    return rows


def _table(path: Path, name: str, rows: Sequence[Mapping[str, str]]) -> MeasuredTable:
    first = rows[0]
    switches = _switches(rows)
    n_ranks = _whole(first, "num_gpus", 1)
    best: dict[TrainConfig, MeasuredRun] = {}
    n_unusable = n_repeated = 0
    for row in rows:
        run = _run(row, switches, n_ranks)
        if run is None:
            n_unusable += 1
            continue
        known = best.get(run.config)
        n_repeated += known is not None
        if known is None or _is_better(run, known):
            best[run.config] = run
    if not any(run.is_complete for run in best.values()):
        raise ConfigError(f"--group must be one with a complete run; {name} of {path} has none that can be used")
    notes = []
    if n_unusable:
        notes.append(f"{count(n_unusable, 'line')} left out: no time, or ranks that do not divide")
    if n_repeated:
        notes.append(f"{count(n_repeated, 'line')} of a config that stands there before: the faster counts")
    return MeasuredTable(
        path=path,
        data_set=first.get("dataset") or path.parent.name,
        name=name,
        model=first["model"],
        n_parameters=int((_number(first, "params_b") or 0) * 1e9),
        gpu="+".join(dict.fromkeys(row["gpu"] for row in rows)),
        n_ranks=n_ranks,
        n_nodes=_whole(first, "nodes", 1),
        seq_len=_whole(first, "seq_len", 0) or None,
        runs=tuple(best.values()),
        shape=_shape(path.with_name("models.csv"), first["model"]),
        notes=tuple(notes),
    )


def _run(row: Mapping[str, str], switches: Iterable[str], n_ranks: int) -> MeasuredRun | None:
    """None for a line that says nothing of a step, or whose knobs do not fit the ranks."""
    given = _extra(row)
    try:
        config = TrainConfig(
            zero_stage=_whole(row, "zero", 0),  # type: ignore[arg-type]  # checked by the config
            micro_batch_size=_whole(row, "mbs", 1),
            grad_accum_steps=_whole(row, "gas", 1),
            pipeline_depth=_whole(row, "pp", 1),
            tensor_parallel=_whole(row, "tp", 1),
            recompute=row.get("recompute") == "full",
            extra=tuple((name, given.get(name, "")) for name in switches),
        )
        data_parallel = config.data_parallel(n_ranks)
    except ConfigError:
        return None
    if data_parallel != _whole(row, "dp", data_parallel):
        return None
    status = (row["status"] or "").strip().lower()
    step_time_s = _number(row, "step_time_s")
    rate = _number(row, "samples_per_s")
    if step_time_s is None and rate:
        step_time_s = config.global_batch(n_ranks) / rate
    if status == "ok" and not (step_time_s and step_time_s > 0):
        return None
    memory = _number(row, "mem_gb")
    return MeasuredRun(
        config=config,
        status=status,
        step_time_s=step_time_s if status == "ok" else None,
        memory_bytes=None if memory is None else int(memory * 2**30),
        trial_cost_s=_number(row, "trial_cost_s"),
    )


def _is_better(run: MeasuredRun, known: MeasuredRun) -> bool:
    if run.step_time_s is None or known.step_time_s is None:
        return run.step_time_s is not None
    return run.step_time_s < known.step_time_s


def _switches(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Names in `extra` whose values differ within the group."""
    values: dict[str, set[ExtraValue | None]] = {}
    extras = [_extra(row) for row in rows]
    for name in {name for extra in extras for name in extra}:
        values[name] = {extra.get(name) for extra in extras}
    return sorted(name for name, seen in values.items() if len(seen) > 1 and name not in _NO_KNOBS)


def _extra(row: Mapping[str, str]) -> dict[str, ExtraValue]:
    pairs = (part.partition("=") for part in (row.get("extra") or "").split(";") if "=" in part)
    return {name.strip(): value.strip() for name, _, value in pairs}


def _whole(row: Mapping[str, str], column: str, default: int) -> int:
    value = _number(row, column)
    return default if value is None else int(value)


def _number(row: Mapping[str, str], column: str) -> float | None:
    try:
        value = float(row.get(column) or "")
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _shape(path: Path, model: str) -> Mapping[str, str]:
    if not path.is_file():
        return {}
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return next((row for row in csv.DictReader(file) if (row.get("model") or "").lower() == model.lower()), {})
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} must be a table of model shapes in CSV, and cannot be read: {error}") from error
