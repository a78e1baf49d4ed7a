"""How well a trial's interval holds: one config is measured again and again, each time by processes of its own.

As in a study, a first config is run three times, which shows what launches differ by. Then come the measured runs: the rate of each,
the interval that it claims, and whether that holds the median of all of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import replace
from typing import Any

from benchmarks.trials import trials_of
from bo_tuner.cluster import Cluster
from bo_tuner.config import TrainConfig
from bo_tuner.launches import Launch, LaunchNoise, prior_of
from bo_tuner.outcome import Measurement

AIM_HELD = 0.9
"""Of the runs, whose interval holds the median of all."""
AIM_HALF_WIDTH = 0.03
"""Median half-width of the intervals, relative."""
_N_FIRST = 3


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run everything; returns what `--json` prints."""
    config = TrainConfig(
        zero_stage=options.zero_stage, micro_batch_size=options.micro_batch, grad_accum_steps=options.accumulation
    )
    with trials_of(options.model, seq_len=options.seq_len, device=options.device, n_ranks=options.ranks) as trials:
        limits = replace(trials.limits, max_steps=options.max_steps, precision_target=options.precision_target)
        first = [trials.run(TrainConfig(), replace(limits, data_draw=draw))[1] for draw in range(_N_FIRST)]
        noise = prior_of(trials.cluster.device).given(
            [[Launch.of(run.step_time_s, run.step_time_interval_s) for run in first]]
        )
        runs: list[Measurement] = []
        for number in range(1, options.runs + 1):
            runs.append(trials.run(config, limits)[1])
            print(
                f"run {number} of {options.runs}: {runs[-1].samples_per_s:.4g} samples/s", file=sys.stderr, flush=True
            )
        return _report(config, trials.cluster, noise, runs)


def _report(config: TrainConfig, cluster: Cluster, noise: LaunchNoise, runs: list[Measurement]) -> dict[str, Any]:
    truth = statistics.median(run.samples_per_s for run in runs)
    rows: list[dict[str, Any]] = []
    for run in runs:
        within = run.step_time_interval_s
        step_low, step_high = noise.another(run.step_time_s, within)
        low, high = run.global_batch / step_high, run.global_batch / step_low
        rows.append(
            {
                "samples_per_s": run.samples_per_s,
                "interval": [low, high],
                "half_width": (step_high - step_low) / 2 / run.step_time_s,
                "half_width_of_steps_alone": (within[1] - within[0]) / 2 / run.step_time_s,
                "n_warmup": run.n_warmup,
                "n_steps": len(run.slowest_s),
                "holds": low <= truth <= high,
            }
        )
    rates = [run.samples_per_s for run in runs]
    return {
        "config": config.name,
        "on": str(cluster),
        "launches_differ_by": {"sd": noise.sd, "degrees_of_freedom": noise.n_free},
        "median_samples_per_s": truth,
        "spread": statistics.stdev(rates) / truth,
        "held": sum(row["holds"] for row in rows) / len(rows),
        "aim_held": AIM_HELD,
        "median_half_width": statistics.median(row["half_width"] for row in rows),
        "aim_half_width": AIM_HALF_WIDTH,
        "runs": rows,
    }


def _print(report: dict[str, Any]) -> None:
    truth = report["median_samples_per_s"]
    print(f"{report['config']} on {report['on']}")
    print(
        "run  samples/s  of median  interval, of median  half-width  of steps alone  warm-up  steps  holds the median"
    )
    for number, row in enumerate(report["runs"], 1):
        low, high = (value / truth for value in row["interval"])
        print(
            f"{number:>3}  {row['samples_per_s']:>9.4g}  {row['samples_per_s'] / truth:>9.3f}  {low:>9.3f} to {high:<7.3f}"
            f"  {row['half_width']:>9.2%}  {row['half_width_of_steps_alone']:>13.2%}  {row['n_warmup']:>7}  {row['n_steps']:>5}"
            f"  {'yes' if row['holds'] else 'no'}"
        )
    noise = report["launches_differ_by"]
    print(
        f"launches differ by {noise['sd']:.2%} (standard deviation, {noise['degrees_of_freedom']} degrees of freedom)"
    )
    print(f"spread of the runs: {report['spread']:.2%}")
    print(f"intervals that hold the median: {report['held']:.0%} (aim: at least {report['aim_held']:.0%})")
    print(f"median half-width: {report['median_half_width']:.2%} (aim: at most {report['aim_half_width']:.0%})")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure one config again and again.")
    parser.add_argument("--model", default="bert-tiny", help="as bo-tuner tune takes it (default: bert-tiny)")
    parser.add_argument("--seq-len", type=int, default=128, help="tokens a sample (default: 128)")
    parser.add_argument("--zero-stage", type=int, default=1, help="default: 1")
    parser.add_argument("--micro-batch", type=int, default=4, help="default: 4")
    parser.add_argument("--accumulation", type=int, default=2, help="default: 2")
    parser.add_argument("--runs", type=int, default=10, help="default: 10")
    parser.add_argument("--max-steps", type=int, default=None, help="as bo-tuner tune takes it")
    parser.add_argument("--precision-target", type=float, default=0.02, help="default: 0.02")
    parser.add_argument("--ranks", type=int, default=None, help="default: all GPUs, or 2 CPU ranks")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    options = parser.parse_args()
    report = measure(options)
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        _print(report)


if __name__ == "__main__":
    main()
