"""Trials on the GPUs of a stand-in driver: two real ranks that only sleep, watched as real ones are.

Run as a program in a process that finds the stand-in (LD_LIBRARY_PATH) and names its script (NVML_SCRIPT); it prints what came
of each scenario as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bo_tuner.cluster import Cluster
from bo_tuner.config import TrainConfig
from bo_tuner.errors import BoTunerError
from bo_tuner.objectives import TrialEvent
from bo_tuner.objectives.launch import ForkServer
from bo_tuner.objectives.launch.channel import Channel
from bo_tuner.objectives.memory import Baseline
from bo_tuner.objectives.training.watch import TrialWatch
from bo_tuner.outcome import TrialLimits

LIMIT_BYTES = 12 * 2**30
CLUSTER = Cluster(device="cuda", n_ranks=2, device_name="Tesla V100-SXM2-16GB", memory_bytes=16 * 2**30)
STEP_S = 0.05


def rank(channel: Channel, rank: int, spec: Path) -> None:
    """Say what a rank says that trains, and sleep in between."""
    channel.send({"event": "baseline", "bytes": 0})
    channel.send({"event": "phase", "phase": "train"})
    while True:
        time.sleep(STEP_S)
        step = {"event": "step", "total_s": STEP_S, "engine_s": STEP_S, "is_loss_finite": True, "peak_bytes": 2**20}
        channel.send(step)


def script(*lines: str) -> None:
    """What the driver says from now on; there is never half a script."""
    path = Path(os.environ["NVML_SCRIPT"])
    new = path.with_suffix(".new")
    new.write_text("\n".join(lines) + "\n", encoding="utf-8")
    new.rename(path)


class Trials:
    """Runs trials in ranks of one server."""

    def __init__(self, server: ForkServer) -> None:
        self._server = server
        self._spec = server.run_dir / "spec"
        self._spec.touch()

    def run(self, *before: str, then: Callable[[list[int]], list[str]] | None = None) -> dict[str, Any]:
        """One trial; the script is `before`, and once the first step is over what `then` makes of the ranks' process ids."""
        script(*before)
        has_changed = False

        def changes(event: TrialEvent) -> None:
            nonlocal has_changed
            if event.step >= 1 and then and not has_changed:
                has_changed = True
                script(*then(group.pids))

        started = time.monotonic()
        with Baseline().ready(CLUSTER, limit_bytes=LIMIT_BYTES) as devices:
            group = self._server.launch(
                "on_gpus:rank", spec=self._spec, environments=[{}, {}], logs=[self._server.run_dir / "log"] * 2
            )
            limits = TrialLimits(memory_bytes=LIMIT_BYTES, max_steps=45, deadline_s=60)
            watch = TrialWatch(group, TrainConfig(), limits, changes, cluster=CLUSTER, started=started, devices=devices)
            try:
                watch.run()
            finally:
                group.kill()
        return watch.result(seq_len=8, teardown_s=0, wall_s=time.monotonic() - started, log_tail="").to_dict()


def readiness(*lines: str, allow_shared: bool = False, later: list[str] | None = None, after_s: float = 0.0) -> Any:
    """What the devices hold before a trial, or why it may not start; `later` the script changes and a second trial follows."""
    script(*lines)
    baseline = Baseline(allow_shared=allow_shared, patience_s=1.0)
    try:
        with baseline.ready(CLUSTER, limit_bytes=LIMIT_BYTES) as devices:
            first = {"indices": [device.index for device in devices], "held": baseline.held}
        if later is None:
            return first
        script(*later)
        if after_s:
            threading.Timer(after_s, script, lines).start()
        with baseline.ready(CLUSTER, limit_bytes=LIMIT_BYTES):
            return {"held": baseline.held}
    except BoTunerError as error:
        return {
            "error": type(error).__name__,
            "text": str(error),
            **{name: getattr(error, name, None) for name in ("index", "used_bytes", "pids")},
        }


def rises(gpu: int) -> list[str]:
    """More by 100 GiB a second, from now on."""
    return [f"rise {gpu} 102400 {time.monotonic()}"]


ALL_MISSING = [
    f"missing {name}"
    for name in (
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetComputeRunningProcesses_v3",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetPowerUsage",
        "nvmlDeviceGetTotalEnergyConsumption",
    )
]


def main() -> None:
    """Run all scenarios."""
    stranger = os.getppid()
    told: dict[str, Any] = {
        "free": readiness(),
        "stranger": readiness(f"process 1 {stranger} 3000", "used 1 3300"),
        "stranger is let in": readiness(f"process 1 {stranger} 3000", "used 1 3300", allow_shared=True),
        "we ourselves": readiness(f"process 0 {os.getpid()} 3000", "used 0 3300"),
        "a desktop": readiness(f"drawing 0 {stranger} 3000", "used 0 3300"),
        "hidden": readiness("used 1 4096"),
        "no room": readiness("used 1 13000", allow_shared=True),
        "not back": readiness(later=["used 0 3072", f"process 0 {os.getpid()} 2048", "process 0 999999 512"]),
        "back in time": readiness(later=["used 0 3072", "process 0 999999 2048"], after_s=0.3),
        "stranger later": readiness(later=[f"process 1 {stranger} 10"]),
        "driver gone": readiness("gone 15"),
        "fewer devices": readiness("devices 1"),
    }
    os.environ["CUDA_VISIBLE_DEVICES"] = "1,0"
    told["visible order"] = readiness()
    with ForkServer(preload=[], prepare=None, environment={}) as server:
        trials = Trials(server)
        told["crosses the limit"] = trials.run(then=lambda _: rises(1))
        told["gone mid-trial"] = trials.run(then=lambda _: ["gone 15"])
        told["quiet"] = trials.run(
            "power 0 200000",
            then=lambda pids: [f"process 1 {pids[0]} 700", f"process 0 {pids[1]} 800", "used 1 1000", "power 0 200000"],
        )
        told["hot"] = trials.run("reasons 0 100")  # 0x64: thermal slowdown in hardware and software, and the power cap
        told["at the power cap"] = trials.run("reasons 1 4")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            told["tells nothing"] = trials.run(*ALL_MISSING)
        told["warnings"] = [str(warning.message) for warning in caught]
    json.dump(told, sys.stdout)


if __name__ == "__main__":
    main()
