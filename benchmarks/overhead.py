"""What a trial costs beyond its measured steps: forked ranks against a cold start of the same config by torchrun.

Both train the same model with the same DeepSpeed config for the same number of steps, warm-up included, in turn; a warm compile
cache serves both. The cold start runs what `bo-tuner export` writes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from bo_tuner.cluster import Cluster
from bo_tuner.config import TrainConfig
from bo_tuner.objectives import ignore_events
from bo_tuner.objectives.launch import ForkServer
from bo_tuner.objectives.training import TrainingObjective, model_facts, training_server
from bo_tuner.objectives.training.objective import rank_environment
from bo_tuner.outcome import TrialLimits
from bo_tuner.report import write_job
from bo_tuner.trial import TrialRecord
from bo_tuner.workload import ModelSpec, Workload

AIM_RATIO = 1 / 6
"""Forked to cold."""
AIM_S = {0: 1.2, 3: 2.5}
"""By ZeRO stage, on two CPU ranks for bert-tiny."""
_N_STEPS = 5
_LONGEST_START_S = 600.0


def forked_s(objective: TrainingObjective, config: TrainConfig, memory_bytes: int) -> float:
    """Seconds of one trial less its measured steps."""
    limits = TrialLimits(max_steps=_N_STEPS, memory_bytes=memory_bytes)
    result = objective(config, limits=limits, on_event=ignore_events)
    if result.measurement is None:
        sys.exit(f"{config.name} must complete, and ended as {result.outcome}: {result.reason}")
    return result.wall_s - sum(result.measurement.slowest_s)


def cold_s(server: ForkServer, cluster: Cluster, job: Path, n_measured: int) -> float:
    """The same, of a job started by torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    began = time.monotonic()
    ended = subprocess.run(
        [*command, "--nproc-per-node", str(cluster.n_ranks), str(job / "train.py"), "--steps", str(_N_STEPS)],
        env={**os.environ, **rank_environment(cluster), **server.environment},
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
    cluster = Cluster.detect(device=options.device, n_ranks=options.ranks)
    workload = Workload(model=ModelSpec.resolve(options.model), n_parameters=0, seq_len=options.seq_len)
    memory_bytes = int(0.92 * cluster.memory_bytes)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, training_server(cluster) as server:
        facts = model_facts(workload, server, device=cluster.device)
        workload = replace(workload, n_parameters=facts.n_parameters, structure=facts.structure)
        objective = TrainingObjective(workload, cluster, server, log_dir=Path(folder))
        n_warmup = 2  # of trials this short; the exported job leaves out as many
        for stage in options.zero_stages:
            config = TrainConfig.from_params({"zero_stage": stage, "micro_batch_size": 2})
            job = Path(folder) / config.name
            write_job(job, TrialRecord(number=0, config=config), workload, cluster, study_folder=Path(folder))
            forked: list[float] = []
            cold: list[float] = []
            for number in range(1, options.rounds + 1):
                forked.append(forked_s(objective, config, memory_bytes))
                cold.append(cold_s(server, cluster, job, _N_STEPS - n_warmup))
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
    return {"model": options.model, "cluster": str(cluster), "rows": rows}


def table(told: dict[str, Any]) -> str:
    """For people."""
    lines = [
        f"{told['model']} on {told['cluster']}: seconds of a trial beyond its measured steps, medians",
        f"{'config':12} {'forked':>8} {'cold':>8} {'ratio':>7}   aim",
    ]
    for row in told["rows"]:
        aims = f"at most {row['aim_ratio']:.3f}" + (f", about {row['aim_s']} s" if row["aim_s"] else "")
        lines.append(
            f"{row['config']:12} {row['forked_s']:7.2f}s {row['cold_s']:7.2f}s {row['ratio']:7.3f}   {aims}: "
            f"{'reached' if row['ratio'] <= row['aim_ratio'] else 'missed'}"
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
