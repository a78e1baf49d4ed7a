"""Real trials on a real GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bo_tuner.cluster import Cluster
from bo_tuner.config import TrainConfig
from bo_tuner.cuda import check_can_build
from bo_tuner.doctor import Status, examine
from bo_tuner.errors import ClusterError, CudaError
from bo_tuner.objectives import ignore_events
from bo_tuner.objectives.launch import ForkServer
from bo_tuner.objectives.training import TrainingObjective, model_facts, training_server
from bo_tuner.outcome import Outcome, TrialLimits, TrialResult
from bo_tuner.report import write_job
from bo_tuner.trial import TrialRecord
from bo_tuner.workload import ModelSpec, Workload

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpu() -> Cluster:
    try:
        return Cluster.detect(device="cuda", n_ranks=1)
    except ClusterError as error:
        pytest.skip(f"no GPU here: {error}")


@pytest.fixture(scope="module")
def gpu_server(gpu: Cluster) -> Iterator[ForkServer]:
    with training_server(gpu) as server:
        server.start()  # a server that touched CUDA warns, and warnings fail
        yield server


@pytest.fixture(scope="module")
def bert_base(gpu: Cluster, gpu_server: ForkServer) -> Workload:
    model = ModelSpec.resolve("bert-base-uncased")
    facts = model_facts(Workload(model=model, n_parameters=0, seq_len=128), gpu_server, device="cuda")
    return Workload(
        model=model,
        n_parameters=facts.n_parameters,
        seq_len=128,
        precision=gpu.usual_precision,
        structure=facts.structure,
    )


def run(
    workload: Workload, gpu: Cluster, server: ForkServer, folder: Path, config: TrainConfig, memory_bytes: int
) -> TrialResult:
    objective = TrainingObjective(workload, gpu, server, log_dir=folder)
    return objective(config, limits=TrialLimits(memory_bytes=memory_bytes), on_event=ignore_events)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_every_zero_stage_trains(
    bert_base: Workload, gpu: Cluster, gpu_server: ForkServer, tmp_path: Path, zero_stage: int
) -> None:
    config = TrainConfig.from_params({"zero_stage": zero_stage, "micro_batch_size": 8})
    result = run(bert_base, gpu, gpu_server, tmp_path, config, int(0.92 * gpu.memory_bytes))
    assert result.outcome is Outcome.COMPLETE, f"{result.reason}\n{result.log_tail}"
    assert result.measurement is not None
    assert 4 * bert_base.n_parameters < result.measurement.peak_memory_bytes[0] < gpu.memory_bytes
    assert 0 < result.measurement.engine_time_s <= result.measurement.step_time_s * 1.01
    (allocator,), devices = result.measurement.peak_memory_bytes, result.measurement.device_peak_bytes
    assert devices is not None
    assert allocator < devices[0] <= gpu.memory_bytes
    assert result.peak_memory_bytes == devices[0]
    processes = result.measurement.process_peak_bytes
    assert processes is None or allocator < processes[0] <= devices[0]  # None in containers that hide processes
    assert (result.measurement.power_w or 0) > 10
    assert (result.measurement.energy_j or 0) > 0


def test_deepspeeds_fused_adam_is_built_and_trains(
    bert_base: Workload, gpu: Cluster, gpu_server: ForkServer, tmp_path: Path
) -> None:
    """And is refused beforehand exactly where it cannot be."""
    refusal = ""
    try:
        check_can_build("fused_adam", gpu)
    except CudaError as error:
        refusal = str(error)
    result = run(
        replace(bert_base, optimizer="fused_adam"),
        gpu,
        gpu_server,
        tmp_path,
        TrainConfig(micro_batch_size=8),
        int(0.92 * gpu.memory_bytes),
    )
    is_complete = result.outcome is Outcome.COMPLETE
    assert is_complete == (not refusal), f"{refusal}\n{result.reason}\n{result.log_tail}"


def test_our_cap_ends_a_trial_as_guarded_before_the_device_refuses(
    bert_base: Workload, gpu: Cluster, gpu_server: ForkServer, tmp_path: Path
) -> None:
    result = run(bert_base, gpu, gpu_server, tmp_path, TrainConfig(micro_batch_size=256), 3 * 2**30)
    assert result.outcome is Outcome.GUARDED, result.reason


def test_the_guard_ends_what_the_allocators_cap_does_not_see(
    bert_base: Workload, gpu: Cluster, gpu_server: ForkServer, tmp_path: Path
) -> None:
    config = TrainConfig(micro_batch_size=64)
    roomy = run(bert_base, gpu, gpu_server, tmp_path, config, int(0.92 * gpu.memory_bytes))
    assert roomy.peak_memory_bytes is not None, roomy.reason
    # Under what the device holds in all, over what torch reserves: the CUDA context alone takes some 400 MiB.
    result = run(bert_base, gpu, gpu_server, tmp_path, config, roomy.peak_memory_bytes - 100 * 2**20)
    assert result.outcome is Outcome.GUARDED, result.reason
    assert " of GPU " in result.reason


def test_the_memory_of_a_trial_is_back_before_the_next(
    bert_base: Workload, gpu: Cluster, gpu_server: ForkServer, tmp_path: Path
) -> None:
    objective = TrainingObjective(bert_base, gpu, gpu_server, log_dir=tmp_path)
    limits = TrialLimits(memory_bytes=int(0.92 * gpu.memory_bytes))
    for zero_stage in (0, 1):
        config = TrainConfig.from_params({"zero_stage": zero_stage, "micro_batch_size": 64})
        result = objective(config, limits=limits, on_event=ignore_events)
        assert result.outcome is Outcome.COMPLETE, result.reason


HOLD = "import torch; held = torch.empty(3 * 2**30, dtype=torch.uint8, device='cuda'); print(flush=True); input()"


def test_somebody_else_on_the_gpu_is_refused_unless_allowed(gpu: Cluster) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdin is not None and holder.stdout is not None
        holder.stdout.readline()
        # A child of ours is no stranger: only a check from another process sees it as one.
        told = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, check=True).stdout
        holder.stdin.close()
    refusal, allowed = json.loads(told)
    assert "must not be used by others" in refusal
    assert f"process {holder.pid} (" in refusal or "cannot be seen from here" in refusal
    assert allowed[0] > 3 * 2**30


CHECK = """
import json
from bo_tuner.cluster import Cluster
from bo_tuner.errors import DeviceBusyError
from bo_tuner.objectives.memory import Baseline

