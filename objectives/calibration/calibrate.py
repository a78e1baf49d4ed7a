"""`calibrate`: let the ranks of a cluster measure it, in processes forked for that."""

from __future__ import annotations

import json
import time

from bo_tuner.cluster import Cluster
from bo_tuner.errors import LaunchError
from bo_tuner.objectives.calibration.readings import Readings
from bo_tuner.objectives.launch import ForkServer, RankGroup, last_words
from bo_tuner.text import count

__all__ = ["calibrate"]

_TARGET = "bo_tuner.objectives.calibration.rank:measure"
_LONGEST_S = 120.0
"""It takes some five seconds on two cores; more on a machine that others use."""


def calibrate(
    server: ForkServer, cluster: Cluster, *, precision: str, target: str = _TARGET, longest_s: float = _LONGEST_S
) -> Readings:
    """Measure products, memory, operations and exchanges with every rank of `cluster` at work.

    Args:
        server: Of `training_server`, so that ranks compute as they do in trials; started or not.
        cluster: On this machine.
        precision: `fp32`, `bf16` or `fp16`.
        target: What the ranks run.
        longest_s: They are given up on after this.

    Raises:
        LaunchError: A rank ended without a word, or they were not done in time.
    """
    logs = [server.run_dir / f"calibration{rank}.log" for rank in range(cluster.n_ranks)]
    rendezvous = server.run_dir / "calibration.rendezvous"
    rendezvous.unlink(missing_ok=True)
    description = {
        "device": cluster.device,
        "n_ranks": cluster.n_ranks,
        "precision": precision,
        "rendezvous": str(rendezvous),
    }
    spec = server.run_dir / "calibration.json"
    spec.write_text(json.dumps(description), encoding="utf-8")
    environments = [{"LOCAL_RANK": str(rank)} for rank in range(cluster.n_ranks)]
    group = server.launch(target, spec=spec, environments=environments, logs=logs)
    try:
        told = _listen(group, deadline=time.monotonic() + longest_s)
    finally:
        group.kill()
    silent = [rank for rank in range(cluster.n_ranks) if rank not in told]
    if silent:
        raise LaunchError(
            f"{count(cluster.n_ranks, 'rank')} must measure the machine, and rank {silent[0]} "
            f"gave no answer{last_words(logs[silent[0]])}"
        )
    return Readings.slowest([told[rank] for rank in range(cluster.n_ranks)])


def _listen(group: RankGroup, *, deadline: float) -> dict[int, Readings]:
    """What the ranks tell, until all have, one has ended without, or it takes too long."""
    told: dict[int, Readings] = {}
    while len(told) < len(group.pids) and time.monotonic() < deadline:
        told |= {rank: Readings.from_dict(message) for rank, message in group.poll(0.1)}
        if any(rank not in told for rank in group.hung_up):
            break
    return told
