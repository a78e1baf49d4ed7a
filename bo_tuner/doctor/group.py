"""Whether ranks start, meet, and how fast they exchange: by the very machinery that runs trials."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bo_tuner.cluster import Cluster
from bo_tuner.doctor.finding import Finding, fail, ok, warn
from bo_tuner.doctor.pairs import pairs
from bo_tuner.errors import LaunchError
from bo_tuner.objectives.launch import ForkServer, RankGroup
from bo_tuner.objectives.training import extensions, training_server
from bo_tuner.text import count, gib

__all__ = ["examine_group", "meeting", "server_start"]

_TARGET = "bo_tuner.doctor.ranks:join_and_reduce"
_SIZES = (2**20, 2**24, 2**26)
_LONGEST_S = 120.0
"""To meet and to exchange; NCCL takes some 10 s for eight GPUs."""
_TAIL_LINES = 15
_START_MEND = "mend what the text names; a torch or DeepSpeed that cannot be imported: pip install --force-reinstall it"
_MEETING_MEND = {
    "cpu": "see the ranks' words below; the loopback interface must be up (ip link show lo), and /tmp writable",
    "cuda": "see the ranks' words below; NCCL_DEBUG=INFO makes them say more, and NCCL_P2P_DISABLE=1 does without direct "
    "access between GPUs, which some virtual machines break",
}


def examine_group(cluster: Cluster, tell: Callable[[str], None], *, gpus: Sequence[int] = ()) -> Iterator[Finding]:
    """Start a fork server, form a group of `cluster`, time its all-reduce; of three GPUs or more each pair, too.

    Args:
        cluster: The ranks.
        gpus: Index of each rank's GPU.
        tell: Is told what is waited for.
    """
    with training_server(cluster) as server:
        must_compile = cluster.device == "cpu" and not extensions.is_cached()
        once = " (this once a small op is compiled: about a minute)" if must_compile else ""
        tell(f"starting the training processes{once} ...")
        started = server_start(server)
        yield started
        if not server.is_started:
            return
        tell(f"forming a group of {count(cluster.n_ranks, 'rank')} ...")
        yield from meeting(server, cluster)
        if cluster.device == "cuda" and cluster.n_ranks > 2:
            tell("trying each pair of GPUs ...")
            yield pairs(server, cluster, gpus=gpus)


def server_start(server: ForkServer) -> Finding:
    """Start the process that ranks are forked from."""
    name, began = "fork server", time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            server.start()
        except LaunchError as error:
            server.close()
            return fail(name, str(error), _START_MEND)
    seconds = time.monotonic() - began
    touched = next((str(entry.message) for entry in caught if issubclass(entry.category, RuntimeWarning)), None)
    if touched is not None:
        mend = "trials work; find out which package starts CUDA when it is imported, and leave it out"
        return warn(name, touched, mend, start_s=seconds)
    return ok(name, f"ready after {seconds:.1f} s", start_s=seconds)


@dataclass
class _Heard:
    """What the ranks told."""

    formed_s: dict[int, float] = field(default_factory=dict[int, float])
    reduced_s: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    """By bytes, of each rank."""
    done: set[int] = field(default_factory=set[int])


def meeting(
    server: ForkServer, cluster: Cluster, *, target: str = _TARGET, longest_s: float = _LONGEST_S
) -> Iterator[Finding]:
    """Let the ranks of `cluster` meet and exchange; one finding for each of the two.

    Args:
        server: Started.
        cluster: The ranks.
        target: What they run.
        longest_s: They are given up on after this.
    """
    logs = [server.run_dir / f"rank{rank}.log" for rank in range(cluster.n_ranks)]
    spec = server.run_dir / "doctor.json"
    description = {
        "device": cluster.device,
        "n_ranks": cluster.n_ranks,
        "rendezvous": str(server.run_dir / "doctor.rendezvous"),
        "timeout_s": 2 * longest_s,  # we give up first, and see where they wait
        "sizes": _SIZES,
    }
    spec.write_text(json.dumps(description), encoding="utf-8")
    environments = [{"LOCAL_RANK": str(rank)} for rank in range(cluster.n_ranks)]
    group = server.launch(target, spec=spec, environments=environments, logs=logs)
    heard = _Heard()
    try:
        trouble = _listen(group, heard, n_ranks=cluster.n_ranks, deadline=time.monotonic() + longest_s)
    finally:
        group.kill()
    ranks = count(cluster.n_ranks, "rank")
    has_met = len(heard.formed_s) == cluster.n_ranks
    if trouble is not None:
        name, what = ("all-reduce", "exchange") if has_met else ("process group", "meet")
        failed = fail(name, f"{ranks} must {what}: {trouble}", _MEETING_MEND[cluster.device])
        yield replace(failed, log_tail=_tail(logs))
        return
    seconds = max(heard.formed_s.values())
    back_end = "NCCL" if cluster.device == "cuda" else "gloo"
    yield ok("process group", f"{ranks} met over {back_end} in {seconds:.2f} s", form_s=seconds, back_end=back_end)
    if cluster.n_ranks == 1:
        yield ok("all-reduce", "one rank has nothing to exchange")
    else:
        yield _bandwidth(heard, cluster.n_ranks)


def _listen(group: RankGroup, heard: _Heard, *, n_ranks: int, deadline: float) -> str | None:
    """Take what the ranks say until all are done; what went wrong, or None."""
    while len(heard.done) < n_ranks:
        for rank, message in group.poll(0.1):
            match message["event"]:
                case "formed":
                    heard.formed_s[rank] = message["seconds"]
                case "reduced":
                    heard.reduced_s.setdefault(message["n_bytes"], []).append(message["seconds"])
                case "done":
                    heard.done.add(rank)
                case _:
                    pass  # nothing that we asked for
        for rank, code in group.exit_codes.items():
            if code != 0:
                how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                return f"rank {rank} {how}"
        if time.monotonic() > deadline:
            for pid in group.pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)  # faulthandler writes the stack to the log
            time.sleep(0.3)
            return "they were not done in time, their stacks are below"
    return None


def _bandwidth(heard: _Heard, n_ranks: int) -> Finding:
    """Bandwidths as NVIDIA's NCCL tests define them (doc/PERFORMANCE.md there): algorithm bandwidth is the size over the
    time, bus bandwidth that times 2(n-1)/n, which does not depend on the number of ranks."""
    sizes: list[dict[str, float]] = []
    for n_bytes, times in sorted(heard.reduced_s.items()):
        algorithm = n_bytes / max(times) / 1e9
        bus = algorithm * 2 * (n_ranks - 1) / n_ranks
        sizes.append({"n_bytes": n_bytes, "median_s": max(times), "algorithm_gb_per_s": algorithm, "bus_gb_per_s": bus})
    found = ", ".join(f"{size['bus_gb_per_s']:.3g} GB/s at {gib(int(size['n_bytes']))}" for size in sizes)
    return ok("all-reduce", f"bus bandwidth {found}", sizes=sizes)


def _tail(logs: Sequence[Path]) -> str:
    lines: list[str] = []
    for log in logs:
        with contextlib.suppress(OSError):
            last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
            lines += [f"[{log.stem}] {line}" for line in last]
    return "\n".join(lines)
