"""`tune` without training: simulated clusters and replayed tables, under the whole engine, in this process alone."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

from bo_tuner import TuneResult, tune
from bo_tuner.cluster import Cluster
from bo_tuner.engine import StopReason
from bo_tuner.errors import ConfigError, StudyMismatchError
from bo_tuner.objectives.simulated import Simulation
from bo_tuner.objectives.table import MeasuredTable
from bo_tuner.objectives.training import DeepSpeedBackEnd
from bo_tuner.opening import TuneOptions
from bo_tuner.outcome import Outcome
from bo_tuner.report import SilentProgress
from bo_tuner.space import default_config
from bo_tuner.storage import Location, StudyStore
from tests.made_up_table import BEST, KNOWN, MIXED, write_table

Replay = Callable[..., TuneResult]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def replay(tmp_path: Path) -> Replay:
    """`replay(group, ...)` tunes a group of the made-up table, to the end of the budget."""

    def run(group: str = "mixed", **options: Any) -> TuneResult:
        usual: dict[str, Any] = {"progress": SilentProgress(), "min_gain": 0, **options}
        table = usual.pop("table", None) or write_table(tmp_path)
        return tune(replay=table, group=group, **usual)

    return run


def simulate(model: str = "bert-tiny", **options: Any) -> TuneResult:
    usual: dict[str, Any] = {
        "simulate": True,
        "cluster": "2x4xV100-16GB",
        "seq_len": 64,
        "budget": "6 trials",
        "min_gain": 0,
        "progress": SilentProgress(),
        **options,
    }
    return tune(model, **usual)


def summary(result: TuneResult) -> list[tuple[str, Any]]:
    return [(trial.config.name, trial.result and trial.result.to_dict()) for trial in result.trials]


# -- replay ------------------------------------------------------------------------------------------------------------


def test_the_candidates_of_a_replay_are_the_tables_and_its_best_is_found(replay: Replay) -> None:
    result = replay()
    assert {trial.config.name for trial in result.trials} == {
        "z0_gas4_mbs1_fuse-0",
        "z0_gas2_mbs2_fuse-0",
        "z0_gas1_mbs4_fuse-0",
        BEST,
        "z1_tp2_gas1_mbs8_rc_fuse-1",
        "z0_pp2_gas4_mbs2_fuse-1",
    }
    assert result.stop_reason.value == "every candidate has run or is ruled out"
    assert result.best is not None
    assert (result.best.config.name, result.best.measurement.samples_per_s) == (BEST, 40)
    assert [trial.result.outcome for trial in result.trials if trial.result].count(Outcome.OOM) == 2


def test_nothing_is_repeated_or_confirmed_in_a_replay(replay: Replay) -> None:
    assert all(not trial.repeats and trial.confirmation is None for trial in replay(budget="20 trials").trials)


def test_a_replay_is_named_and_described_by_its_table(replay: Replay, capsys: pytest.CaptureFixture[str]) -> None:
    result = replay("known")
    assert result.study_name == "known_replayed"
    manifest = result.manifest
    assert (manifest.workload.model.name, manifest.workload.n_parameters) == ("small", 350_000_000)
    assert (manifest.workload.seq_len, manifest.workload.precision) == (2048, "bf16")
    assert (manifest.cluster.device_name, manifest.cluster.n_ranks) == ("H100-80GB", 8)
    first, *told = capsys.readouterr().err.splitlines()
    assert first.startswith("REPLAYED: nothing was run here; all figures are those of group known of /")
    assert any(line.startswith("the cost model expects most of z1_gas1_mbs8: ") for line in told), told
    replay("known")
    assert "the cost model" not in capsys.readouterr().err, "nothing is left to run"


def test_mixed_devices_and_unknown_models_stop_no_replay_and_are_told_in_a_line(
    replay: Replay, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay().manifest.cluster.device_name == "T4 + V100-32GB"
    told = capsys.readouterr().err.splitlines()
    (line,) = [line for line in told if "slowest" in line]
    assert "every figure is that of the slowest of T4 and V100-32GB" in line
    assert (
        "no models.csv beside the table has the shape of nobody-knows: by its parameters 12 layers of 1536 are" in line
    )


def test_a_device_that_nobody_knows_stops_no_replay(
    replay: Replay, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "abacus").mkdir()
    table = write_table(tmp_path / "abacus", [line.replace("H100-80GB", "Abacus-9000") for line in KNOWN])
    result = replay("known", table=table)
    assert result.best is not None and result.best.config.micro_batch_size == 8
    told = [line for line in capsys.readouterr().err.splitlines() if "Abacus" in line]
    assert any("no figures are known of 'Abacus-9000': those of A100-80GB are taken" in line for line in told), told


def test_what_completed_in_a_table_fits_though_it_took_more_than_the_device_is_sold_with(
    replay: Replay, tmp_path: Path
) -> None:
    (tmp_path / "full").mkdir()
    table = write_table(tmp_path / "full", [*KNOWN[:3], KNOWN[3].replace(",38,", ",81.5,")])
    best = replay("known", table=table).best
    assert best is not None and best.config.micro_batch_size == 8


def test_time_spent_in_a_replay_is_what_its_trials_cost(replay: Replay) -> None:
    began = time.monotonic()
    result = replay()
    assert time.monotonic() - began < 60
    wall_s = sum(trial.result.wall_s for trial in result.trials if trial.result)
    assert wall_s > 40 + 36 + 70
    assert result.spent.seconds == pytest.approx(wall_s)
    assert result.spent.device_seconds == pytest.approx(4 * wall_s)
    stored = StudyStore(Location(), result.study_name)
    assert stored.spent().seconds == pytest.approx(wall_s), "and another process reads the same"


def test_a_budget_of_time_counts_what_trials_would_have_taken(replay: Replay) -> None:
    result = replay(sampler="grid", budget="100s")
    assert [round(trial.wall_s) for trial in result.trials] == [40, 36], "in what is left no trial is done"
    assert result.stop_reason.value == "the budget is used up"
    more = replay(sampler="grid", budget="0.04 gpu-h")  # 144 s of four ranks are 36 s
    assert len(more.trials) == 2


def test_a_replay_goes_on_where_it_stopped_and_from_a_table_that_was_moved(replay: Replay, tmp_path: Path) -> None:
    whole = replay(study="whole")
    first = replay(study="parts", budget="2 trials")
    (tmp_path / "moved").mkdir()
    rest = replay(study="parts", table=write_table(tmp_path / "moved"))
    assert summary(rest)[:2] == summary(first)
    assert summary(rest) == summary(whole)


def test_a_replay_of_other_figures_is_refused(replay: Replay, tmp_path: Path) -> None:
    replay(study="mine", budget=1)
    (tmp_path / "changed").mkdir()
    changed = write_table(tmp_path / "changed", [MIXED[0].replace(",0.8,", ",0.7,"), *MIXED[1:]], KNOWN)
    for table, group, words in (
        (changed, "mixed", "origin digest is "),
        (None, "known", "origin group is mixed, not known"),
    ):
        with pytest.raises(StudyMismatchError, match=words):
            replay(group, table=table, study="mine")
    with pytest.raises(StudyMismatchError, match="origin kind is replay, not simulation"):
        simulate(study="mine")


def test_a_replay_imports_no_torch_and_starts_no_process(tmp_path: Path) -> None:
    write_table(tmp_path)
    code = """
