"""`MeasuredRun`: one config of a table and how it ended; `reading_of` makes it of a line."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from bo_tuner.config import ExtraValue, TrainConfig
from bo_tuner.objectives.lines import CellError, Line, Remarks
from bo_tuner.text import count

__all__ = ["MeasuredRun", "Reading", "reading_of"]

_RECOMPUTED = ("full", "yes", "on", "true")
_MOST_GIB = 1024
"""No device has so much: what is more was told in MiB, or by mistake."""
_PLAIN = "plain"
"""Of a cell with a word of its own, what it says of the others."""
_STAGE = re.compile(r"(?:zero|stage|z)[-_ ]?(\d)|(\d)(?:\.0)?")
_OWN = {field.name for field in fields(TrainConfig)}


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
class Reading:
    """A line of a table, understood."""

    line: Line
    run: MeasuredRun
    """With all pairs in `extra` as dimensions."""
    n_ranks: int
    seq_len: int | None
    """Tokens of a sample; None where the line does not tell."""


def reading_of(line: Line, remarks: Remarks) -> Reading:
    """Understand a line.

    Ranks that share a sample without being tensor-parallel, as those of context parallelism, count as if they were: what is left of
    `num_gpus` beside `dp`, `tp` and `pp`, unless `gbs` says that they have samples of their own.

    Args:
        line: Of a table.
        remarks: Told of what was supposed.

    Raises:
        CellError: It says nothing of a step, or its knobs do not fit the ranks.
    """
    if line.n_cells_too_many:
        more = count(line.n_cells_too_many, "cell")
        raise CellError(f"it has {more} more than the header", line=line.number, column="")
    tensor, depth = line.whole("tp") or 1, line.whole("pp") or 1
    n_ranks, sharing = _ranks(line, tensor * depth)
    data = n_ranks // (tensor * depth * sharing)
    micro_batch, accumulation = _batch(line, data)
    global_batch = line.whole("gbs")
    if sharing > 1 and global_batch == micro_batch * accumulation * data * sharing:
        sharing, data = 1, data * sharing
    samples = micro_batch * accumulation * data
    if global_batch not in (None, samples):
        remarks.add("whose gbs does not count", line.wrong("gbs", f"mbs x gas x dp = {samples}"))
    if sharing > 1:
        beside = line.wrong("num_gpus", f"dp x tp x pp = {n_ranks // sharing}")
        remarks.add("whose ranks beside dp x tp x pp count as tensor-parallel", beside)
    stage, zero_kind = _stage(line)
    recompute = line.text("recompute").lower()
    supposed: dict[str, ExtraValue] = {
        "ranks_beside_tp": str(sharing),
        "zero_kind": zero_kind,
        "recompute_kind": recompute if line.is_set("recompute") and recompute not in _RECOMPUTED else _PLAIN,
    }
    config = TrainConfig(
        zero_stage=stage,  # type: ignore[arg-type]  # checked by the config
        micro_batch_size=micro_batch,
        grad_accum_steps=accumulation,
        pipeline_depth=depth,
        tensor_parallel=tensor * sharing,
        recompute=recompute in _RECOMPUTED,
        extra=tuple((supposed | _extra(line)).items()),
    )
    status = _status(line, remarks)
    memory = remarks.known(line, "mem_gb", _memory_gib)
    run = MeasuredRun(
        config=config,
        status=status,
        step_time_s=_step_time_s(line, samples) if status == "ok" else None,
        memory_bytes=None if memory is None else int(memory * 2**30),
        trial_cost_s=remarks.known(line, "trial_cost_s", Line.positive),
    )
    seq_len = remarks.known(line, "seq_len", Line.whole)
    return Reading(line=line, run=run, n_ranks=n_ranks, seq_len=seq_len or _length(line))


def _ranks(line: Line, model_ranks: int) -> tuple[int, int]:
    """Devices, and how many of them share a sample beside tensor and pipeline parallelism."""
    data = line.whole("dp")
    n_ranks = line.whole("num_gpus") or (data or 0) * model_ranks
    if not n_ranks:
        raise line.wrong("num_gpus", "a whole number of at least 1")
    replica = (data or 1) * model_ranks
    if n_ranks % replica:
        raise line.wrong("num_gpus", f"a multiple of {'dp x ' if data else ''}tp x pp = {replica}")
    return n_ranks, n_ranks // replica if data else 1


def _batch(line: Line, data: int) -> tuple[int, int]:
    """Micro-batch and accumulation; one of them may follow from the samples of a step, and the accumulation is 1 where nothing tells it."""
    micro_batch, accumulation = line.whole("mbs"), line.whole("gas")
    known = (micro_batch or accumulation or 0) * data
    if not known or (micro_batch and accumulation):
        return line.needed("mbs"), accumulation or 1
    samples = line.whole("gbs") or round((line.positive("step_time_s") or 0) * (line.positive("samples_per_s") or 0))
    if not samples:
        return line.needed("mbs"), 1
    if samples % known:
        raise line.wrong("gbs", f"a multiple of {'mbs' if micro_batch else 'gas'} x dp = {known}")
    return micro_batch or samples // known, accumulation or samples // known


def _stage(line: Line) -> tuple[int, str]:
    """ZeRO stage, and what the cell says beside it, as `3-offload` does."""
    text = line.text("zero").lower()
    found = _STAGE.fullmatch(text)
    stage = int((found and (found[1] or found[2])) or (re.findall(r"(?<![-\d])\d", text) or [0])[0])
    if stage > 3 or (not found and text.startswith("-")):
        raise line.wrong("zero", "0, 1, 2 or 3")
    return stage, text if line.is_set("zero") and not found else _PLAIN


def _status(line: Line, remarks: Remarks) -> str:
    """A line with a time and no status completed."""
    status = line.text("status").lower()
    if not status:
        if all(not line.text(column) for column in ("step_time_s", "samples_per_s", "tokens_per_s")):
            raise line.wrong("status", "ok, oom or fail")
        return "ok"
    if status not in ("ok", "oom", "fail"):
        remarks.add("taken for failed", line.wrong("status", "ok, oom or fail"))
    return status


def _step_time_s(line: Line, samples: int) -> float:
    step_time_s = line.positive("step_time_s")
    column = "step_time_s"
    if step_time_s is None and (rate := line.positive("samples_per_s")) is not None:
        step_time_s, column = samples / rate, "samples_per_s"
    if step_time_s is None and (rate := line.positive("tokens_per_s")) is not None:
        step_time_s, column = samples * line.needed("seq_len") / rate, "tokens_per_s"
    if step_time_s is None:
        raise line.wrong(column, "a number above 0")
    if not 1e-9 < step_time_s < 1e9:
        raise line.wrong(column, "that of a step of some seconds")
    return step_time_s


def _length(line: Line) -> int | None:
    """Tokens of a sample, from the two rates."""
    samples_per_s, tokens_per_s = line.positive("samples_per_s"), line.positive("tokens_per_s")
    return round(tokens_per_s / samples_per_s) or None if samples_per_s and tokens_per_s else None


def _memory_gib(line: Line, column: str) -> float | None:
    """Of one device."""
    value = line.positive(column)
    if value is not None and value > _MOST_GIB:
        raise line.wrong(column, f"GiB of one device, at most {_MOST_GIB}")
    return value


def _extra(line: Line) -> dict[str, ExtraValue]:
    """Pairs, and words that stand alone for a switch that is set; a name that is a knob of ours gets another."""
    found: dict[str, ExtraValue] = {}
    for part in filter(None, map(str.strip, line.text("extra").split(";"))):
        name, _, value = (word.strip() for word in part.partition("="))
        found[f"table_{name}" if name in _OWN else name] = value if "=" in part else "set"
    return found
