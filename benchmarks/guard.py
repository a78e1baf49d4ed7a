"""How fast the memory guard ends a trial, and what watching costs.

Reaction: ranks that grow until they are ended, under a real `TrialWatch`. From the moment that memory crosses the limit to the
watch's verdict, and to the last rank gone. On the CPU real memory grows; without a GPU the devices are those of the tests'
stand-in driver, whose memory is a straight line in time, read through the real pynvml.

Cost: ranks that multiply matrices on all cores, watched in one block of time and not in the next, in turn; and the CPU time of a
reading itself, which is the most that it can take from a rank.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bo_tuner.cluster import Cluster
from bo_tuner.config import TrainConfig
from bo_tuner.nvml import Device, Nvml
from bo_tuner.objectives import TrialEvent, ignore_events
from bo_tuner.objectives.launch import ForkServer, RankGroup
from bo_tuner.objectives.launch.channel import Channel
from bo_tuner.objectives.memory import Conditions, DeviceProbe, HostProbe, MemoryProbe, OwnPeak
from bo_tuner.objectives.training.watch import TrialWatch
from bo_tuner.outcome import Outcome, TrialLimits

MIB = 2**20
LIMIT_BYTES = 256 * MIB
AIM_REACTION_S = 0.25
AIM_COST = 0.005
POLL_S = 0.04
"""As `TrialWatch` looks."""
_STAND_IN = Path(__file__).parents[1] / "tests" / "targets" / "nvml.c"
_STAND_IN_LIMIT_BYTES = 12 * 2**30
_STAND_IN_MIB_PER_S = 2048.0


# -- ranks ---------------------------------------------------------------------------------------------------------


def grow(channel: Channel, rank: int, spec: Path) -> None:
    """Rank 0 grows by 4 MiB every 5 ms, and notes when it is about to cross the limit; the other one waits."""
    own = _begin(channel)
    held: list[bytes] = []
    while True:
        time.sleep(0.005)
        if rank == 0:
            if own.read() + 4 * MIB > LIMIT_BYTES and not spec.exists():
                spec.write_text(str(time.monotonic()), encoding="ascii")
            held.append(b"\1" * (4 * MIB))


def idle(channel: Channel, rank: int, spec: Path) -> None:
    """Say that training has begun, and wait."""
    _begin(channel)
    time.sleep(3600)


def multiply(channel: Channel, rank: int, spec: Path) -> None:
    """Steps of some 10 ms on one core."""
    import numpy as np

    _begin(channel)
    matrix = np.random.default_rng(0).random((500, 500), dtype=np.float32)
    while True:
        began = time.perf_counter()
        for _ in range(2):
            matrix = matrix @ matrix
            matrix /= matrix.max()
        channel.send({"event": "step", "at": time.monotonic(), "total_s": time.perf_counter() - began})


def _begin(channel: Channel) -> OwnPeak:
    own = OwnPeak()
    channel.send({"event": "baseline", "bytes": own.baseline_bytes})
    channel.send({"event": "phase", "phase": "train"})
    return own


# -- reaction ------------------------------------------------------------------------------------------------------


def launch(server: ForkServer, target: Callable[..., None], spec: Path, n_ranks: int) -> RankGroup:
    module = __spec__.name if __spec__ else Path(__file__).stem  # -m, or run as a file
    log = server.run_dir / "rank.log"
    return server.launch(f"{module}:{target.__name__}", spec=spec, environments=[{}] * n_ranks, logs=[log] * n_ranks)


def reaction(
    server: ForkServer,
    target: Callable[..., None],
    *,
    cluster: Cluster,
    limit_bytes: int,
    crossed_at: Callable[[Path], float],
    devices: Sequence[Device] = (),
    on_event: Callable[[TrialEvent], None] = ignore_events,
) -> tuple[float, float]:
    """Seconds from the crossing to the verdict, and to the last rank gone."""
    spec = server.run_dir / "crossed"
    spec.unlink(missing_ok=True)
    group = launch(server, target, spec, cluster.n_ranks)
    limits = TrialLimits(memory_bytes=limit_bytes, deadline_s=60)
    watch = TrialWatch(
        group, TrainConfig(), limits, on_event, cluster=cluster, started=time.monotonic(), devices=devices
    )
    try:
        watch.run()
        judged = time.monotonic()
    finally:
        group.kill()
    gone = time.monotonic()
    result = watch.result(seq_len=1, teardown_s=0, wall_s=0, log_tail="")
    if result.outcome is not Outcome.GUARDED:
        raise SystemExit(f"the guard must end the trial, and it ended as {result.outcome}: {result.reason}")
    crossed = crossed_at(spec)
    return judged - crossed, gone - crossed


def host_reactions(server: ForkServer, n_rounds: int) -> list[tuple[float, float]]:
    """Ranks on the CPU."""
    cluster = Cluster.detect(device="cpu")
    return [
        reaction(
            server,
            grow,
            cluster=cluster,
            limit_bytes=LIMIT_BYTES,
            crossed_at=lambda spec: float(spec.read_text(encoding="ascii")),
        )
        for _ in range(n_rounds)
    ]


def device_reactions(server: ForkServer, n_rounds: int) -> list[tuple[float, float]]:
    """Two devices of the stand-in driver, of which the second fills up."""
    script = Path(os.environ["NVML_SCRIPT"])
    cluster = Cluster(device="cuda", n_ranks=2, device_name="stand-in", memory_bytes=16 * 2**30)
    reactions: list[tuple[float, float]] = []
    for _ in range(n_rounds):
        rises_at = time.monotonic() + random.uniform(0.3, 0.4)  # against the rhythm of the readings
        start_mib = _STAND_IN_LIMIT_BYTES // MIB - 100
        script.write_text(f"used 1 {start_mib}\nrise 1 {_STAND_IN_MIB_PER_S} {rises_at}\n", encoding="ascii")
        crossed = rises_at + 100 / _STAND_IN_MIB_PER_S
        with Nvml() as nvml:
            reactions.append(
                reaction(
                    server,
                    idle,
                    cluster=cluster,
                    limit_bytes=_STAND_IN_LIMIT_BYTES,
                    crossed_at=_always(crossed),
                    devices=nvml.visible(),
                )
            )
    return reactions


def _always(moment: float) -> Callable[[Path], float]:
    return lambda _: moment


# -- cost ----------------------------------------------------------------------------------------------------------


def reading_s(probe: Callable[[], object], n: int = 400) -> float:
    """CPU seconds of one reading."""
    began = time.process_time()
    for _ in range(n):
        probe()
    return (time.process_time() - began) / n


def paired_cost(server: ForkServer, *, n_blocks: int, block_s: float) -> tuple[float, tuple[float, float]]:
    """By how much steps are longer where they are watched, as a fraction: median over pairs of neighbouring blocks, since other
    programs disturb some of them, and its 95 % interval (order statistics of the binomial distribution)."""
    cluster = Cluster.detect(device="cpu")
    group = launch(server, multiply, server.run_dir / "spec", cluster.n_ranks)
    baselines: dict[int, int] = {}
    probe = HostProbe(dict(enumerate(group.pids)), baselines)
    try:
        _block(group, None, baselines, 2.0)  # warm up
        ratios: list[float] = []
        for number in range(n_blocks):
            watched_first = number % 2 == 0
            times = {
                watched: _block(group, probe if watched else None, baselines, block_s)
                for watched in ((True, False) if watched_first else (False, True))
            }
            ratios.append(times[True] / times[False] - 1)
    finally:
        group.kill()
    ratios.sort()
    half = round(0.98 * len(ratios) ** 0.5)
    middle = len(ratios) // 2
    return statistics.median(ratios), (ratios[max(middle - half, 0)], ratios[min(middle + half, len(ratios) - 1)])


def _block(group: RankGroup, probe: MemoryProbe | None, baselines: dict[int, int], seconds: float) -> float:
    """Mean time of the steps that end within `seconds`."""
    times: list[float] = []
    until = look_at = time.monotonic()
    until += seconds
    while time.monotonic() < until:
        for rank, message in group.poll(max(look_at - time.monotonic(), 0.0)):
            if message["event"] == "baseline":
                baselines[rank] = message["bytes"]
            elif message["event"] == "step":
                times.append(message["total_s"])
        if time.monotonic() >= look_at:
            look_at = time.monotonic() + POLL_S
            if probe is not None:
                probe()
    return statistics.fmean(times)


# -- report --------------------------------------------------------------------------------------------------------


def device_part(n_rounds: int) -> dict[str, Any]:
    """What needs the stand-in; runs in a process that finds it."""
    with ForkServer(preload=[], prepare=None, environment={}) as server:
        server.start()
        reactions = device_reactions(server, n_rounds)
        del os.environ["NVML_SCRIPT"]  # its time is the stand-in's own
        with Nvml() as nvml:
            devices = nvml.visible()
            conditions = Conditions(devices)
            of_core = (
                reading_s(DeviceProbe(devices, [0, 0])) / POLL_S
                + reading_s(lambda: conditions.sample(is_last=True)) / 0.1
                + reading_s(lambda: [device.processes() for device in devices]) / 0.5
            )
    return {"reactions": reactions, "of_core": of_core}


def in_stand_in(n_rounds: int) -> dict[str, Any]:
    """`device_part` in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "libnvidia-ml.so.1"
        subprocess.run(["c++", "-x", "c", "-O2", "-shared", "-fPIC", "-o", library, _STAND_IN], check=True)
        environment = {**os.environ, "LD_LIBRARY_PATH": folder, "NVML_SCRIPT": str(Path(folder) / "script")}
        told = subprocess.run(
            [sys.executable, *(["-m", __spec__.name] if __spec__ else [__file__]), "--device-part", str(n_rounds)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    part: dict[str, Any] = json.loads(told.stdout)
    return part


def rows(n_rounds: int, n_blocks: int) -> list[dict[str, Any]]:
    """All measurements of this run."""
    found: list[dict[str, Any]] = []

    def add(what: str, values: Sequence[float], aim: float, *, note: str = "") -> None:
        median, worst = statistics.median(values), max(values)
        found.append({"what": what, "median": median, "worst": worst, "aim": aim, "ratio": worst / aim, "note": note})

    environment = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with ForkServer(preload=["numpy"], prepare=None, environment=environment) as server:
        server.start()
        host = host_reactions(server, n_rounds)
        add("host: limit to verdict, s", [judged for judged, _ in host], AIM_REACTION_S)
        add("host: limit to last rank gone, s", [gone for _, gone in host], AIM_REACTION_S)
        devices = in_stand_in(n_rounds)
        add("GPU (stand-in): limit to verdict, s", [judged for judged, _ in devices["reactions"]], AIM_REACTION_S)
        add("GPU (stand-in): limit to last rank gone, s", [gone for _, gone in devices["reactions"]], AIM_REACTION_S)
        pids = {0: os.getpid(), 1: os.getpid()}
        of_core = reading_s(HostProbe(pids, {0: 0, 1: 0})) / POLL_S
        add("host: CPU time of readings, of one core", [of_core], AIM_COST, note="2 ranks at 25 Hz")
        add(
            "GPU (stand-in): the same",
            [devices["of_core"]],
            AIM_COST,
            note="2 GPUs; without the time of a real driver",
        )
        cost, (low, high) = paired_cost(server, n_blocks=n_blocks, block_s=0.3)
        add("host: steps are longer when watched", [cost], AIM_COST, note=f"95 % interval {low:+.2%} to {high:+.2%}")
    return found


def main() -> None:
    """Run it and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="trials that the guard ends, of each kind (default 20)")
    parser.add_argument("--blocks", type=int, default=150, help="pairs of blocks of 0.3 s for the cost (default 150)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--device-part", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.device_part:
        json.dump(device_part(arguments.device_part), sys.stdout)
        return
    found = rows(arguments.rounds, arguments.blocks)
    if arguments.json:
        json.dump(found, sys.stdout, indent=2)
        return
    print(f"{'':44} {'median':>9} {'worst':>9} {'aim':>9} {'worst/aim':>9}")
    for row in found:
        numbers = (f"{row[name]:9.4f}" for name in ("median", "worst", "aim"))
        print(f"{row['what']:44} {' '.join(numbers)} {row['ratio']:9.2f}  {row['note']}")


if __name__ == "__main__":
    main()