import sys, psutil
from bo_tuner import tune
result = tune(replay="runs.csv", group="mixed")
print(result.best.config.name, [name for name in ("torch", "deepspeed", "transformers") if name in sys.modules],
      len(psutil.Process().children()))
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == f"{BEST} [] 0"
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        "bo_tuner_studies",
        "lock",
        "mixed_replayed",
        "models.csv",
        "runs.csv",
        "studies.db",
    ]


def test_what_only_the_table_could_run_is_not_handed_over(replay: Replay, tmp_path: Path) -> None:
    best = replay().best
    assert best is not None
    with pytest.raises(ConfigError, match="has tensor parallelism: choose another config"):
        best.deepspeed_config()
    with pytest.raises(ConfigError, match="has tensor parallelism"):
        best.export(tmp_path / "job")
    known = replay("known").best
    assert known is not None
    assert known.deepspeed_config()["zero_optimization"]["stage"] == 1
    with pytest.raises(ConfigError, match="a job needs the model itself, and the table only names small"):
        known.export(tmp_path / "job")
    assert not (tmp_path / "job").exists()


# -- simulation --------------------------------------------------------------------------------------------------------


def test_a_simulated_cluster_is_tuned_and_a_seed_repeats_it(capsys: pytest.CaptureFixture[str]) -> None:
    first = simulate(study="first", seed=3)
    told = capsys.readouterr().err
    assert told.startswith("SIMULATED: nothing was run, nothing was measured; ")
    assert "\nthe cost model expects most of z" in told
    assert first.best is not None and first.best.record.confirmation is not None
    assert first.manifest.cluster == Cluster.described("2x4xV100-16GB")
    assert first.manifest.workload.precision == "fp16"
    assert summary(first) == summary(simulate(study="again", seed=3))
    assert summary(first) != summary(simulate(study="other", seed=4))


