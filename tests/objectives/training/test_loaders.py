"""A data loader with workers holds up every few steps: a trial tells the rate that training has with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bo_tuner.cluster import Cluster
from bo_tuner.config import TrainConfig
from bo_tuner.objectives import ignore_events
from bo_tuner.objectives.launch import ForkServer
from bo_tuner.objectives.training import TrainingObjective, model_facts
from bo_tuner.objectives.training.extensions import private_copy
from bo_tuner.objectives.training.sources import model_spec
from bo_tuner.outcome import Outcome, TrialLimits
from bo_tuner.report import write_job
from bo_tuner.trial import TrialRecord
from bo_tuner.workload import Workload

N_WORKERS = 6
STEP_S, SAMPLE_S = 0.4, 3.3
"""Six workers give six samples every 3.3 s, and six steps take 2.4 s: each sixth one waits for 0.9 s."""
SLOW_DATA = f"""
import time
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, inputs):
        time.sleep({STEP_S})
        return self.layer(inputs).square().mean()


class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        time.sleep({SAMPLE_S})
        return torch.ones(4)


def build():
    return Net()


def loader(micro_batch_size):
    return torch.utils.data.DataLoader(Slow(), batch_size=micro_batch_size, num_workers={N_WORKERS}, prefetch_factor=1)
"""


def test_the_rate_of_a_trial_is_that_of_the_exported_job_though_the_loaders_workers_hold_up_every_sixth_step(
    cluster: Cluster, server: ForkServer, tmp_path: Path
) -> None:
    file = tmp_path / "own.py"
    file.write_text(SLOW_DATA, encoding="utf-8")
    model = model_spec(f"{file}:build")
    workload = Workload(model=model, n_parameters=20, seq_len=1, data=f"{file}:loader")
    model_facts(workload, server)  # pickles the model
    objective = TrainingObjective(workload, cluster, server, log_dir=tmp_path)
    config = TrainConfig()
    result = objective(config, limits=TrialLimits(memory_bytes=4 * 2**30), on_event=ignore_events)
    assert result.outcome is Outcome.COMPLETE, f"{result.reason}\n{result.log_tail}"
    assert result.measurement is not None and result.measurement.pace.period == N_WORKERS
    assert result.samples_per_s == pytest.approx(cluster.n_ranks * N_WORKERS / SAMPLE_S, rel=0.05)
    record = TrialRecord(number=0, config=config, result=result)
    write_job(tmp_path / "job", record, workload, cluster, study_folder=server.run_dir)
    environment = {**os.environ, "PYTHON": sys.executable, "TORCH_EXTENSIONS_DIR": str(private_copy(tmp_path / "ops"))}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    told = subprocess.run(
        [str(tmp_path / "job" / "launch.sh"), "--steps", str(6 * N_WORKERS)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert json.loads(told.stdout.splitlines()[-1])["samples_per_s"] == pytest.approx(result.samples_per_s, rel=0.08)
