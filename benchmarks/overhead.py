"""What a trial costs beyond its measured steps: forked ranks against a cold start of the same config by torchrun.

Both train the same model with the same DeepSpeed config for the same number of steps, warm-up included, in turn; a warm compile
cache serves both. The cold start runs what `bo-tuner export` writes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.trials import Trials, trials_of
from bo_tuner.config import TrainConfig
from bo_tuner.objectives.training.environment import rank_environment
from bo_tuner.report import write_job
from bo_tuner.trial import TrialRecord

AIM_RATIO = 1 / 6
"""Forked to cold."""
AIM_S = {0: 1.2, 3: 2.5}
"""By ZeRO stage, on two CPU ranks for bert-tiny."""
_N_STEPS = 5
_LONGEST_START_S = 600.0


def forked_s(trials: Trials, config: TrainConfig) -> tuple[float, int]:
    """Seconds of one trial less its measured steps, and how many those are."""
    # All steps are made, whatever they agree on, as the cold start makes them.
    limits = replace(trials.limits, max_steps=_N_STEPS, precision_target=1e-9)
    result, measurement = trials.run(config, limits)
    n_measured = len(measurement.slowest_s)
    return result.wall_s - n_measured * measurement.step_time_s, n_measured


def cold_s(trials: Trials, job: Path, n_measured: int) -> float:
    """The same, of a job started by torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    began = time.monotonic()
    ended = subprocess.run(
        [*command, "--nproc-per-node", str(trials.cluster.n_ranks), str(job / "train.py"), "--steps", str(_N_STEPS)],
        env={**os.environ, **rank_environment(trials.cluster, None), **trials.server.environment},
        capture_output=True,
        text=True,
        timeout=_LONGEST_START_S,
        check=False,
    )
    wall_s = time.monotonic() - began
    if ended.returncode != 0:
        sys.exit(f"the exported job must run, and does not: {ended.stderr[-2000:]}")
    step_s: float = json.loads(ended.stdout.strip().splitlines()[-1])["step_time_s"]
    return wall_s - n_measured * step_s


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run everything; returns what `--json` prints."""
    rows: list[dict[str, Any]] = []
    with trials_of(options.model, seq_len=options.seq_len, device=options.device, n_ranks=options.ranks) as trials:
        for stage in options.zero_stages:
            config = TrainConfig.from_params({"zero_stage": stage, "micro_batch_size": 2})
            job = trials.folder / config.name
            record = TrialRecord(number=0, config=config)
            write_job(job, record, trials.workload, trials.cluster, study_folder=trials.folder)
            forked: list[float] = []
            cold: list[float] = []
            for number in range(1, options.rounds + 1):
                seconds, n_measured = forked_s(trials, config)
                forked.append(seconds)
                cold.append(cold_s(trials, job, n_measured))
                told = f"{config.name} round {number}: forked {forked[-1]:.2f} s, cold {cold[-1]:.2f} s"
                print(told, file=sys.stderr, flush=True)
            ratio = statistics.median(fork / start for fork, start in zip(forked, cold, strict=True))
            rows.append(
                {
                    "config": config.name,
                    "forked_s": statistics.median(forked),
                    "cold_s": statistics.median(cold),
                    "ratio": ratio,
                    "aim_ratio": AIM_RATIO,
                    "aim_s": AIM_S.get(stage),
                    "rounds": {"forked_s": forked, "cold_s": cold},
                }
            )
    return {"model": options.model, "cluster": str(trials.cluster), "rows": rows}


def table(told: dict[str, Any]) -> str:
    """For people."""
    lines = [
        f"{told['model']} on {told['cluster']}: seconds of a trial beyond its measured steps, medians",
        f"{'config':12} {'forked':>8} {'cold':>8} {'ratio':>7}   aim",
    ]
    for row in told["rows"]:
        is_reached = row["ratio"] <= row["aim_ratio"] and row["forked_s"] <= (row["aim_s"] or math.inf)
        aims = f"at most {row['aim_ratio']:.3f}" + (f", about {row['aim_s']} s" if row["aim_s"] else "")
        lines.append(
            f"{row['config']:12} {row['forked_s']:7.2f}s {row['cold_s']:7.2f}s {row['ratio']:7.3f}   {aims}: "
            f"{'reached' if is_reached else 'missed'}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, then print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bert-tiny")
    parser.add_argument("--seq-len", type=int, default=16)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--zero-stages", type=int, nargs="*", default=[0, 3])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    told = measure(options)
    print(json.dumps(told, indent=2) if options.json else table(told))


if __name__ == "__main__":
    main()
