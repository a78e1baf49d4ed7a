"""Real trials: two ranks, real DeepSpeed steps, and every way a trial can end that this machine can provoke."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from bo_tuner.cluster import Cluster
from bo_tuner.config import TrainConfig
from bo_tuner.objectives import TrialEvent, ignore_events
from bo_tuner.objectives.launch import ForkServer
from bo_tuner.objectives.training import ModelFacts, TrainingObjective, model_facts
from bo_tuner.outcome import Outcome, TrialLimits, TrialResult
from bo_tuner.workload import ModelSpec, Workload

ROOMY = 4 * 2**30
SMALL = TrainConfig(micro_batch_size=2)


def run(
    workload: Workload,
    cluster: Cluster,
    server: ForkServer,
    tmp_path: Path,
    config: TrainConfig = SMALL,
    *,
    memory_bytes: int = ROOMY,
    deadline_s: float = 60.0,
    max_steps: int = 5,
) -> TrialResult:
    objective = TrainingObjective(workload, cluster, server, log_dir=tmp_path)
    limits = TrialLimits(memory_bytes=memory_bytes, deadline_s=deadline_s, max_steps=max_steps)
    return objective(config, limits=limits, on_event=ignore_events)


def processes_and_segments(server: ForkServer) -> tuple[list[str], list[str], list[str]]:
    """What a trial could leave behind: its folder, segments in /dev/shm, children of the server."""
    import psutil

    folders = [path.name for path in server.run_dir.glob("trial-*")]
    segments = [path.name for path in Path("/dev/shm").glob("deepspeed*")]
    children = [f"{child.pid}" for child in psutil.Process().children(recursive=True) if child.ppid() != os.getpid()]
    return folders, segments, children


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_every_zero_stage_trains_in_both_precisions(
    workload: Workload, cluster: Cluster, server: ForkServer, tmp_path: Path, zero_stage: int, precision: str
) -> None:
    config = TrainConfig.from_params({"zero_stage": zero_stage, "micro_batch_size": 2, "grad_accum_steps": 2})
    chosen = Workload(model=workload.model, n_parameters=workload.n_parameters, seq_len=16, precision=precision)  # type: ignore[arg-type]  # a parameter of the test
    result = run(chosen, cluster, server, tmp_path, config)
    assert result.outcome is Outcome.COMPLETE, f"{result.reason}\n{result.log_tail}"
    measurement = result.measurement
    assert measurement is not None
    assert measurement.global_batch == 8
    assert len(measurement.step_times_s) == 2
    n_measured = [len(row) for row in measurement.step_times_s]
    assert n_measured == [5 - measurement.n_warmup] * 2, "five steps, the warm-up among them"
    assert 1 <= measurement.n_warmup <= 2
    assert measurement.is_loss_finite
    assert 0 < measurement.engine_time_s < measurement.step_time_s
    assert len(measurement.peak_memory_bytes) == 2
    weights = 4 * workload.n_parameters
    assert all(weights < peak < ROOMY for peak in measurement.peak_memory_bytes)
    assert result.peak_memory_bytes is not None
    assert result.peak_memory_bytes >= max(measurement.peak_memory_bytes)


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_both_optimizers_train(
    workload: Workload, cluster: Cluster, server: ForkServer, tmp_path: Path, optimizer: str
) -> None:
    chosen = Workload(model=workload.model, n_parameters=workload.n_parameters, seq_len=16, optimizer=optimizer)
    result = run(chosen, cluster, server, tmp_path)
    assert result.outcome is Outcome.COMPLETE, result.reason


def test_a_trial_whose_micro_batches_show_that_its_step_takes_too_long_is_cut_in_the_first_one(
    workload: Workload, cluster: Cluster, server: ForkServer, tmp_path: Path
) -> None:
    seen: list[TrialEvent] = []
    config = TrainConfig(micro_batch_size=1024, grad_accum_steps=64)
    objective = TrainingObjective(workload, cluster, server, log_dir=tmp_path)
    limits = TrialLimits(memory_bytes=ROOMY, longest_step_s=2.0, deadline_s=120.0)
    result = objective(config, limits=limits, on_event=seen.append)
    assert result.outcome is Outcome.PRUNED, result.reason
    assert (result.step_limit_s, result.measurement, result.log_tail) == (2.0, None, "")
    assert result.bound_samples_per_s is not None
    assert 0 < result.bound_samples_per_s < 2 * 1024 * 64 / 2.0
    assert result.reason.startswith("an optimizer step of 131072 samples takes over ")
    assert result.reason.endswith(" s, as its micro-batches show, and steps may take 2 s")
    assert max(event.step for event in seen) == 0
    assert all(event.n_micro_batches == 64 and 0 <= event.micro_batch < 64 for event in seen)


def test_a_trial_leaves_nothing_behind(
    workload: Workload, cluster: Cluster, server: ForkServer, tmp_path: Path
) -> None:
    before = processes_and_segments(server)
    n_open = len(os.listdir("/proc/self/fd"))
    assert run(workload, cluster, server, tmp_path).outcome is Outcome.COMPLETE
    assert processes_and_segments(server) == before
    assert len(os.listdir("/proc/self/fd")) == n_open


def test_wall_time_is_split_into_its_phases(
    workload: Workload, cluster: Cluster, server: ForkServer, tmp_path: Path
) -> None:
    result = run(workload, cluster, server, tmp_path)
    assert result.phases_s is not None
    assert set(result.phases_s) == {"start", "warmup", "measure", "teardown"}
    assert all(seconds >= 0 for seconds in result.phases_s.values())
    assert sum(result.phases_s.values()) == pytest.approx(result.wall_s, abs=0.01)


def test_the_observer_sees_every_step_and_the_memory(
    workload: Workload, cluster: Cluster, server: ForkServer, tmp_path: Path
) -> None:
    seen: list[TrialEvent] = []
    objective = TrainingObjective(workload, cluster, server, log_dir=tmp_path)
    objective(SMALL, limits=TrialLimits(memory_bytes=ROOMY, max_steps=5), on_event=seen.append)
    assert seen[0].phase == "start"
    assert list(dict.fromkeys(event.step for event in seen if event.step)) == [1, 2, 3, 4, 5]
    assert seen[-1].phase in ("warmup", "measure"), "on a busy machine five steps may not settle"
    assert (seen[-1].memory_bytes or 0) > 0


def test_the_observer_sees_the_memory_also_while_a_step_goes_on(
    workload: Workload, cluster: Cluster, server: ForkServer, tmp_path: Path
) -> None:
    seen: list[TrialEvent] = []
    objective = TrainingObjective(workload, cluster, server, log_dir=tmp_path)
    long_step = TrainConfig(micro_batch_size=8, grad_accum_steps=128)  # some 3 s
    limits = TrialLimits(memory_bytes=ROOMY, max_steps=1)
    objective(long_step, limits=limits, on_event=seen.append)
    before = [event.memory_bytes for event in seen if event.step == 0 and event.memory_bytes]
    assert len(before) >= 2
    assert before == sorted(before)


GROWING = """
import torch


