"""Where model, data and optimizer come from: references are checked at once, and Python objects travel to any process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from torch import nn

from bo_tuner.config import TrainConfig
from bo_tuner.errors import ConfigError, ModelError
from bo_tuner.objectives.training.job.functions import load_function
from bo_tuner.objectives.training.sources import JobSources, job_of, model_spec, named, own_folders, write_object
from bo_tuner.workload import ModelSpec, ModelStructure, Workload

OwnFile = Callable[[str], Path]


def test_a_function_in_a_file_is_named_by_both_and_its_path_is_absolute(
    own_file: OwnFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = own_file("")
    monkeypatch.chdir(file.parent)
    spec = model_spec("own.py:build")
    assert (spec.name, spec.source, spec.function) == ("own-build", "function", f"{file}:build")
    assert model_spec(Path("own.py:build")) == spec


def test_a_module_is_named_by_its_class_and_everything_else_as_before() -> None:
    spec = model_spec(nn.Linear(1, 1))
    assert (spec.name, spec.source, spec.architecture) == ("Linear", "object", {})
    assert model_spec("bert-tiny") == ModelSpec.resolve("bert-tiny")


WRONG_REFERENCES = {
    "no such file": ("nowhere.py:build", "nowhere.py must be a Python file, and there is none"),
    "a folder": (".py:build", ".py must be a Python file, and there is none"),
    "no Python": ("broken.py:build", "broken.py must be Python code: invalid syntax (broken.py, line 1)"),
    "bytes": ("bytes.py:build", "bytes.py must be Python code: "),
    "a misspelt function": (
        "own.py:biuld",
        "must define the function 'biuld': it has Net, build, layers, Samples, data",
    ),
    "a near function": ("own.py:biuld", "; did you mean build?"),
    "no function at all": ("empty.py:build", "empty.py must define the function 'build': it has none"),
    "no name": ("own.py:", "own.py must define the function ''"),
}


@pytest.mark.parametrize(("reference", "told"), WRONG_REFERENCES.values(), ids=WRONG_REFERENCES.keys())
@pytest.mark.parametrize("option", ["MODEL", "--data", "--optimizer"])
def test_a_wrong_reference_is_told_in_one_line_before_anything_runs(
    option: str, reference: str, told: str, own_file: OwnFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = own_file("raise RuntimeError('it ran')").parent
    (folder / "broken.py").write_text("def build(:\n", encoding="utf-8")
    (folder / "bytes.py").write_bytes(b"\xff\xfe\x00")
    (folder / "empty.py").write_text("x = 1\n", encoding="utf-8")
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError) as caught:
        model_spec(reference) if option == "MODEL" else named(option, reference, folder)
    line = str(caught.value)
    assert line.startswith(f"{option} {reference}: ")
    assert told in line
    assert len(line.splitlines()) == 1
    assert caught.value.exit_code == 2


def test_names_that_a_file_assigns_or_imports_are_functions_too(own_file: OwnFile) -> None:
    file = own_file("other = build\nfrom torch.optim import SGD as optimizer\nimport math\n")
    for name in ("other", "optimizer", "math", "Net"):
        assert model_spec(f"{file}:{name}").name == f"own-{name}"


def test_a_file_without_a_function_asks_for_one(own_file: OwnFile) -> None:
    with pytest.raises(ModelError) as caught:
        model_spec(own_file(""))
    assert str(caught.value).startswith("MODEL must name a function in ")
    assert str(caught.value).endswith("own.py:FUNCTION")


@pytest.mark.parametrize("given", ["own.py", "samples", 3, None])
def test_what_is_no_function_is_refused_with_what_there_is(given: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        named("--data", given, tmp_path)
    assert str(caught.value) == f"--data must be FILE.py:FUNCTION or a Python function; got {given!r}"
    with pytest.raises(ConfigError) as caught:
        named("--optimizer", given, tmp_path)
    assert str(caught.value).startswith(
        "--optimizer must be adamw, adam, fused_adam, FILE.py:FUNCTION or a Python function; got "
    )


def test_a_misspelt_optimizer_is_told_what_is_near(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"got 'admaw' \(did you mean adamw\?\)"):
        named("--optimizer", "admaw", tmp_path)


class Adder:
    """A function that is an object."""

    def __call__(self) -> int:
        return 5


def test_functions_from_python_are_pickled_under_a_name(tmp_path: Path) -> None:
    number = 5
    for function, name in ((lambda: number, "lambda"), (Adder(), "Adder"), (Adder, "Adder")):
        assert named("--data", function, tmp_path) == f"data-{name}"
        assert (tmp_path / f"data-{name}.pkl").is_file()
    assert load_function(str(tmp_path / "data-lambda.pkl"))() == 5


def test_what_does_not_pickle_is_named_in_one_line_and_leaves_no_file(tmp_path: Path) -> None:
    lock = threading.Lock()
    with pytest.raises(ModelError) as caught:
        named("--data", lambda: lock, tmp_path)
    assert str(caught.value) == (
        "--data must be something that pickles, so that other processes get it, and <lambda> does not: "
        "TypeError: cannot pickle '_thread.lock' object"
    )
    assert list(tmp_path.iterdir()) == []


MAIN = """
import sys
import types
from pathlib import Path

import torch
from torch import nn

sys.path.append({elsewhere!r})
import beside
import far
from bo_tuner.objectives.training.job.functions import load_function
from bo_tuner.objectives.training.sources import write_object

