"""Fit the constants of the cost model that are called fitted, on the calibration groups alone, and print them.

    python -m benchmarks.fit

Nothing is written: the figures are put into `bo_tuner/hardware/of_cluster.py` and `bo_tuner/models/` by hand, where they are read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.tables import Compared, Guess, calibrates, compared, tables
from bo_tuner.hardware import Reached
from bo_tuner.models.choices import Constants
from bo_tuner.models.software import MEGATRON, NANOTRON

DATA_SETS = ("ultrascale_playbook", "vtrain")
_WORST = (-1.0, 0.8)
"""Residuals of log time count for no more: a fifth of the runs on 256 devices met a network in trouble."""
_NEAR = 2.0
"""Configs within this factor of the best count in full, ..."""
_FAR_WEIGHT = 0.3
"""... slower ones so much."""
_PULL = 1e-3
"""Weight of a constant's distance from its first guess, in units of how uncertain the guess was."""
_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Constant:
    """One number that is fitted."""

    place: str
    """`reached`, `constants`, or a framework."""
    name: str
    """Of the field, or `matmul.H100`, `pipeline_host.0` for a part of it."""
    guess: float
    spread: float
    """Standard deviation of the logarithm of the first guess."""


CONSTANTS = (
    Constant("reached", "matmul.H100", 0.65, 0.15),
    Constant("reached", "matmul.A100", 0.80, 0.15),
    Constant("reached", "half_tokens_of_h100", 100, 1.0),
    Constant("reached", "half_width", 120, 0.7),
    Constant("reached", "attention", 0.4, 0.4),
    Constant("reached", "memory", 0.85, 0.4),
    Constant("reached", "nvlink", 0.7, 0.25),
    Constant("reached", "network", 0.5, 0.4),
    Constant("reached", "near_latency_s", 1e-5, 0.7),
    Constant("reached", "far_latency_s", 2.5e-5, 0.7),
    Constant("constants", "hidden", 0.5, 0.5),
    Constant("constants", "least_shown", 0.15, 0.5),
    Constant("constants", "node_toll", 0.1, 1.0),
    Constant("constants", "rank_toll_s", 5e-5, 1.5),
    Constant("constants", "far_exponent", 1.0, 0.5),
    Constant("constants", "overlap", 3.5, 0.2),
    Constant("nanotron", "host_factor", 15, 1.0),
    Constant("nanotron", "pipeline_host.0", 1.6, 0.5),
    Constant("nanotron", "pipeline_host.1", 0.55, 0.5),
    Constant("nanotron", "exchange_s", 1e-3, 0.7),
    Constant("nanotron", "step_s", 0.03, 1.0),
    Constant("megatron", "host_factor", 10, 1.0),
    Constant("megatron", "exchange_s", 1e-3, 0.7),
    Constant("megatron", "step_s", 0.03, 1.0),
)


def guess_of(values: list[float]) -> Guess:
    """The models with these constants."""
    reached: dict[str, object] = {}
    constants: dict[str, float] = {}
    software: dict[str, dict[str, object]] = {"nanotron": {}, "megatron": {}}
    matmul = dict(Reached().matmul)
    host = [1.0, 1.0]
    for constant, value in zip(CONSTANTS, values, strict=True):
        if constant.name.startswith("matmul."):
            matmul[constant.name.removeprefix("matmul.")] = value
        elif constant.name.startswith("pipeline_host."):
            host[int(constant.name[-1])] = value
        elif constant.place == "reached":
            reached[constant.name] = value
        elif constant.place == "constants":
            constants[constant.name] = value
        else:
            software[constant.place][constant.name] = value
    return Guess(
        reached=replace(Reached(), matmul=matmul, **reached),  # type: ignore[arg-type]  # floats
        constants=replace(Constants(), **constants),
        software={
            "nanotron": replace(NANOTRON, pipeline_host=(host[0], host[1]), **software["nanotron"]),  # type: ignore[arg-type]
            "megatron": replace(MEGATRON, **software["megatron"]),  # type: ignore[arg-type]
        },
    )


def error_of(found: Compared) -> float:
    """Weighted mean of the absolute residuals of log time, beyond 1 % of it."""
    done = found.is_complete
    expected, measured = found.expected_s[done], found.measured_s[done]
    residual = np.clip(np.log(measured / expected), *_WORST)
    per_sample = found.measured_per_sample[done]
    weight = np.where(per_sample <= _NEAR * per_sample.min(), 1.0, _FAR_WEIGHT)
    return float((weight * np.hypot(residual, 0.01)).sum() / weight.sum())


def main() -> None:
    """Coordinate by coordinate, with steps that shrink."""
    known = [[table for table in tables(name) if calibrates(table)] for name in DATA_SETS]

    def loss(logs: list[float]) -> float:
        guess = guess_of([float(np.exp(log)) for log in logs])
        of_sets: list[float] = []
        for group in known:
            found = [compared(table, guess) for table in group]
            weights = [len(table.runs) ** 0.5 for table in group]
            errors = [error_of(one) for one in found if one is not None]
            of_sets.append(float(np.average(errors, weights=weights)))
        pull = sum(
            ((log - np.log(constant.guess)) / constant.spread) ** 2
            for log, constant in zip(logs, CONSTANTS, strict=True)
        )
        return sum(of_sets) / len(of_sets) + _PULL * float(pull)

    logs = [float(np.log(constant.guess)) for constant in CONSTANTS]
    best = loss(logs)
    print(f"first guess: {best:.4f}", file=sys.stderr, flush=True)
    steps = [constant.spread / 2 for constant in CONSTANTS]
    for number in range(_ROUNDS):
        best = _one_round(loss, logs, steps, best)
        print(f"round {number + 1}: {best:.4f}", file=sys.stderr, flush=True)
    for constant, log in zip(CONSTANTS, logs, strict=True):
        print(f"{constant.place:10} {constant.name:20} {np.exp(log):.4g}   (first guess {constant.guess:g})")


def _one_round(loss: Callable[[list[float]], float], logs: list[float], steps: list[float], best: float) -> float:
    """Each constant goes on in the direction that helps, with longer steps while it does; the next round takes shorter ones."""
    for index in range(len(logs)):
        step = steps[index]
        for direction in (step, -step):
            moved = False
            while True:
                tried = [*logs]
                tried[index] += direction * (2 if moved else 1)
                found = loss(tried)
                if found >= best:
                    break
                best, moved = found, True
                logs[index] = tried[index]
            if moved:
                break
        steps[index] = step / 2 if not moved else step
    return best


if __name__ == "__main__":
    main()