def growing(micro_batch_size):
    yield from (batch(micro_batch_size, 512 if n == 20 else 8) for n in range(1000))


def batch(size, length):
    tokens = torch.ones(size, length, dtype=torch.long)
    return {"input_ids": tokens, "attention_mask": tokens, "labels": tokens}
"""
"""The twentieth micro-batch is much longer than all others."""


def test_a_confirmation_begins_with_the_longest_micro_batch_and_draws_other_data(
    workload: Workload, cluster: Cluster, server: ForkServer, tmp_path: Path
) -> None:
    file = tmp_path / "growing.py"
    file.write_text(GROWING, encoding="utf-8")
    objective = TrainingObjective(replace(workload, data=f"{file}:growing"), cluster, server, log_dir=tmp_path)
    usual = TrialLimits(memory_bytes=ROOMY, deadline_s=60.0, max_steps=5)
    of_trial = objective(SMALL, limits=usual, on_event=ignore_events)
    confirmed = objective(SMALL, limits=replace(usual, longest_of=32, data_draw=3), on_event=ignore_events)
    assert confirmed.outcome is Outcome.COMPLETE, f"{confirmed.reason}\n{confirmed.log_tail}"
    assert (confirmed.peak_memory_bytes or 0) > 1.5 * (of_trial.peak_memory_bytes or 0)
    assert confirmed.measurement is not None and confirmed.measurement.n_warmup >= 2, "the long steps are not measured"


def test_a_trial_that_cannot_reach_the_incumbent_ends_as_pruned_with_its_bound(
    workload: Workload, cluster: Cluster, server: ForkServer, tmp_path: Path
) -> None:
    objective = TrainingObjective(workload, cluster, server, log_dir=tmp_path)
    limits = TrialLimits(memory_bytes=ROOMY, deadline_s=60.0, incumbent_samples_per_s=1e6)
    result = objective(SMALL, limits=limits, on_event=ignore_events)
    assert result.outcome is Outcome.PRUNED
    assert result.measurement is not None and result.samples_per_s is None
    assert result.bound_samples_per_s is not None
    assert result.measurement.samples_per_s < result.bound_samples_per_s < 1e6
    assert result.reason.startswith("ended early: slower than ")
    assert len(result.rank_peaks_bytes) == 2 and min(result.rank_peaks_bytes) > 0


def test_a_loss_that_is_not_finite_is_said_and_is_no_failure(
    workload: Workload, cluster: Cluster, server: ForkServer, tmp_path: Path
) -> None:
    file = tmp_path / "wild.py"
    file.write_text("import torch\ndef wild(p): return torch.optim.SGD(p, lr=1e30)\n", encoding="utf-8")
    result = run(replace(workload, optimizer=f"{file}:wild"), cluster, server, tmp_path)
    assert result.outcome is Outcome.COMPLETE, f"{result.reason}\n{result.log_tail}"
    assert "the loss was not finite" in result.reason
    assert result.measurement is not None and not result.measurement.is_loss_finite


OVERFLOWING = """
import torch