def test_a_simulation_goes_on_as_if_it_had_never_stopped() -> None:
    whole = simulate(study="whole", budget="6 trials")
    simulate(study="parts", budget="2 trials", confirm=False)
    parts = simulate(study="parts", budget="6 trials")
    assert [trial.config.name for trial in parts.trials[:2]] == [trial.config.name for trial in whole.trials[:2]]
    assert len(parts.trials) == 6


def test_a_simulation_goes_on_only_with_the_same_settings() -> None:
    simulate(study="mine", budget=1)
    changes: dict[str, dict[str, Any]] = {
        "origin noise is 0.02, not 0.1": {"simulate": Simulation(noise=0.1)},
        "origin seed is 0, not 1": {"seed": 1},
        "cluster n_ranks is 8, not 4": {"cluster": "1x4xV100-16GB"},
        "seq_len is 64, not 32": {"seq_len": 32},
    }
    for words, change in changes.items():
        with pytest.raises(StudyMismatchError) as caught:
            simulate(**{"study": "mine", **change})
        assert words in str(caught.value)
    assert simulate(study="mine", budget=1).spent.trials == 1


def test_a_simulated_hang_is_tried_again_and_costs_its_deadline() -> None:
    result = simulate(simulate=Simulation(hang_probability=0.6), budget="8 trials")
    hung = [trial for trial in result.trials if trial.attempts]
    assert hung
    assert all(attempt.outcome is Outcome.TIMEOUT for trial in hung for attempt in trial.attempts)
    wall_s = sum(run.wall_s for trial in result.trials for run in (*trial.attempts, *trial.runs))
    assert result.spent.seconds == pytest.approx(wall_s)


def test_candidates_with_long_steps_are_not_set_aside_in_a_simulation() -> None:
    result = simulate(
        "bert-large-uncased",
        cluster="1xT4",
        sampler="grid",
        zero_stages=(3,),
        recompute="on",
        budget="28 trials",  # seven accumulations of each micro-batch, up to 64 x 4
        seq_len=512,
    )
    last = result.trials[-1]
    assert last.config.name == "z3_gas64_mbs4_rc"
    assert last.result is not None and last.result.measurement is not None
    assert last.result.measurement.step_time_s > 10


