"""Predicted against measured on this machine: memory and step time of configs of bert-tiny, after a calibration of a few seconds; then,
of memory limits among the measured peaks, which configs are rightly predicted to exceed them, and trials of others under such a limit.

    python -m benchmarks.here [--configs 40] [--edge 8] [--seq-len 128] [--json]

Nothing else may run on the machine: predictions are of ranks that have their cores to themselves.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from benchmarks.limits import EdgeTrial, run_at_edge, verdicts_at
from benchmarks.trials import trials_of
from benchmarks.validation import rank_correlation
from bo_tuner.config import TrainConfig
from bo_tuner.models.choices import Choices, Floats, Problem
from bo_tuner.models.cost import times_of
from bo_tuner.models.memory import memory_of
from bo_tuner.models.software import DEEPSPEED
from bo_tuner.objectives.calibration import calibrate
from bo_tuner.objectives.training import DeepSpeedBackEnd

MODEL = "bert-tiny"
_STEPS = 10
_PERCENTILES = (30, 50, 70)
"""Of the measured peaks, where limits are set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One config, predicted and measured."""

    name: str
    kind: str
    """Of layout, which the model prices each in its own way."""
    predicted_s: float
    measured_s: float
    predicted_bytes: float
    measured_bytes: float
    samples: int
    """Of a step."""


def kind_of(config: TrainConfig) -> str:
    """Where predictions go wrong in common."""
    if config.pipeline_depth > 1:
        return "pipelines"
    return "ZeRO 3" if config.zero_stage == 3 else "ZeRO 0 to 2"


def space() -> list[TrainConfig]:
    """All that two ranks can run, in the same disorder every time."""
    back_end = DeepSpeedBackEnd()
    every = [
        TrainConfig(
            zero_stage=stage,  # type: ignore[arg-type]
            micro_batch_size=micro_batch,
            grad_accum_steps=accumulation,
            pipeline_depth=depth,
            recompute=recompute,
        )
        for stage, micro_batch, accumulation, depth, recompute in itertools.product(
            (0, 1, 2, 3), (1, 2, 4, 8, 16, 32), (1, 2, 4), (1, 2), (False, True)
        )
    ]
    legal = [config for config in every if back_end.legal(config)]
    return random.Random(0).sample(legal, len(legal))


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line a config, then the medians."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.here", description=__doc__)
    parser.add_argument("--configs", type=int, default=40, help="how many are run")
    parser.add_argument("--edge", type=int, default=8, help="how many others are run under a limit")
    parser.add_argument("--seq-len", type=int, default=128, help="tokens of a sample")
    parser.add_argument("--json", action="store_true", help="print the same for programs")
    options = parser.parse_args(argv)
    readings: list[Reading] = []
    with trials_of(MODEL, seq_len=options.seq_len, device="cpu", n_ranks=2, traces=True) as trials:
        facts = trials.facts
        if facts.profile is None:
            sys.exit(f"{MODEL} must have a profile: {facts.unprofiled_because}")
        hardware = calibrate(trials.server, trials.cluster, precision=trials.workload.precision).hardware(
            trials.cluster
        )
        problem = Problem(profile=facts.profile, hardware=hardware, software=DEEPSPEED, n_ranks=2)
        configs = space()
        for config in configs[: options.configs]:
            _, measured = trials.run(config, replace(trials.limits, max_steps=_STEPS))
            choices = Choices.of([config], 2)
            reading = Reading(
                name=config.name,
                kind=kind_of(config),
                predicted_s=float(times_of(problem, choices).total[0]),
                measured_s=measured.step_time_s,
                predicted_bytes=float(memory_of(problem, choices).total[0]),
                measured_bytes=float(max(measured.peak_memory_bytes)),
                samples=config.global_batch(2),
            )
            readings.append(reading)
            print(
                f"{reading.name:22} {reading.measured_s * 1e3:8.1f} ms, predicted {reading.predicted_s * 1e3:8.1f} "
                f"({reading.predicted_s / reading.measured_s:4.2f})   {reading.measured_bytes / 2**20:6.0f} MiB, predicted "
                f"{reading.predicted_bytes / 2**20:6.0f} ({reading.predicted_bytes / reading.measured_bytes:4.2f})",
                file=sys.stderr,
                flush=True,
            )
        others = configs[options.configs :]
        edge = run_at_edge(
            trials.objective,
            others,
            memory_of(problem, Choices.of(others, 2)).total,
            limits=replace(
                trials.limits, memory_bytes=int(np.median([reading.measured_bytes for reading in readings]))
            ),
            n_trials=options.edge,
        )
    found = summary(readings)
    verdicts = [
        verdicts_at(
            percentile,
            predicted_bytes=[reading.predicted_bytes for reading in readings],
            measured_bytes=[reading.measured_bytes for reading in readings],
        )
        for percentile in _PERCENTILES
    ]
    if options.json:
        lists: dict[str, Sequence[Any]] = {"readings": readings, "limits": verdicts, "edge": edge}
        told = {name: [asdict(one) for one in rows] for name, rows in lists.items()}
        json.dump({**found, **told}, sys.stdout, indent=1)
        print()
        return
    print("| on this machine | reached | aim |")
    print("| --- | --- | --- |")
    print(f"| memory, median error | {found['memory_error']:.3f} | 0.10 |")
    print(f"| step time, median error | {found['time_error']:.3f} | 0.20 |")
    print(f"| step time, median of predicted over measured | {found['time_bias']:.2f} | |")
    print(f"| rank correlation of step time | {found['rank_step']:.2f} | 0.90 |")
    print(f"| rank correlation of time per sample | {found['rank_sample']:.2f} | 0.90 |")
    for kind in sorted({reading.kind for reading in readings}):
        of_kind = [reading for reading in readings if reading.kind == kind]
        print(f"| step time of {kind} ({len(of_kind)}), the same | {summary(of_kind)['time_bias']:.2f} | |")
    for one in verdicts:
        print(
            f"| limit at percentile {one.percentile} of peaks ({one.limit_bytes / 2**20:.0f} MiB, {one.n_over} over it), precision / "
            f"recall | {_share(one.precision)} / {_share(one.recall)} | 0.95 / 0.90 |"
        )
    n_right = sum(trial.is_as_predicted for trial in edge)
    print(f"| trials of others under the middle one, as predicted | {n_right} of {len(edge)} | |")
    print()
    for trial in edge:
        print(_line(trial))


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _line(trial: EdgeTrial) -> str:
    return (
        f"{trial.name}: predicted {trial.predicted_bytes / trial.limit_bytes:.2f} of the limit, {trial.outcome.value}"
        f"{'' if trial.is_as_predicted else ' (wrong)'}"
    )


def summary(readings: Sequence[Reading]) -> dict[str, float]:
    """Medians of relative errors, and Spearman's correlations of step time and of time per sample."""
    predicted, measured, samples = (
        np.array(column)
        for column in zip(*((one.predicted_s, one.measured_s, one.samples) for one in readings), strict=True)
    )
    time = predicted / measured
    memory = np.array([reading.predicted_bytes / reading.measured_bytes for reading in readings])
    return {
        "configs": len(readings),
        "memory_error": float(np.median(np.abs(memory - 1))),
        "time_error": float(np.median(np.abs(time - 1))),
        "time_bias": float(np.median(time)),
        "rank_step": _rank(measured, predicted),
        "rank_sample": _rank(measured / samples, predicted / samples),
    }


def _rank(measured: Floats, predicted: Floats) -> float:
    found = rank_correlation(measured, predicted)
    return float("nan") if found is None else found


if __name__ == "__main__":
    main()
