"""How long a plan takes for 10,000 GPUs and about 100,000 candidates, and to tell it as JSON.

    python -m benchmarks.plan

Seconds of one core (process time), the best of three.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from bo_tuner.cluster import Cluster
from bo_tuner.hardware import hardware_of
from bo_tuner.models.choices import Problem
from bo_tuner.models.planner import Plan, plan
from bo_tuner.models.shape import profile_of_shape
from bo_tuner.models.software import DEEPSPEED
from bo_tuner.models.stages import stages_of
from bo_tuner.report.plan_json import plan_json

__all__ = ["large_plan", "main"]

Result = TypeVar("Result")
_REPEATS = 3
_BATCH = 2**8 * 3**4 * 5**4 * 7 * 11 * 13
"""A number with many divisors: each makes a candidate of every layout."""


def large_plan() -> Plan:
    """GPT-3 with 175 billion parameters on 1,250 nodes of 8 H100."""
    cluster = Cluster.described("1250x8xH100")
    hardware = hardware_of(cluster, "bf16")
    profile = profile_of_shape(
        name="gpt-3",
        seq_len=2048,
        layers=96,
        hidden=12_288,
        heads=96,
        ffn=4 * 12_288,
        vocab=51_200,
        gated_mlp=False,
        tied_embeddings=True,
        causal=True,
        n_positions=2048,
    )
    stages_of.cache_clear()
    return plan(
        Problem(
            profile=profile,
            hardware=hardware,
            software=DEEPSPEED,
            n_ranks=cluster.n_ranks,
        ),
        global_batch=_BATCH,
        limit_bytes=int(0.92 * cluster.memory_bytes),
        schedules=("1f1b", "2bw"),
        tensor_degrees=(1, 2, 4, 8),
    )


def main() -> None:
    """Print what each part takes."""
    found, plan_s = _timed(large_plan)
    text, json_s = _timed(lambda: sum(map(len, plan_json(found))))
    print(f"{len(found):,} candidates on {found.problem.n_ranks:,} GPUs, {found.n_fitting:,} fit")
    print(f"plan {plan_s:.2f} s, {text / 1e6:.0f} MB of JSON {json_s:.2f} s, together {plan_s + json_s:.2f} s")


def _timed(call: Callable[[], Result]) -> tuple[Result, float]:
    found = [_once(call) for _ in range(_REPEATS)]
    return found[0][0], min(time_s for _, time_s in found)


def _once(call: Callable[[], Result]) -> tuple[Result, float]:
    started = time.process_time()
    result = call()
    return result, time.process_time() - started


if __name__ == "__main__":
    main()