def test_a_module_is_simulated_and_its_job_can_be_exported(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM

    small = BertConfig(
        vocab_size=100, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=24,
    )  # fmt: skip
    result = tune(
        BertForMaskedLM(small), simulate=True, cluster="2x4xH100", budget="2 trials", progress=SilentProgress()
    )
    assert result.study_name == "BertForMaskedLM_bf16_2x4xH100_simulated"
    assert (result.manifest.workload.seq_len, len(result.manifest.workload.structure.layer_costs)) == (24, 4)
    assert result.best is not None
    files = {file.name: file for file in result.best.export(tmp_path / "job")}
    assert "model.pkl" in files
    launch = files["launch.sh"].read_text(encoding="utf-8")
    assert launch.splitlines()[1].startswith("# SIMULATED: nothing was run, nothing was measured")
    assert "--nnodes 2 " in launch and "--nproc-per-node 4 " in launch and "--standalone" not in launch
    told = json.loads(files["model.json"].read_text(encoding="utf-8"))
    assert told["measured"]["samples_per_s"] is None
    assert told["measured"]["warning"].startswith("SIMULATED")


def test_hundreds_of_ranks_are_tuned_in_seconds() -> None:
    simulate(study="imports", budget=1)  # torch and transformers, which every process imports once
    began = time.process_time()
    result = simulate("gpt-1.3b", cluster="64x8xH100", budget="20 trials", seq_len=512)
    assert time.process_time() - began < 20
    assert result.manifest.cluster.n_ranks == 512
    assert result.spent.trials == 20
    assert result.spent.device_seconds == pytest.approx(512 * result.spent.seconds)
    assert len(json.dumps(summary(result))) < 200_000


# -- options -----------------------------------------------------------------------------------------------------------


def test_options_have_the_names_and_defaults_of_tune() -> None:
    taken = inspect.signature(tune).parameters.values()
    assert [(parameter.name, parameter.default) for parameter in taken] == [
        (field.name, field.default) for field in fields(TuneOptions)
    ]
    assert MISSING not in [field.default for field in fields(TuneOptions)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "Missing argument 'MODEL': name what to tune, or with --replay a measured table"),
        (
            {"model": "bert-tiny", "replay": "runs.csv", "ranks": 2, "seq_len": 16},
            "with --replay the table tells model, devices and configs; got MODEL and --ranks and --seq-len: leave them out",
        ),
        ({"replay": "runs.csv", "simulate": True}, "got --simulate: leave it out"),
        ({"model": "bert-tiny", "cluster": "8xH100"}, "can only be simulated: add --simulate; got --cluster"),
        ({"model": "bert-tiny", "group": "x"}, "only a table has groups, which --replay names; got --group"),
        (
            {"model": "bert-tiny", "simulate": True, "cluster": "8xH100", "device": "cpu"},
            "--cluster tells the devices; got --device: leave it out",
        ),
        (
            {"model": "bert-tiny", "simulate": True, "allow_shared_gpu": True},
            "a simulation runs nothing, and takes samples of one kind; got --allow-shared-gpu",
        ),
        ({"model": "bert-tiny", "simulate": True, "cluster": "8xH1000"}, "no figures are known of 'H1000'"),
        (
            {"model": "bert-tiny", "simulate": True, "cluster": "8xT4", "precision": "bf16"},
            "--precision must be one that T4 has units for; got bf16",
        ),
        (
            {"model": "bert-tiny", "simulate": True, "cluster": "8xH100", "max_depth": 8},
            "--max-depth must be at most the 4 layers of bert-tiny; got 8",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused_by_name_and_leave_nothing(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        tune(**options)
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


# -- when nothing better is likely ---------------------------------------------------------------------------------------


def test_a_study_ends_once_a_faster_config_is_unlikely_and_tells_how_unlikely() -> None:
    result = simulate(budget="60 trials", min_gain="1%", global_batch=64)
    assert result.stop_reason is StopReason.CONVERGED
    assert 4 <= len(result.trials) < 30
    found = re.fullmatch(
        r"hardly any candidate can be faster: the chance that one is, by more than 1 %, is under ([1-5]) %",
        result.stopped_because,
    )
    assert found, result.stopped_because
    again = simulate(budget="60 trials", min_gain="1%", global_batch=64)
    assert [trial.config for trial in again.trials] == [trial.config for trial in result.trials], "it stays over"
    assert simulate(budget="12 trials", min_gain=0, global_batch=64).stop_reason is not StopReason.CONVERGED


def test_the_first_trial_is_what_the_cost_model_expects_most_of_and_the_default_config_runs_last() -> None:
    result = simulate(budget="60 trials", min_gain="1%", global_batch=64)
    default = default_config(result.manifest.space.candidates(result.manifest.cluster, DeepSpeedBackEnd()))
    first, *_, last = result.trials
    assert first.config != default
    assert last.config == default
    by_rule = simulate(budget="2 trials", study="by-rule", sampler="tpe", global_batch=64)
    assert by_rule.trials[0].config == default


def test_a_replay_ends_by_itself_too(replay: Replay) -> None:
    table = Path(__file__).parents[1] / "benchmarks" / "measured" / "vtrain" / "runs.csv"
    group = "single-h1024l20s1024-8xA100-gbs16"
    result = replay(group, table=table, budget="26 trials", min_gain=0.01)
    assert result.stop_reason is StopReason.CONVERGED
    assert len(result.trials) <= 10
    best = max(
        run.config.global_batch(8) / run.step_time_s for run in MeasuredTable.read(table, group).runs if run.step_time_s
    )
    assert result.best is not None and result.best.measurement.samples_per_s == pytest.approx(best)