class Overflowing(torch.optim.SGD):
    n_steps = 0

    def step(self, closure=None):
        self.n_steps += 1
        return super().step(closure)

    @property
    def overflow(self):
        return self.n_steps <= LAST


def overflowing(parameters):
    return Overflowing(parameters, lr=0.001)
"""
"""DeepSpeed takes the optimizer's word for it that a step overflowed, and counts it as skipped."""


@pytest.mark.parametrize(("n_overflowing", "n_skipped"), [(2, 2), (10**9, 32)])
def test_steps_that_overflow_are_no_steps_unless_all_do(
    workload: Workload, cluster: Cluster, server: ForkServer, tmp_path: Path, n_overflowing: int, n_skipped: int
) -> None:
    file = tmp_path / "over.py"
    file.write_text(OVERFLOWING.replace("LAST", str(n_overflowing)), encoding="utf-8")
    result = run(replace(workload, optimizer=f"{file}:overflowing"), cluster, server, tmp_path)
    assert result.outcome is Outcome.COMPLETE, f"{result.reason}\n{result.log_tail}"
    assert result.measurement is not None
    assert result.measurement.n_skipped == n_skipped
    assert result.measurement.n_warmup + len(result.measurement.slowest_s) == 5


def test_a_rank_over_the_limit_ends_the_trial_as_guarded(
    workload: Workload, cluster: Cluster, server: ForkServer, tmp_path: Path
) -> None:
    limit = 150 * 2**20
    result = run(workload, cluster, server, tmp_path, TrainConfig(micro_batch_size=64), memory_bytes=limit)
    assert result.outcome is Outcome.GUARDED
    assert "over the limit of 150 MiB" in result.reason
    assert result.measurement is None
    assert (result.peak_memory_bytes or 0) > limit
    assert result.constraint > 0


