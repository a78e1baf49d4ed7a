"""What a rank does for the doctor: join a group, and time all-reduces."""

from __future__ import annotations

import faulthandler
import json
import signal
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from bo_tuner.objectives.launch.channel import Channel

__all__ = ["exchange_in_pairs", "join_and_reduce"]

_WARMUPS = 2
_TIMED = 8


def join_and_reduce(channel: Channel, rank: int, spec_file: Path) -> None:
    """Join the group that the spec describes, then time an all-reduce of each size in it; tells as it goes."""
    import torch
    import torch.distributed as dist

    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    spec: dict[str, Any] = json.loads(spec_file.read_text(encoding="utf-8"))
    on_gpu = spec["device"] == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")

    def reduce(tensor: torch.Tensor) -> float:
        started = time.perf_counter()
        dist.all_reduce(tensor)
        if on_gpu:
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    started = time.perf_counter()
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{spec['rendezvous']}",
        rank=rank,
        world_size=spec["n_ranks"],
        timeout=timedelta(seconds=spec["timeout_s"]),
    )
    reduce(torch.zeros(1, device=device))  # NCCL connects with the first collective
    channel.send({"event": "formed", "seconds": time.perf_counter() - started})
    for n_bytes in spec["sizes"]:
        tensor = torch.zeros(n_bytes // 4, device=device)
        times = [reduce(tensor) for _ in range(_WARMUPS + _TIMED)]
        channel.send({"event": "reduced", "n_bytes": n_bytes, "seconds": statistics.median(times[_WARMUPS:])})
    dist.destroy_process_group()
    channel.send({"event": "done"})


def exchange_in_pairs(channel: Channel, rank: int, spec_file: Path) -> None:
    """Meet one other rank after the other, as the spec's rounds say, and add up a MiB with each; tells as it goes."""
    import torch
    import torch.distributed as dist

    spec: dict[str, Any] = json.loads(spec_file.read_text(encoding="utf-8"))
    on_gpu = spec["device"] == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    for pair in (pair for pairs in spec["rounds"] for pair in pairs if rank in pair):
        channel.send({"event": "begun", "pair": pair})
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            init_method=f"file://{spec['folder']}/{pair[0]}-{pair[1]}",
            rank=pair.index(rank),
            world_size=2,
            timeout=timedelta(seconds=spec["timeout_s"]),
        )
        tensor = torch.ones(2**18, device=device)
        dist.all_reduce(tensor)  # NCCL connects with the first
        started = time.perf_counter()
        dist.all_reduce(tensor)
        if on_gpu:
            torch.cuda.synchronize(device)
        channel.send({"event": "exchanged", "pair": pair, "seconds": time.perf_counter() - started})
        dist.destroy_process_group()
