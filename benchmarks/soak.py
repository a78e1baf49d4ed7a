"""A long study of short real trials in random faults: is every trial accounted for, does anything leak, is the best the same?

The driving process is killed on the way, too. The same study runs without faults afterwards. The faults are those of
`tests/faults`, drawn by `--seed`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from bo_tuner.cluster import Cluster
from bo_tuner.objectives.training import training_server
from bo_tuner.trial import TrialRecord, best_of
from tests.faults.study import GREEDY, Soaked, configs, drive, records, soak


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run both studies; returns what `--json` prints."""
    die_at = range(options.die_every, options.trials, options.die_every)
    with tempfile.TemporaryDirectory() as folder:
        faulty, calm = Path(folder) / "faulty", Path(folder) / "calm"
        faulty.mkdir()
        soaked = soak(faulty, n=options.trials, seed=options.seed, die_at=list(die_at))
        print(f"with faults: {soaked.wall_s:.0f} s", file=sys.stderr, flush=True)
        began = time.monotonic()
        cluster = Cluster.detect(device="cpu", n_ranks=2)
        with training_server(cluster) as server:
            drive(calm, server, cluster, n=options.trials, seed=None)
        calm_s = time.monotonic() - began
        return report(soaked, records(calm), calm_s=calm_s, n=options.trials)


def report(soaked: Soaked, calm: list[TrialRecord], *, calm_s: float, n: int) -> dict[str, Any]:
    """What holds, and what was counted."""
    best, calm_best = best_of(soaked.records), best_of(calm)
    ends = Counter(attempt.outcome.value for record in soaked.records for attempt in record.attempts)
    unexpected = [
        f"{record.config.name}: {record.result.outcome if record.result else 'no result'}"
        for record in soaked.records
        if record.result is None
        or (not record.result.outcome.teaches if record.config not in GREEDY else not record.result.outcome.is_memory)
    ]
    names = {record.config.name for record in soaked.records}
    return {
        "configs": n,
        "missing": sorted({config.name for config in configs(n)} - names),
        "unexpected": unexpected,
        "trials_begun": soaked.n_launches,
        "trials_spoilt": dict(ends),
        "supervisor_deaths": soaked.n_deaths,
        "left": {
            "processes": soaked.processes,
            "temporary": soaked.temporary,
            "shared_memory": soaked.shared_memory,
        },
        "held_after_trials": [soaked.held[1], soaked.held[-1]],
        "best": best.config.name if best else None,
        "best_without_faults": calm_best.config.name if calm_best else None,
        "best_samples_per_s": best.samples_per_s if best else None,
        "best_samples_per_s_without_faults": calm_best.samples_per_s if calm_best else None,
        "wall_s": soaked.wall_s,
        "wall_s_without_faults": calm_s,
    }


def failures(told: dict[str, Any]) -> list[str]:
    """What does not hold."""
    first, last = told["held_after_trials"]
    checks = {
        "every config has its trial": not told["missing"],
        "every trial ends as it must": not told["unexpected"],
        "no process, temporary file or shared memory is left": not any(told["left"].values()),
        "no process, file, mapping or thread piles up": last == first,
        "the best is the same": told["best"] == told["best_without_faults"] is not None,
    }
    return [text for text, holds in checks.items() if not holds]


def table(told: dict[str, Any]) -> str:
    """For people."""
    spoilt = ", ".join(f"{number} {outcome}" for outcome, number in told["trials_spoilt"].items())
    first, last = told["held_after_trials"]
    broken = failures(told)
    return "\n".join(
        [
            f"{told['configs']} configs: {told['trials_begun']} trials begun, spoilt by faults: {spoilt}",
            f"the supervisor died {told['supervisor_deaths']} times",
            f"{'':28} {'with faults':>16} {'without':>16} {'ratio':>7}",
            _row("wall time, s", told["wall_s"], told["wall_s_without_faults"]),
            _row("best, samples/s", told["best_samples_per_s"], told["best_samples_per_s_without_faults"]),
            f"{'best':28} {told['best']:>16} {told['best_without_faults']:>16}",
            f"held after the second trial of the last run {first}, after its last {last}",
            f"left behind: {told['left']}",
            f"missing: {told['missing']}; not as they must end: {told['unexpected']}",
            f"does not hold: {'; '.join(broken)}" if broken else "all holds",
        ]
    )


def _row(name: str, with_faults: float, without: float) -> str:
    return f"{name:28} {with_faults:16.1f} {without:16.1f} {with_faults / without:7.2f}"


def main() -> None:
    """Measure, then print; exit code 1 when something does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200, help="configs, each a trial (default: 200)")
    parser.add_argument(
        "--die-every", type=int, default=40, help="trials between deaths of the supervisor (default: 40)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    told = measure(options)
    print(json.dumps(told, indent=2) if options.json else table(told))
    sys.exit(1 if failures(told) else 0)


if __name__ == "__main__":
    main()
