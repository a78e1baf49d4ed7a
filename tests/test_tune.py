"""`from bo_tuner import tune`: scripts without a main guard, threads, config objects, and nothing that fits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bo_tuner import tune
from bo_tuner.errors import ConfigError, ModelError, StoreError

UNGUARDED = """
import json
import optuna
from bo_tuner import tune

print("imported", flush=True)
result = tune(
    "bert-tiny", budget="2 trials", seq_len=16, device="cpu", ranks=2, max_global_batch=8, study="script"
)
assert isinstance(result.study, optuna.Study)
best = result.best
print(json.dumps({
    "config": best.config.name,
    "samples_per_s": best.measurement.samples_per_s,
    "rows": [len(best.measurement.step_times_s), len(best.measurement.peak_memory_bytes)],
    "deepspeed": best.deepspeed_config(),
    "trials": [[trial.number, trial.config.name, trial.samples_per_s] for trial in result.trials],
    "optuna": [result.study.study_name, len(result.study.trials), result.study.best_trial.number],
    "dict": result.to_dict(),
    "report": [result.report().name, result.report("page.html").read_text(encoding="utf-8")[:15]],
}))
"""

IN_A_THREAD = """
import json
import threading
from transformers import BertConfig
from bo_tuner import tune

model = BertConfig(
    vocab_size=1000, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
    max_position_embeddings=32, architectures=["BertForMaskedLM"],
)
found = []


def work():
    options = dict(seq_len=16, device="cpu", ranks=2, max_global_batch=2, zero_stages=[3])
    fits = tune(model, budget=1, study="thread", **options)
    nothing = tune(model, budget=1, study="nothing", memory_limit="1MiB", **options)
    found.append({
        "model": fits.manifest.workload.model.name,
        "best": fits.best.config.name,
        "n_parameters": fits.manifest.workload.n_parameters,
        "nothing": nothing.best,
        "outcomes": [trial.result.outcome.value for trial in nothing.trials],
        "dict": nothing.to_dict(),
    })


thread = threading.Thread(target=work)
thread.start()
thread.join()
print(json.dumps(found))
"""


def printed_by(script: str, folder: Path) -> list[str]:
    """Lines on stdout of a script that is run to its end in `folder`."""
    file = folder / "script.py"
    file.write_text(script, encoding="utf-8")
    ended = subprocess.run(
        [sys.executable, str(file)],
        cwd=folder,
        env=os.environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


@pytest.fixture(scope="module")
def script_lines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return printed_by(UNGUARDED, tmp_path_factory.mktemp("script"))


@pytest.fixture(scope="module")
def told(script_lines: list[str]) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(script_lines[-1])
    return data


def test_a_script_without_a_main_guard_runs_once(script_lines: list[str]) -> None:
    assert script_lines[0] == "imported"
    assert len(script_lines) == 2  # no rank imports the script, and tune prints nothing on stdout


def test_best_is_the_fastest_trial_with_its_measurement(told: dict[str, Any]) -> None:
    fastest = max(told["trials"], key=lambda trial: trial[2] or 0.0)
    assert [told["config"], told["samples_per_s"]] == fastest[1:]
    assert told["rows"] == [2, 2]


def test_deepspeed_config_is_that_of_the_best(told: dict[str, Any]) -> None:
    params = told["dict"]["best"]["params"]
    assert told["deepspeed"]["train_micro_batch_size_per_gpu"] == params["micro_batch_size"]
    assert told["deepspeed"]["gradient_accumulation_steps"] == params["grad_accum_steps"]
    assert told["deepspeed"]["zero_optimization"]["stage"] == params["zero_stage"]
    assert told["deepspeed"]["train_batch_size"] == params["micro_batch_size"] * params["grad_accum_steps"] * 2


def test_study_is_the_optuna_study_with_the_same_trials(told: dict[str, Any]) -> None:
    assert told["optuna"] == ["script", 2, told["dict"]["best"]["number"]]


def test_to_dict_is_what_the_command_prints(told: dict[str, Any]) -> None:
    assert set(told["dict"]) == {"study", "direction", "unit", "budget", "spent", "best", "trials"}
    assert [trial["name"] for trial in told["dict"]["trials"]] == [trial[1] for trial in told["trials"]]
    assert told["dict"]["best"]["name"] == told["config"]


def test_report_writes_a_page_named_after_the_study_or_as_told(told: dict[str, Any]) -> None:
    assert told["report"] == ["script.html", "<!doctype html>"]


@pytest.fixture(scope="module")
def from_thread(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two studies of a transformers config object, tuned in a thread."""
    found: list[dict[str, Any]] = json.loads(printed_by(IN_A_THREAD, tmp_path_factory.mktemp("thread"))[-1])
    assert len(found) == 1, "the thread raised"
    return found[0]


def test_a_transformers_config_object_is_tuned_in_a_thread(from_thread: dict[str, Any]) -> None:
    assert from_thread["model"] == "bert"
    assert from_thread["best"] == "z3_gas1_mbs1"
    assert from_thread["n_parameters"] < 100_000  # the object's own sizes, not a preset's


def test_best_is_none_when_nothing_fits(from_thread: dict[str, Any]) -> None:
    assert from_thread["nothing"] is None
    assert from_thread["outcomes"] == ["guarded"]
    assert from_thread["dict"]["best"] is None


def test_wrong_arguments_raise_errors_that_are_value_errors_and_write_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="did you mean bert-tiny"):
        tune("bert-tny")
    with pytest.raises(ConfigError, match="budget"):
        tune("bert-tiny", budget="lots")
    with pytest.raises(ValueError, match="seq-len"):
        tune("bert-tiny", seq_len=0)
    assert list(tmp_path.iterdir()) == []


def test_a_storage_that_cannot_be_opened_raises_a_store_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "no.db").write_text("this is no database, and long enough to be seen as none" * 9, encoding="utf-8")
    with pytest.raises(StoreError, match="file is not a database"):
        tune("bert-tiny", seq_len=16, device="cpu", storage="sqlite:///no.db")
