"""Whether each pair of GPUs exchanges: where a whole group hangs, this tells between which two."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Sequence
from itertools import combinations

from bo_tuner.cluster import Cluster
from bo_tuner.doctor.finding import Finding, fail, ok
from bo_tuner.objectives.launch import ForkServer, RankGroup
from bo_tuner.text import count

__all__ = ["pairs", "rounds_of"]

Pair = tuple[int, int]

_TARGET = "bo_tuner.doctor.ranks:exchange_in_pairs"
_LONGEST_S = 60.0
"""Without news: a pair meets within some seconds, once CUDA has started."""
_MEND = "leave one of them out (CUDA_VISIBLE_DEVICES), or try NCCL_P2P_DISABLE=1; nvidia-smi topo -m shows how they are joined"


def rounds_of(wanted: Collection[Pair], n_ranks: int) -> list[list[Pair]]:
    """The pairs in rounds, no rank twice in one."""
    rounds: list[list[Pair]] = []
    for pair in sorted(wanted, key=lambda pair: ((pair[1] - pair[0]) % n_ranks, pair)):
        for others in rounds:
            if not {*pair} & {rank for other in others for rank in other}:
                others.append(pair)
                break
        else:
            rounds.append([pair])
    return rounds


def pairs(
    server: ForkServer,
    cluster: Cluster,
    *,
    gpus: Sequence[int] = (),
    target: str = _TARGET,
    longest_s: float = _LONGEST_S,
) -> Finding:
    """Let the ranks of `cluster` exchange two by two; a pair that hangs is set aside, and the rest goes on without it.

    Args:
        server: Started.
        cluster: The ranks.
        gpus: Index of each rank's GPU, for the text; empty for the ranks' numbers.
        target: What they run.
        longest_s: Seconds without news after which a pair is given up on.
    """
    left = set(combinations(range(cluster.n_ranks), 2))
    n_pairs, broken = len(left), list[Pair]()
    seconds: dict[Pair, float] = {}
    while left:
        done, stuck = _exchange(server, cluster, left, target=target, longest_s=longest_s)
        seconds |= done
        broken += sorted(stuck)
        left -= done.keys() | stuck
    told = {"seconds": {f"{a}-{b}": taken for (a, b), taken in sorted(seconds.items())}}
    if broken:
        named = ", ".join("-".join(str(gpus[rank] if gpus else rank) for rank in pair) for pair in broken)
        found = f"{count(len(broken), 'pair')} of {n_pairs} cannot exchange: {named}"
        return fail("pairs", found, _MEND, broken=broken, **told)
    return ok("pairs", f"all {n_pairs} exchange, the slowest in {max(seconds.values()):.2g} s", **told)


def _exchange(
    server: ForkServer, cluster: Cluster, left: Collection[Pair], *, target: str, longest_s: float
) -> tuple[dict[Pair, float], set[Pair]]:
    """One launch of all ranks: what was done, and who stood in the way; one of the two is never empty."""
    folder = server.run_dir / f"pairs{time.monotonic_ns()}"
    folder.mkdir()
    spec = folder / "spec.json"
    rounds = rounds_of(left, cluster.n_ranks)
    spec.write_text(
        json.dumps({"device": cluster.device, "rounds": rounds, "folder": str(folder), "timeout_s": 2 * longest_s}),
        encoding="utf-8",
    )
    group = server.launch(
        target,
        spec=spec,
        environments=[{"LOCAL_RANK": str(rank)} for rank in range(cluster.n_ranks)],
        logs=[folder / f"rank{rank}.log" for rank in range(cluster.n_ranks)],
    )
    try:
        return _listen(group, left, longest_s=longest_s)
    finally:
        group.kill()


def _listen(group: RankGroup, left: Collection[Pair], *, longest_s: float) -> tuple[dict[Pair, float], set[Pair]]:
    begun: dict[Pair, set[int]] = {pair: set() for pair in left}
    done: dict[Pair, float] = {}
    heard_at = time.monotonic()
    while len(done) < len(begun):
        for rank, message in group.poll(0.1):
            heard_at = time.monotonic()
            pair: Pair = (int(message["pair"][0]), int(message["pair"][1]))
            if message["event"] == "begun":
                begun[pair].add(rank)
            else:
                done[pair] = max(done.get(pair, 0.0), message["seconds"])
        open_pairs = {pair for pair in begun if pair not in done}
        fallen = {rank for rank, code in group.exit_codes.items() if code != 0}
        if fallen:
            # The other rank of the pair fails as well, so that the two that had begun are those to blame.
            return done, {pair for pair in open_pairs if begun[pair] & fallen} or open_pairs
        if open_pairs and time.monotonic() - heard_at > longest_s:
            # Those that wait for a rank which hangs with another have begun alone.
            return done, {pair for pair in open_pairs if len(begun[pair]) == 2} or open_pairs
    return done, set()