def test_a_refusal_of_the_allocator_is_oom_with_the_size_of_the_request(
    bert_tiny: ModelSpec, cluster: Cluster, server: ForkServer, tmp_path: Path
) -> None:
    # Eager attention over 12,288 tokens and 256 heads asks for 155 GB at once, before anything else grows.
    architecture = {
        **bert_tiny.architecture,
        "num_attention_heads": 256,
        "hidden_size": 256,
        "max_position_embeddings": 12288,
        "attn_implementation": "eager",
        "num_hidden_layers": 1,
    }
    greedy = ModelSpec(name="greedy", architecture=architecture)
    workload = Workload(model=greedy, n_parameters=10**7, seq_len=12288)
    result = run(workload, cluster, server, tmp_path, TrainConfig(), memory_bytes=2**40)
    assert result.outcome is Outcome.OOM, f"{result.reason}\n{result.log_tail}"
    assert result.requested_bytes == 256 * 12288**2 * 4
    assert "the allocator refused a request of 144.00 GiB" in result.reason


def test_a_trial_past_its_deadline_is_a_timeout_with_the_stacks(
    workload: Workload, cluster: Cluster, server: ForkServer, tmp_path: Path
) -> None:
    result = run(workload, cluster, server, tmp_path, TrainConfig(micro_batch_size=512), deadline_s=1.5)
    assert result.outcome is Outcome.TIMEOUT
    assert result.reason.startswith("not done after 2 s, still ")
    assert "rank 1: it is in " in result.reason
    assert "[stack of rank0] it is in " in result.log_tail
    assert result.measurement is None


def test_a_killed_rank_fails_the_trial_by_name_of_the_signal(
    workload: Workload, cluster: Cluster, server: ForkServer, tmp_path: Path
) -> None:
    import psutil

    def kill_rank_1(event: TrialEvent) -> None:
        if event.step == 1:
            ours = str(server.run_dir)  # other servers of the tests may run in this process too
            server_process = next(child for child in psutil.Process().children() if ours in child.cmdline())
            os.kill(max(child.pid for child in server_process.children()), signal.SIGKILL)

    objective = TrainingObjective(workload, cluster, server, log_dir=tmp_path)
    result = objective(SMALL, limits=TrialLimits(memory_bytes=ROOMY, max_steps=50), on_event=kill_rank_1)
    assert result.outcome is Outcome.FAILED
    assert "rank 1 was ended by SIGKILL" in result.reason


def test_an_error_in_the_model_fails_the_trial_with_its_reason_and_log(
    bert_tiny: ModelSpec, cluster: Cluster, server: ForkServer, tmp_path: Path
) -> None:
    broken = ModelSpec(name="broken", architecture={**bert_tiny.architecture, "num_attention_heads": 3})
    result = run(Workload(model=broken, n_parameters=10**7, seq_len=16), cluster, server, tmp_path)
    assert result.outcome is Outcome.FAILED
    assert "ValueError in model: The hidden size (128) is not a multiple" in result.reason
    assert "Traceback" in result.log_tail


def test_what_deepspeed_refuses_is_rejected(
    workload: Workload, cluster: Cluster, server: ForkServer, tmp_path: Path, facts: ModelFacts
) -> None:
    if facts.is_fp16_supported:
        pytest.skip("this CPU trains in fp16, so DeepSpeed does not refuse it")
    result = run(replace(workload, precision="fp16"), cluster, server, tmp_path)
    assert result.outcome is Outcome.REJECTED
    assert result.reason.endswith("DeepSpeed refuses it: Type fp16 is not supported on your device.")