cluster = Cluster.detect(device="cuda", n_ranks=1)
try:
    with Baseline().ready(cluster, limit_bytes=cluster.memory_bytes):
        refusal = "none"
except DeviceBusyError as error:
    refusal = str(error)
shared = Baseline(allow_shared=True)
with shared.ready(cluster, limit_bytes=cluster.memory_bytes):
    print(json.dumps([refusal, shared.held]))
"""


def test_a_refusal_of_the_device_is_oom(
    bert_base: Workload, gpu: Cluster, gpu_server: ForkServer, tmp_path: Path
) -> None:
    # Logits of 16,384 samples x 128 tokens x 30,522 words: 128 GB in 16 bits, several times over.
    config = TrainConfig(micro_batch_size=16384)
    result = run(bert_base, gpu, gpu_server, tmp_path, config, 2 * gpu.memory_bytes)
    assert result.outcome is Outcome.OOM, result.reason
    assert (result.requested_bytes or 0) > 0


def test_the_exported_job_runs_about_as_fast_as_measured(
    bert_base: Workload, gpu: Cluster, gpu_server: ForkServer, tmp_path: Path
) -> None:
    config = TrainConfig(micro_batch_size=32)
    result = run(bert_base, gpu, gpu_server, tmp_path, config, int(0.92 * gpu.memory_bytes))
    write_job(
        tmp_path / "job",
        TrialRecord(number=0, config=config, result=result),
        bert_base,
        gpu,
        study_folder=tmp_path,
    )
    told = subprocess.run(
        [str(tmp_path / "job" / "launch.sh"), "--steps", "12"], capture_output=True, text=True, check=True, timeout=180
    )
    assert json.loads(told.stdout.splitlines()[-1])["samples_per_s"] == pytest.approx(result.samples_per_s, rel=0.5)


def test_the_doctor_finds_the_gpu_and_its_ranks_meet_over_nccl(gpu: Cluster) -> None:
    findings = {finding.name: finding for finding in examine(device="cuda", n_ranks=1, tell=print)}
    assert not [finding for finding in findings.values() if finding.status is Status.FAIL]
    assert findings["gpu 0"].details["memory_bytes"] >= gpu.memory_bytes
    assert findings["process group"].details["back_end"] == "NCCL"


# -- several GPUs --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpus(gpu: Cluster) -> Cluster:
    try:
        return Cluster.detect(device="cuda", n_ranks=2)
    except ClusterError as error:
        pytest.skip(f"fewer than two GPUs here: {error}")


@pytest.mark.parametrize("changed", [{"zero_stage": 0}, {"zero_stage": 3}, {"pipeline_depth": 2}])
def test_two_gpus_train_together(
    bert_base: Workload, gpus: Cluster, gpu_server: ForkServer, tmp_path: Path, changed: dict[str, int]
) -> None:
    config = TrainConfig.from_params({"micro_batch_size": 8, "grad_accum_steps": 2, **changed})
    result = run(bert_base, gpus, gpu_server, tmp_path, config, int(0.92 * gpus.memory_bytes))
    assert result.outcome is Outcome.COMPLETE, f"{result.reason}\n{result.log_tail}"
    assert result.measurement is not None
    assert len(result.measurement.device_peak_bytes or ()) == 2


def test_the_doctor_examines_all_gpus_and_each_pair(gpus: Cluster) -> None:
    findings = {finding.name: finding for finding in examine(device="cuda", tell=print)}
    assert not [finding for finding in findings.values() if finding.status is Status.FAIL]
    n_gpus = findings["devices"].details["n_ranks"]
    assert n_gpus >= gpus.n_ranks
    assert ("pairs" in findings) == (n_gpus > 2)
