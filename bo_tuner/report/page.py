"""What the report's page says, as plain texts for its template."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bo_tuner.budget import Spent
from bo_tuner.config import TrainConfig
from bo_tuner.errors import ConfigError
from bo_tuner.objectives.training import DeepSpeedBackEnd, deepspeed_config
from bo_tuner.objectives.training.dimensions import dimensions_found
from bo_tuner.outcome import Measurement
from bo_tuner.report.answer import Answer, Gain, answer_of, ratio
from bo_tuner.report.export import check_exportable, why_no_job
from bo_tuner.report.frontier import frontiers, layout_label
from bo_tuner.report.standing import as_deepspeed_counts, confirmation_text, plus_minus, remarks, without_value
from bo_tuner.space import default_config
from bo_tuner.storage import Manifest
from bo_tuner.text import count, gib, percent, seconds
from bo_tuner.trial import TrialRecord, best_of, last_limit_bytes, pareto_front

if TYPE_CHECKING:
    import optuna

__all__ = ["ReportedStudy", "begun", "page_texts"]

_TONES = {"complete": "good", "pruned": "calm", "oom": "memory", "guarded": "memory", "host_oom": "memory"}
"""How the badge of an outcome looks; the others are `bad`."""
_NONE = "\N{EN DASH}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedStudy:
    """All that a report tells of."""

    name: str
    records: Sequence[TrialRecord]
    manifest: Manifest
    spent: Spent
    budget: str = ""
    """As given; empty before the first run."""
    stop_reason: str = ""
    """Of the last run; empty while it runs, and after it was killed."""
    storage_url: str | None = None
    """For the launch command, without its password; None for the default database."""
    folder: Path = Path()
    """Of the study's files."""
    started: datetime | None = None
    """When the first trial began."""


def begun(study: optuna.Study) -> datetime | None:
    """When the first trial of a study began; None before that."""
    return min(
        (trial.datetime_start for trial in study.get_trials(deepcopy=False) if trial.datetime_start), default=None
    )


def page_texts(study: ReportedStudy, *, now: datetime) -> dict[str, Any]:
    """The template's variables, but for figures, style and scripts."""
    manifest, records = study.manifest, study.records
    workload, cluster = manifest.workload, manifest.cluster
    candidates = manifest.space.candidates(cluster, DeepSpeedBackEnd())
    answer = answer_of(records, default_config(candidates))
    return {
        "name": study.name,
        "warning": manifest.origin.warning,
        "subtitle": f"{workload.model.name}, {workload.seq_len} tokens a sample, {workload.precision}, {workload.optimizer}",
        "cluster": str(cluster),
        "standing": _standing(study),
        "own_value": manifest.goal.measure.heading if manifest.goal.has_own_value else "",
        "answer": _answer(answer, study) if answer else None,
        "why_nothing": _why_nothing(records),
        "layouts": _layouts(records),
        "trials": _trials(records, n_ranks=cluster.n_ranks),
        "facts": _facts(study, n_candidates=len(candidates), now=now),
    }


def _standing(study: ReportedStudy) -> str:
    spent = f"{count(study.spent.trials, 'trial')} in {_duration(study.spent.seconds)}"
    if study.stop_reason:
        return f"{spent}; stopped: {study.stop_reason} ({study.budget})"
    of_budget = f" of {study.budget}" if study.budget else ""
    return f"{spent}{of_budget}; still running, or stopped before its end"


def _answer(answer: Answer, study: ReportedStudy) -> dict[str, Any]:
    config, measured = answer.best.config, answer.measurement
    manifest = study.manifest
    low, high = answer.best.samples_per_s_interval or (0.0, 0.0)
    settings, reason = _settings(config, study)
    return {
        "kind": f"{manifest.goal.measure.superlative} config that fits",
        "name": config.name,
        "trial": answer.best.number,
        "choices": _choices(config, manifest.cluster.n_ranks),
        "rate": _number(answer.best.standing_samples_per_s or 0.0),
        "own_value": answer.best.beside.removeprefix(", "),
        "interval": f"{_number(low)} to {_number(high)} with 95 %, from {count(len(measured.slowest_s), 'step')}",
        "confirmation": confirmation_text(answer.best, manifest.origin),
        "is_confirmed": bool(answer.best.is_confirmed),
        "deepspeed_counts": as_deepspeed_counts(measured),
        "tokens": _number(measured.tokens_per_s),
        "step": f"{seconds(measured.step_time_s)} (median {seconds(measured.median_step_time_s)})",
        "drew": _drew(measured),
        "is_loss_finite": measured.is_loss_finite,
        "throttling": ", ".join(measured.throttling),
        "gains": _gains(answer),
        "memory": _memory(answer),
        "why_no_job": reason,
        "command": _command(study),
        "is_default_storage": study.storage_url is None,
        "hides_password": "***" in (study.storage_url or ""),
        "deepspeed": settings,
    }