made = types.ModuleType("made")
sys.modules["made"] = made
exec(Path(far.__file__).read_text().replace("return 2", "return 3"), vars(made))

class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([beside.Part(), far.Part(), made.Part(), nn.Linear(2, 2)])

write_object(Mine(), Path("model.pkl"), "a model")
write_object(made.function, Path("function.pkl"), "a function")
write_object(lambda: far.function(), Path("closure.pkl"), "a function")
import cloudpickle
import pickle
with open("model.pkl", "rb") as file:
    assert pickle.load(file) == {folders!r}
assert cloudpickle.list_registry_pickle_by_value() == set()
"""
READ = """
import sys
from bo_tuner.objectives.training.job.functions import load_object
model = load_object("model.pkl")
print(type(model).__name__, [part.answer() for part in model.parts[:3]], type(model.parts[3]).__module__)
print(load_object("function.pkl")(), load_object("closure.pkl")())
assert len(set(sys.path)) == len(sys.path)
"""
PART = """
import torch

class Part(torch.nn.Module):
    def answer(self):
        return function()

def function():
    return NUMBER
"""


def test_classes_of_a_script_and_of_files_beside_it_travel_to_a_process_that_knows_none_of_them(tmp_path: Path) -> None:
    scripts, elsewhere, reader = (tmp_path / name for name in ("scripts", "elsewhere", "reader"))
    for folder in (scripts, elsewhere, reader):
        folder.mkdir()
    repository = str(Path(__file__).parents[3])
    (scripts / "beside.py").write_text(PART.replace("NUMBER", "1"), encoding="utf-8")
    (elsewhere / "far.py").write_text(PART.replace("NUMBER", "2"), encoding="utf-8")
    (scripts / "main.py").write_text(
        MAIN.format(elsewhere=str(elsewhere), folders=[str(scripts), repository, str(elsewhere)]), encoding="utf-8"
    )
    environment = {**os.environ, "PYTHONPATH": repository}
    subprocess.run([sys.executable, str(scripts / "main.py")], cwd=reader, env=environment, check=True, timeout=400)
    ended = subprocess.run(
        [sys.executable, "-c", READ],
        cwd=reader,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert ended.stdout.splitlines() == ["Mine [1, 2, 3] torch.nn.modules.linear", "3 2"], ended.stderr


def test_installed_classes_travel_by_name(tmp_path: Path) -> None:
    write_object(nn.Linear(1000, 1000, device="meta"), tmp_path / "model.pkl", "a model")
    folders = cloudpickle.dumps(own_folders())  # where files are searched for, of which a long run of tests has many
    assert (tmp_path / "model.pkl").stat().st_size - len(folders) < 1000, "neither weights nor the class"
    assert cloudpickle.list_registry_pickle_by_value() == set()


def workload(**values: Any) -> Workload:
    usual: dict[str, Any] = {
        "model": ModelSpec(name="mine", architecture={}, source="object"),
        "n_parameters": 1,
        "seq_len": 9,
    }
    return Workload(**{**usual, **values})


def test_sources_name_pickles_by_their_folder_and_files_as_they_are(tmp_path: Path) -> None:
    sources = JobSources.of(workload(data="data-lambda", optimizer="/home/me/own.py:sgd"), tmp_path)
    assert sources.model == {"architecture": {}, "function": None, "structure": f"{tmp_path}/model.pkl"}
    assert sources.data == f"{tmp_path}/data-lambda.pkl"
    assert sources.optimizer == "/home/me/own.py:sgd"
    assert sources.pickles == [tmp_path / "model.pkl", tmp_path / "data-lambda.pkl"]


def test_a_preset_with_a_named_optimizer_needs_no_file(bert_tiny: ModelSpec, tmp_path: Path) -> None:
    sources = JobSources.of(Workload(model=bert_tiny, n_parameters=1, seq_len=9, optimizer="adam"), tmp_path)
    assert sources.pickles == []
    assert (sources.data, sources.optimizer) == (None, None)
    assert sources.copied_to(tmp_path) == sources


def test_copies_are_read_from_where_they_lie(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    for folder in (there, here):
        folder.mkdir()
    for name in ("model.pkl", "data-lambda.pkl"):
        (there / name).write_text(name, encoding="utf-8")
    value = workload(data="data-lambda", optimizer="adamw")
    assert JobSources.of(value, there).copied_to(here) == JobSources.of(value, here)
    assert [(here / name).read_text(encoding="utf-8") for name in ("model.pkl", "data-lambda.pkl")] == [
        "model.pkl",
        "data-lambda.pkl",
    ]


def test_a_job_is_plain_data_with_its_stages_and_the_length_that_its_data_is_asked_for(tmp_path: Path) -> None:
    value = workload(
        data="data-lambda", data_seq_len=12, structure=ModelStructure(layer_costs=(1.0, 1.0, 2.0), cost_unit="seconds")
    )
    config = TrainConfig(pipeline_depth=2, recompute=True, grad_accum_steps=2)
    job = job_of(JobSources.of(value, tmp_path), config, value, seed=3)
    assert json.loads(json.dumps(job)) == job
    assert (job["stages"], job["recompute"], job["seq_len"], job["seed"]) == ([0, 2, 3], True, 12, 3)
    synthetic = workload()
    job = job_of(JobSources.of(synthetic, tmp_path), TrainConfig(), synthetic, seed=0)
    assert (job["stages"], job["recompute"], job["seq_len"], job["data"]) == (None, False, 9, None)
