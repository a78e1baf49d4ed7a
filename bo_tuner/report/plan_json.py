"""A plan as JSON for programs: up to 100,000 candidates, so rows are filled into a pattern, which an encoder takes three times as long for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from bo_tuner.models.cost import TIME_PARTS
from bo_tuner.models.memory import MEMORY_PARTS
from bo_tuner.models.planner import Plan

__all__ = ["plan_json"]

_ROW = (
    '{"name": "%s", "params": {"micro_batch_size": %d, "grad_accum_steps": %d, %s}, "samples_per_s": %.6g, "step_time_s": %.6g, "time_s": {'
    + ", ".join(f'"{part}": %.6g' for part in TIME_PARTS)
    + '}, "memory_bytes": {'
    + ", ".join(f'"{part}": %d' for part in (*MEMORY_PARTS, "total"))
    + '}, "fits": %s}'
)
_OF_ROW = ("micro_batch_size", "grad_accum_steps")


def plan_json(plan: Plan, n: int | None = None) -> Iterator[str]:
    """What `plan --json` prints, piece by piece: the question, the families that fell, and the candidates, best first, one a line.

    Args:
        plan: What to tell.
        n: How many candidates; None for all.
    """
    head = json.dumps({**_question(plan), "rejected": _rejected(plan)}, indent=2)
    yield head.removesuffix("\n}")
    yield ',\n  "candidates": ['
    between = "\n    "
    for row in _rows(plan, n):
        yield between
        yield row
        between = ",\n    "
    yield "\n  ]\n}\n"


def _question(plan: Plan) -> dict[str, Any]:
    problem = plan.problem
    return {
        "model": problem.profile.name,
        "n_parameters": problem.profile.n_parameters,
        "seq_len": problem.profile.seq_len,
        "element_bytes": problem.profile.element_bytes,
        "device": problem.hardware.name,
        "n_ranks": problem.n_ranks,
        "n_nodes": problem.n_nodes,
        "rates_from": problem.hardware.source,
        "global_batch": plan.global_batch,
        "memory_limit_bytes": plan.limit_bytes,
        "unit": "samples/s",
        "is_predicted": True,
        "n_candidates": len(plan),
        "n_fitting": plan.n_fitting,
    }


def _rejected(plan: Plan) -> list[dict[str, str]]:
    return [
        {"layout": family.layout.layout_name, "cause": family.cause, "reason": family.reason}
        for family in plan.families
    ]


def _rows(plan: Plan, n: int | None) -> Iterator[str]:
    order = plan.order[:n]
    fixed = [
        json.dumps({name: value for name, value in layout.params().items() if name not in _OF_ROW})[1:-1]
        for layout in plan.layouts
    ]
    step_s = plan.step_s[order]
    memory = np.array([getattr(plan.memory, part)[order] for part in MEMORY_PARTS], dtype=np.int64)
    columns = [
        plan.names(n),
        plan.choices.micro_batch[order].tolist(),
        plan.choices.accumulation[order].tolist(),
        [fixed[layout] for layout in plan.of_layout[order]],
        (plan.global_batch / step_s).tolist(),
        step_s.tolist(),
        *(getattr(plan.times, part)[order].tolist() for part in TIME_PARTS),
        *memory.tolist(),
        memory.sum(axis=0).tolist(),
        ["true" if fits else "false" for fits in plan.fits[order]],
    ]
    return (_ROW % row for row in zip(*columns, strict=True))