def _settings(config: TrainConfig, study: ReportedStudy) -> tuple[str, str]:
    """The DeepSpeed config as text, empty where there is none; and why no job can be written, empty where one can."""
    space, workload = study.manifest.space, study.manifest.workload
    try:
        check_exportable(config, space.dimensions)
        dimensions = dimensions_found(space, workload, folder=study.folder)
        cluster = study.manifest.cluster
        settings = deepspeed_config(
            config, workload, n_ranks=cluster.n_ranks, device=cluster.device, dimensions=dimensions
        )
    except ConfigError as error:
        return "", str(error)
    return json.dumps(settings, indent=2), why_no_job(config, workload, study.manifest.origin, dimensions)


def _drew(measured: Measurement) -> str:
    """What the devices drew, where they tell."""
    if measured.power_w is None:
        return ""
    j_per_sample = measured.power_w / measured.samples_per_s
    return f"{measured.power_w:.0f} W over all devices, {j_per_sample:.3g} J a sample"


def _choices(config: TrainConfig, n_ranks: int) -> list[tuple[str, str]]:
    """Every dimension that a reader may turn, by name."""
    rows = [
        ("ZeRO stage", str(config.zero_stage)),
        ("micro-batch", str(config.micro_batch_size)),
        ("accumulation", str(config.grad_accum_steps)),
        ("global batch", str(config.global_batch(n_ranks))),
        (
            "pipeline",
            f"{config.pipeline_depth} deep, {config.pipeline_schedule}" if config.pipeline_depth > 1 else "none",
        ),
        ("recompute", "yes" if config.recompute else "no"),
    ]
    if config.tensor_parallel > 1:
        rows.append(("tensor parallel", str(config.tensor_parallel)))
    if config.offload != "none":
        rows.append(("offload", config.offload))
    return rows + [(name, str(value)) for name, value in config.extra]


def _gains(answer: Answer) -> list[dict[str, str]]:
    if answer.first_is_default:
        return [_gain(answer.over_default, "over the default config", "; it was also the first that fitted")]
    return [
        _gain(answer.over_default, "over the default config"),
        _gain(answer.over_first, "over the first that fitted"),
    ]


def _gain(gain: Gain, label: str, also: str = "") -> dict[str, str]:
    return {
        "label": f"Gain {label}",
        "factor": ratio(gain.factor) if gain.factor is not None else _NONE,
        "text": f"{gain.text}{also}",
    }


def _memory(answer: Answer) -> dict[str, Any]:
    """The margin, in words and as the part of the limit that is used."""
    peak, limit, margin = answer.peak_bytes, answer.limit_bytes, answer.margin_bytes
    if peak is None or limit is None or margin is None:
        return {"margin": _NONE, "text": "peak or limit is not known", "used_pct": None, "is_over": False}
    margin_pct = 100 * abs(margin) / limit
    return {
        "margin": f"{gib(abs(margin))} ({percent(margin_pct)})",
        "text": f"peak {gib(peak)} of {gib(limit)} a rank"
        + (": the limit was lowered since, and this config is over it" if margin < 0 else ""),
        "used_pct": round(min(100 * peak / limit, 100), 1),
        "is_over": margin < 0,
    }


def _command(study: ReportedStudy) -> str:
    storage = f" --storage {shlex.quote(study.storage_url)}" if study.storage_url else ""
    return f"bo-tuner export {shlex.quote(study.name)}{storage} --out job && job/launch.sh"


def _why_nothing(records: Sequence[TrialRecord]) -> str:
    """Why there is no best."""
    ended = [record.result for record in records if record.result is not None]
    if not ended:
        return "No trial has ended yet."
    if without_value(records):
        return f"No trial can be the best: {without_value(records)}."
    n_memory = sum(result.outcome.is_memory for result in ended)
    if n_memory == len(ended):
        limit = f" in {gib(ended[-1].limit_bytes)} a rank" if ended[-1].limit_bytes else ""
        return (
            f"Nothing fitted{limit}: {count(len(ended), 'trial')} ran out of memory. Raise --memory-limit or --budget, "
            "lower --seq-len, or use more --ranks."
        )
    last = next(result for result in reversed(ended) if not result.outcome.is_memory)
    return f"No trial of {len(ended)} completed, {n_memory} for want of memory; the last of the others ended as {last.outcome.value}: {last.reason}"


