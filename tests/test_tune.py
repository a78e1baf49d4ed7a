"""`from bo_tuner import tune`: scripts without a main guard, threads, config objects, modules, and nothing that fits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from bo_tuner import tune
from bo_tuner.errors import ConfigError, ModelError, StoreError
from bo_tuner.objectives.training.extensions import private_copy

UNGUARDED = """
import json
import optuna
from bo_tuner import tune

print("imported", flush=True)
result = tune(
    "bert-tiny", budget="2 trials", seq_len=16, device="cpu", ranks=2, max_global_batch=8, study="script", confirm=False
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
    "space": [result.manifest.space.pipeline_depths, result.manifest.space.recompute],
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
    options = dict(seq_len=16, device="cpu", ranks=2, max_global_batch=2, zero_stages=[3], sampler="tpe", confirm=False)
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


OBJECTS = """
import json
import os
import torch
from torch import nn
import beside
from bo_tuner import tune
from bo_tuner.errors import StudyMismatchError

print("imported", flush=True)


class Net(beside.Base):
    def __init__(self, width):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        self.register_buffer("scale", torch.full((1,), 2.0))

    def forward(self, inputs, labels):
        for block in self.blocks:
            inputs = block(inputs) * self.scale
        return nn.functional.mse_loss(inputs, labels)


def mark(name):
    open(os.path.join(folder, name), "w").close()


def go_on(model, budget):
    samples = [(torch.ones(4), torch.zeros(4))] * 6
    marks = {"data": mark, "optimizer": mark}
    return tune(
        model, budget=budget, data=lambda: marks["data"]("data was called") or samples,
        optimizer=lambda parameters: marks["optimizer"]("optimizer was called") or torch.optim.SGD(parameters, lr=0.1),
        device="cpu", ranks=2, max_global_batch=4, zero_stages=[0, 3],
    )


folder = os.getcwd()
model = Net(4)
model(torch.ones(1, 4), torch.zeros(1, 4)).backward()
before = {name: value.clone() for name, value in model.state_dict().items()}
gradients = [parameter.grad.clone() for parameter in model.parameters()]
first = go_on(model, 1)
after = model.state_dict()
untouched = (
    all(torch.equal(before[name], after[name]) for name in before) and after.keys() == before.keys()
    and all(torch.equal(old, parameter.grad) for old, parameter in zip(gradients, model.parameters()))
    and model.training and type(model.blocks[0]) is nn.Linear
)
second = go_on(model, 2)
try:
    go_on(Net(5), 3)
    refused = ""
except StudyMismatchError as error:
    refused = str(error)
print(json.dumps({
    "name": first.study_name,
    "untouched": untouched,
    "trials": [[trial.number for trial in result.trials] for result in (first, second)],
    "recompute": [list(result.manifest.space.recompute) for result in (first, second)],
    "workload": second.manifest.workload.to_dict(),
    "refused": refused,
    "files": sorted(os.listdir(second.folder)),
    "exported": sorted(path.name for path in second.best.export("job") if path.suffix == ".pkl"),
}))
"""
BESIDE = """
from torch import nn


class Base(nn.Module):
    pass
"""

PRETRAINED = """
import json
from transformers import BertConfig, BertForMaskedLM
from bo_tuner import tune

model = BertForMaskedLM(BertConfig(
    vocab_size=100, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, max_position_embeddings=24
))
result = tune(
    model, budget=1, device="cpu", ranks=2, max_global_batch=2, zero_stages=[3], max_depth=1, recompute="on",
    sampler="tpe", confirm=False,
)
weight = model.get_output_embeddings().weight
print(json.dumps({
    "tied": weight is model.get_input_embeddings().weight and weight.device.type == "cpu",
    "use_cache": model.config.use_cache,
    "name": result.study_name,
    "seq_len": result.manifest.workload.seq_len,
    "n_parameters": result.manifest.workload.n_parameters,
    "own_count": model.num_parameters(),
    "layers": len(result.manifest.workload.structure.layer_costs),
    "space": [result.manifest.space.pipeline_depths, result.manifest.space.recompute],
    "best": result.best.config.name,
}))
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
        timeout=400,
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


def test_pipelines_up_to_the_ranks_and_recomputation_are_searched_by_default(told: dict[str, Any]) -> None:
    assert told["space"] == [[1, 2], [False, True]]


def test_study_is_the_optuna_study_with_the_same_trials(told: dict[str, Any]) -> None:
    assert told["optuna"] == ["script", 2, told["dict"]["best"]["number"]]


def test_to_dict_is_what_the_command_prints(told: dict[str, Any]) -> None:
    assert {"study", "direction", "unit", "budget", "spent", "best", "trials"} <= set(told["dict"])
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


@pytest.fixture(scope="module")
def objects_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("objects")
    (folder / "beside.py").write_text(BESIDE, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def object_lines(objects_folder: Path) -> list[str]:
    """A script that tunes a module of a class of its own, with data and optimizer from closures."""
    return printed_by(OBJECTS, objects_folder)


@pytest.fixture(scope="module")
def objects(object_lines: list[str]) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(object_lines[-1])
    return data


def test_a_module_of_the_scripts_own_class_is_tuned_and_left_as_it_is(
    objects: dict[str, Any], object_lines: list[str]
) -> None:
    assert object_lines[0] == "imported"
    assert len(object_lines) == 2
    assert objects["untouched"]
    assert objects["name"] == "Net_data-lambda_fp32_optimizer-lambda_2cpu"
    assert objects["workload"]["n_parameters"] == 2 * (4 * 4 + 4)
    assert objects["recompute"] == [[False, True]] * 2


def test_the_same_object_goes_on_and_one_of_another_shape_is_refused(objects: dict[str, Any]) -> None:
    assert objects["trials"] == [[0], [0, 1]]
    refused = objects["refused"]
    assert refused.startswith(f"study '{objects['name']}' exists for something else (model digest is ")
    assert "n_parameters is 40, not 60" in refused
    assert len(refused.splitlines()) == 1


def test_python_objects_lie_in_the_studys_folder_and_in_the_exported_one(objects: dict[str, Any]) -> None:
    pickles = ["data-lambda.pkl", "model.pkl", "optimizer-lambda.pkl"]
    assert objects["exported"] == pickles
    assert set(pickles) < set(objects["files"])


def test_another_process_exports_them_and_what_it_exports_trains(
    objects: dict[str, Any], objects_folder: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "bo_tuner", "export", objects["name"], "--out", str(tmp_path / "job")]
    subprocess.run(command, cwd=objects_folder, check=True, capture_output=True, timeout=400)
    marks = [objects_folder / "data was called", objects_folder / "optimizer was called"]
    for mark in marks:
        mark.unlink()
    ended = subprocess.run(
        [str(tmp_path / "job" / "launch.sh"), "--steps", "2"],
        cwd=tmp_path,
        env={**os.environ, "TORCH_EXTENSIONS_DIR": str(private_copy(tmp_path / "ops"))},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout.splitlines()[-1])
    assert (told["steps"], told["world_size"]) == (2, 2)
    assert told["loss"] >= 0
    assert all(mark.exists() for mark in marks)


def test_a_tied_transformers_model_is_tuned_without_data_and_keeps_its_ties(tmp_path: Path) -> None:
    told = json.loads(printed_by(PRETRAINED, tmp_path)[-1])
    assert told["tied"]
    assert told["use_cache"] is True
    assert told["name"] == "BertForMaskedLM_fp32_2cpu"
    assert told["seq_len"] == 24, "its positions"
    assert told["n_parameters"] == told["own_count"]
    assert told["layers"] == 1 + 2 + 1
    assert told["space"] == [[1], [True]], "as asked for"
    assert told["best"].startswith("z3_") and told["best"].endswith("_rc")


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
    a_class: Any = nn.Linear
    with pytest.raises(ModelError, match="got the class Linear: make one"):
        tune(a_class)
    with pytest.raises(ConfigError, match=r"--data must be FILE\.py:FUNCTION or a Python function; got 3"):
        tune(nn.Linear(1, 1), data=3, device="cpu")  # type: ignore[arg-type]  # likewise
    with pytest.raises(
        ConfigError, match=r"--optimizer must be adamw, adam, fused_adam, FILE\.py:FUNCTION or a Python function"
    ):
        tune(nn.Linear(1, 1), optimizer="sgd", device="cpu")
    with pytest.raises(ConfigError, match="--max-depth must be from 1 to the 2 ranks; got 3"):
        tune(nn.Linear(1, 1), max_depth=3, device="cpu", ranks=2)
    assert list(tmp_path.iterdir()) == []


class OneOfAKind(nn.Linear):
    def __deepcopy__(self, memo: dict[int, Any]) -> OneOfAKind:
        raise RuntimeError("one of\na kind")


class Locked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(1, 1)
        self.lock = threading.Lock()


class Homebound(nn.Linear):
    def __deepcopy__(self, memo: dict[int, Any]) -> Homebound:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        raise RuntimeError("stays here")


def test_objects_that_cannot_travel_are_named_in_one_line_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lock = threading.Lock()
    usual, copied = nn.Linear(1, 1), "model {} must be one that copy.deepcopy can copy, and it raises {}"
    pickled = "{} must be something that pickles, so that other processes get it, and {} does not: {}"
    refused = "TypeError: cannot pickle '_thread.lock' object"
    for arguments, line in (
        ({"model": OneOfAKind(1, 1)}, copied.format("OneOfAKind", "RuntimeError: one of a kind")),
        ({"model": Locked()}, copied.format("Locked", refused)),
        ({"model": Homebound(1, 1)}, pickled.format("a model", "Homebound", "RuntimeError: stays here")),
        ({"model": usual, "data": lambda: lock}, pickled.format("--data", "<lambda>", refused)),
        ({"model": usual, "optimizer": lambda _: lock}, pickled.format("--optimizer", "<lambda>", refused)),
    ):
        with pytest.raises(ModelError) as caught:
            tune(**{"data": list, "device": "cpu", **arguments})  # type: ignore[arg-type]  # of several kinds
        assert str(caught.value) == line
        assert caught.value.exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_a_storage_that_cannot_be_opened_raises_a_store_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "no.db").write_text("this is no database, and long enough to be seen as none" * 9, encoding="utf-8")
    with pytest.raises(StoreError, match="file is not a database"):
        tune("bert-tiny", seq_len=16, device="cpu", storage="sqlite:///no.db")