def test_a_stale_build_lock_does_not_hang_a_trial_and_what_was_built_is_kept(
    workload: Workload, cluster: Cluster, server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = Path(server.environment["TORCH_EXTENSIONS_DIR"])
    lock = next(folder.rglob("*.so")).parent / "lock"
    lock.touch()
    assert run(workload, cluster, server, tmp_path).outcome is Outcome.COMPLETE
    assert not lock.exists()
    assert [path.name for path in (tmp_path / "cache").rglob("*.so")] == [path.name for path in folder.rglob("*.so")]


PARAMETERS = {
    # Published counts of the Hugging Face classes, tied embeddings once.
    "bert-tiny": 4_416_698,
    "distilbert-base-uncased": 66_985_530,
    "bert-base-uncased": 109_514_298,
    "bert-large-uncased": 335_174_458,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
}
NAMED = {"gpt-355m": 0.355e9, "gpt-1.3b": 1.3e9, "gpt-2.2b": 2.2e9, "gpt-3.8b": 3.8e9, "deberta-v2-xxlarge": 1.5e9}


@pytest.mark.parametrize(("name", "expected"), PARAMETERS.items())
def test_a_preset_has_the_published_number_of_parameters(name: str, expected: int, server: ForkServer) -> None:
    assert size_of(name, server) == expected


@pytest.mark.parametrize(("name", "expected"), NAMED.items())
def test_a_preset_has_the_size_it_is_named_for(name: str, expected: float, server: ForkServer) -> None:
    assert size_of(name, server) == pytest.approx(expected, rel=0.05)


def size_of(name: str, server: ForkServer) -> int:
    workload = Workload(model=ModelSpec.resolve(name), n_parameters=0, seq_len=16)
    return model_facts(workload, server, balance="parameters").n_parameters


def test_facts_tell_the_versions_that_measure(facts: ModelFacts) -> None:
    assert set(facts.versions) >= {"python", "torch", "deepspeed", "transformers"}


def test_sharded_building_gives_the_same_weights_as_whole_building(
    bert_tiny: ModelSpec, server: ForkServer, workload: Workload, tmp_path: Path
) -> None:
    """ZeRO 3 shards while it builds; the initial spread of each weight, and the tied embedding, must be the model's own."""
    from bo_tuner.objectives.training import deepspeed_config

    told: dict[int, dict[str, object]] = {}
    for stage in (0, 3):
        config = TrainConfig.from_params({"zero_stage": stage})
        spec = tmp_path / f"spec{stage}"
        spec.write_text(
            json.dumps(
                {
                    "job": {"model": {"architecture": dict(bert_tiny.architecture)}},
                    "ds_config": deepspeed_config(config, workload, n_ranks=2),
                    "rendezvous": str(tmp_path / f"rendezvous{stage}"),
                }
            )
        )
        environments = [{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"} for rank in (0, 1)]
        logs = [tmp_path / f"log{stage}.{rank}" for rank in (0, 1)]
        group = server.launch("weights:report", spec=spec, environments=environments, logs=logs)
        while stage not in told:
            for _, message in group.poll(0.1):
                told[stage] = message
            assert not group.is_gone or stage in told, logs[0].read_text()
        group.kill()
    whole, sharded = told[0], told[3]
    assert whole["is_tied"] and sharded["is_tied"]
    whole_spreads, sharded_spreads = whole["spreads"], sharded["spreads"]
    assert isinstance(whole_spreads, dict) and isinstance(sharded_spreads, dict)
    assert whole_spreads.keys() == sharded_spreads.keys()
    for name, spread in whole_spreads.items():
        # The smallest random weight has 256 elements: two draws differ by 6 %; torch's own initial spreads by 150 % and more.
        assert sharded_spreads[name] == pytest.approx(spread, rel=0.4, abs=1e-6), name
    assert isinstance(whole["n_local"], int) and isinstance(sharded["n_local"], int)
    assert sharded["n_local"] < 0.51 * whole["n_local"]


def test_what_a_rank_holds_follows_its_micro_batch_not_its_accumulation(
    bert_tiny: ModelSpec, facts: ModelFacts, cluster: Cluster, server: ForkServer, tmp_path: Path
) -> None:
    """An out-of-memory excludes larger micro-batches whatever their accumulation, so memory must follow the first."""
    workload = Workload(model=bert_tiny, n_parameters=facts.n_parameters, seq_len=128)
    peaks = [
        run(
            workload, cluster, server, tmp_path, TrainConfig(micro_batch_size=size, grad_accum_steps=accum), max_steps=2
        )
        for size, accum in ((2, 1), (2, 8), (4, 2))
    ]
    once, often, larger = (result.peak_memory_bytes or 0 for result in peaks)
    assert once <= often < 1.25 * once
    assert larger > often
