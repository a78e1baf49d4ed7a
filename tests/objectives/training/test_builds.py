"""Ops that are compiled inside a trial, for real: by DeepSpeed on two CPU ranks."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from bo_tuner.cluster import Cluster
from bo_tuner.config import TrainConfig
from bo_tuner.objectives import ignore_events
from bo_tuner.objectives.launch import ForkServer
from bo_tuner.objectives.training import TrainingObjective
from bo_tuner.outcome import Outcome, TrialLimits
from bo_tuner.workload import Workload


def test_an_op_is_built_once_in_a_trial_though_that_takes_longer_than_silence_may(
    workload: Workload, cluster: Cluster, server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FusedAdam, which DeepSpeed has for CPUs too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = Path(server.environment["TORCH_EXTENSIONS_DIR"])
    shutil.rmtree(folder / "fused_adam", ignore_errors=True)
    chosen = replace(workload, optimizer="fused_adam")
    objective = TrainingObjective(chosen, cluster, server, log_dir=tmp_path, least_silence_s=4.0)
    limits = TrialLimits(memory_bytes=4 * 2**30, max_steps=3, deadline_s=60.0)
    built_at, starts_s = list[int](), list[float]()
    for stage in (0, 1):
        config = TrainConfig.from_params({"zero_stage": stage, "micro_batch_size": 2})
        result = objective(config, limits=limits, on_event=ignore_events)
        assert result.outcome is Outcome.COMPLETE, f"{result.reason}\n{result.log_tail}"
        (op,) = (folder / "fused_adam").glob("*.so")
        built_at.append(op.stat().st_mtime_ns)
        assert result.phases_s is not None
        starts_s.append(result.phases_s["start"])
    print(starts_s)
    assert starts_s[0] > 4.4, "longer than a silence may be"
    assert built_at[0] == built_at[1]
    (kept,) = (tmp_path / "cache" / "bo_tuner" / "extensions").glob("*/fused_adam/*.so")
    assert kept.stat().st_mtime_ns == built_at[0]