def _layouts(records: Sequence[TrialRecord]) -> list[dict[str, str]]:
    """One row a layout: its best, and its edge of memory."""
    best = best_of(records)
    return [
        {
            "label": layout_label(edge.layout),
            "trials": str(edge.n_trials),
            "rate": _number(edge.best.standing_samples_per_s or 0.0) if edge.best else _NONE,
            "value": edge.best.goal.cell(edge.best.standing) if edge.best else _NONE,
            "name": edge.best.config.name if edge.best else _NONE,
            "is_best": "yes" if best and edge.best and best.number == edge.best.number else "",
            "fits": str(edge.fits) if edge.fits is not None else "none ran",
            "fails": f"{edge.fails} (trial {edge.proof})" if edge.fails is not None else "none seen",
        }
        for edge in frontiers(records, last_limit_bytes(records))
    ]


def _trials(records: Sequence[TrialRecord], *, n_ranks: int) -> list[dict[str, Any]]:
    """One row a trial; for every cell its text and, where that differs, what it sorts by."""
    best, front = best_of(records), {record.number for record in pareto_front(records)}
    rows: list[dict[str, Any]] = []
    for record in records:
        result, value, of_goal = record.result, record.samples_per_s, record.goal.value(record)
        measured = record.told.measurement if record.told and value is not None else None
        outcome = result.outcome.value if result else "no result"
        peak = record.peak_memory_bytes or 0
        batch = record.config.global_batch(n_ranks)
        n_retries = len(record.attempts)
        rows.append(
            {
                "number": record.number,
                "name": record.config.name,
                "is_best": best is not None and best.number == record.number,
                "is_front": record.number in front,
                "batch": batch,
                "outcome": outcome,
                "tone": _TONES.get(outcome, "bad") if result else "calm",
                "rate": (f"{_number(value)} {plus_minus(record)}", value)
                if value is not None and measured
                else (_NONE, -1),
                "value": (_NONE, -1) if of_goal is None else (record.goal.measure.number(of_goal), of_goal),
                "step": (seconds(measured.step_time_s), measured.step_time_s) if measured else (_NONE, -1),
                "peak": (gib(peak), peak) if peak else (_NONE, -1),
                "wall": (f"{record.wall_s:.1f} s", record.wall_s) if result else (_NONE, -1),
                "reason": (remarks(record) if result else "it runs, or was interrupted")
                + (f" (after {count(n_retries, 'earlier attempt')})" if n_retries else ""),
                "log": result.log_tail.strip() if result else "",
            }
        )
    return rows


def _facts(study: ReportedStudy, *, n_candidates: int, now: datetime) -> list[tuple[str, list[tuple[str, str]]]]:
    manifest = study.manifest
    workload, cluster, space = manifest.workload, manifest.cluster, manifest.space
    limit = last_limit_bytes(study.records)
    versions = dict(manifest.versions)
    host = versions.pop("host", None)
    hardware = [
        ("device", cluster.device_name),
        ("ranks", f"{cluster.n_ranks} ({cluster.device})"),
        ("memory of a rank", gib(cluster.memory_bytes)),
        ("memory limit", f"{gib(limit)} a rank" if limit else "no trial has told it yet"),
    ]
    if cluster.device == "cpu":
        hardware.append(("threads of a rank", str(cluster.threads_per_rank)))
    if host:
        hardware.append(("host", host))
    return [
        (
            "Workload",
            [
                ("model", workload.model.name),
                ("parameters", f"{workload.n_parameters:,}"),
                ("sequence length", f"{workload.seq_len} tokens"),
                ("precision", workload.precision),
                ("optimizer", workload.optimizer),
            ],
        ),
        ("Hardware", hardware),
        (
            "Search",
            [
                ("objective", str(manifest.goal)),
                ("ZeRO stages", ", ".join(map(str, space.zero_stages))),
                ("pipeline depths", ", ".join(map(str, space.pipeline_depths))),
                *(
                    [("tensor parallel", ", ".join(map(str, space.tensor_parallel)))]
                    if max(space.tensor_parallel) > 1
                    else []
                ),
                ("micro-batch", f"1 to {space.max_micro_batch}"),
                ("accumulation", f"up to {space.max_grad_accum}"),
                ("global batch", str(space.batch_rule)),
                ("candidates", f"{n_candidates:,}"),
                ("seed", str(manifest.seed)),
                ("budget", study.budget or "none given yet"),
                ("spent", f"{count(study.spent.trials, 'trial')}, {_spent_time(study)}"),
                ("first trial", f"{study.started:%Y-%m-%d %H:%M}" if study.started else "none yet"),
            ],
        ),
        ("Versions", [*versions.items(), ("report made", f"{now:%Y-%m-%d %H:%M}")]),
    ]


def _spent_time(study: ReportedStudy) -> str:
    noun = "rank-hours" if study.manifest.cluster.device == "cpu" else "GPU-hours"
    return f"{_duration(study.spent.seconds)}, {study.spent.device_seconds / 3600:.3g} {noun}"


def _number(value: float) -> str:
    """Four significant digits, with thousands parted."""
    return f"{value:.4g}" if value < 1000 else f"{value:,.0f}"


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"
