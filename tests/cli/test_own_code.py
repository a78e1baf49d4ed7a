"""The command line with a user's own model, data and optimizer, given as FILE.py:FUNCTION."""

from __future__ import annotations

import getpass
import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import psutil
import pytest

from bo_tuner.objectives.training.extensions import private_copy

Run = Callable[..., CompletedProcess[str]]

OPTIONS = ["--device", "cpu", "--ranks", "2", "--max-global-batch", "8", "--budget", "2 trials", "--sampler", "tpe"]
TALK = ("starting the training processes", "building ", "training for one step")
"""Beginnings of lines that say what takes a moment."""

HEAVY = """
def heavy():
    \"\"\"Bias 3 and nothing else: on labels of zeros its loss is 9.\"\"\"
    net = Net()
    nn.init.zeros_(net.layer.weight)
    nn.init.constant_(net.layer.bias, 3.0)
    return net


def resting(parameters):
    return torch.optim.SGD(parameters, lr=0.0)
"""


def segments_of_nobody() -> set[str]:
    """Shared memory of DeepSpeed that no process holds any more."""
    held = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            held += maps.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue  # it has ended
    return {segment.name for segment in Path("/dev/shm").glob("deepspeed*") if segment.name not in held}


def processes_in(folder: Path) -> list[str]:
    """Those whose working folder it is."""
    found: list[str] = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(folder):
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


WRONG: Mapping[str, tuple[str, list[str], list[str]]] = {
    "a model that raises": (
        "def model(): raise KeyError('nope')",
        ["own.py:model", "--data", "own.py:data"],
        ["MODEL ", "own.py:model: the model function must not raise, and raises KeyError: 'nope'"],
    ),
    "a loss per sample": (
        "def model(): return [nn.Linear(4, 4)], nn.MSELoss(reduction='none')",
        ["own.py:model", "--data", "own.py:data"],
        ["model own-model must train for one step, and does not", "the loss must be a scalar", "take its mean"],
    ),
    "a model that does not pickle": (
        (
            "class Here(Net):\n    def __deepcopy__(self, memo): return self\n"
            "    def __reduce__(self): raise RuntimeError('stays here')\ndef model(): return Here()"
        ),
        ["own.py:model", "--data", "own.py:data"],
        ["own.py:model must be something that pickles", "Here does not: RuntimeError: stays here"],
    ),
    "data that hangs": (
        "import time\ndef slow():\n    time.sleep(60)\n    yield",
        ["own.py:build", "--data", "own.py:slow", "--data-timeout", "2"],
        ["--data ", "own.py:slow: a micro-batch must come within 2 s (--data-timeout), and none did"],
    ),
    "more stages than layers": (
        "def model(): return [nn.Linear(4, 4)], nn.MSELoss()",
        ["own.py:model", "--data", "own.py:data", "--max-depth", "2"],
        ["--max-depth must be at most the 1 layer of own-model; got 2"],
    ),
}


@pytest.mark.parametrize(("code", "arguments", "told"), WRONG.values(), ids=WRONG.keys())
def test_own_code_that_cannot_train_gives_one_line_and_leaves_nothing(
    run: Run,
    own_file: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    code: str,
    arguments: list[str],
    told: list[str],
) -> None:
    folder = own_file(code).parent
    temporary = tmp_path_factory.mktemp("temporary")
    monkeypatch.setenv("TMPDIR", str(temporary))
    before = segments_of_nobody()
    ended = run("tune", *arguments, *OPTIONS, cwd=folder)
    *talk, error = ended.stderr.splitlines()
    assert error.startswith("error: "), ended.stderr
    assert [line for line in talk if not line.startswith(TALK)] == []
    assert [words for words in told if words not in error] == [], error
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert [entry.name for entry in folder.iterdir() if entry.name != "__pycache__"] == ["own.py"]
    kept_by_torch = {f"torchinductor_{getpass.getuser()}"}  # its cache, which all its processes share
    assert {entry.name for entry in temporary.iterdir()} <= kept_by_torch
    assert processes_in(folder) == []
    deadline = time.monotonic() + 60.0  # other ranks on this machine may be about to remove theirs
    while segments_of_nobody() - before and time.monotonic() < deadline:
        time.sleep(0.2)
    assert segments_of_nobody() - before == set()


AT_ONCE: Mapping[str, tuple[list[str], list[str]]] = {
    "a misspelt function": (["own.py:biuld"], ["'biuld'", "did you mean build?"]),
    "no function": (["own.py"], ["MODEL must name a function in own.py, as own.py:FUNCTION"]),
    "misspelt data": (["own.py:build", "--data", "own.py:dta"], ["--data own.py:dta", "did you mean data?"]),
}


@pytest.mark.parametrize(("arguments", "told"), AT_ONCE.values(), ids=AT_ONCE.keys())
def test_a_wrong_name_is_told_at_once(
    run: Run, own_file: Callable[[str], Path], arguments: list[str], told: list[str]
) -> None:
    folder = own_file("").parent
    ended = run("tune", *arguments, *OPTIONS, cwd=folder)
    (error,) = ended.stderr.splitlines()
    assert error.startswith("error: ")
    assert [words for words in told if words not in error] == [], error
    assert ended.returncode == 2
    assert [entry.name for entry in folder.iterdir()] == ["own.py"]


NAME = "own-heavy_data_fp32_resting_2cpu"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, own_code: str) -> Path:
    """Holds own.py, and the study of it."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own.py").write_text(own_code + HEAVY, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def own_study(run: Run, folder: Path) -> CompletedProcess[str]:
    """The run that tuned a user's model, data and optimizer in `folder`."""
    functions = ["own.py:heavy", "--data", "own.py:data", "--optimizer", "own.py:resting"]
    ended = run("tune", *functions, *OPTIONS, "--json", cwd=folder)
    assert ended.returncode == 0, ended.stderr
    return ended


def test_own_functions_are_tuned_and_named(own_study: CompletedProcess[str], folder: Path) -> None:
    told = json.loads(own_study.stdout)
    assert told["study"] == NAME
    assert all(trial["outcome"] in ("complete", "pruned") for trial in told["trials"])
    lines = own_study.stderr.splitlines()
    assert f"model own-heavy, 20 parameters, fp32, {folder}/own.py:resting" in lines
    assert f"data {folder}/own.py:data" in lines
    assert any(line.startswith("no pipelines: Net is neither") for line in lines)


def test_the_same_command_goes_on_from_another_folder(
    run: Run, own_study: CompletedProcess[str], folder: Path, tmp_path: Path
) -> None:
    own = f"{os.path.relpath(folder, tmp_path)}/own.py"
    ended = run(
        *["tune", f"{own}:heavy", "--data", f"{own}:data", "--optimizer", f"{own}:resting", *OPTIONS, "--json"],
        *["--storage", f"sqlite:///{folder}/bo_tuner_studies/studies.db"],
        cwd=tmp_path,
    )
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    assert [trial["name"] for trial in told["trials"]] == [
        trial["name"] for trial in json.loads(own_study.stdout)["trials"]
    ]


def test_show_and_list_read_a_study_of_own_code(run: Run, own_study: CompletedProcess[str], folder: Path) -> None:
    best = json.loads(own_study.stdout)["best"]["name"]
    shown = run("show", NAME, cwd=folder)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert f"best: {best}" in shown.stdout
    listed = json.loads(run("list", "--json", cwd=folder).stdout)
    assert [(row["study"], row["trials"], row["best_name"]) for row in listed["studies"]] == [(NAME, 2, best)]


def test_the_dashboard_serves_a_study_of_own_code(program: str, own_study: CompletedProcess[str], folder: Path) -> None:
    with subprocess.Popen(
        [program, "dashboard", NAME, "--port", "0", "--json"],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            printed = ""
            while not printed.endswith("}\n"):
                line = process.stdout.readline()
                assert line, printed
                printed += line
            url = json.loads(printed)["url"].replace("/dashboard/studies/", "/api/studies/")
            with urllib.request.urlopen(f"{url}?after=0", timeout=30) as answer:
                assert len(json.load(answer)["trials"]) == 2
        finally:
            process.kill()


def test_the_exported_job_calls_the_users_functions_again(
    run: Run, own_study: CompletedProcess[str], folder: Path, tmp_path: Path
) -> None:
    ended = run("export", NAME, "--out", str(tmp_path / "job"), "--json", cwd=folder)
    assert ended.returncode == 0, ended.stderr
    assert not list((tmp_path / "job").glob("*.pkl"))
    facts = json.loads((tmp_path / "job" / "model.json").read_text(encoding="utf-8"))
    assert facts["job"]["model"] == {"function": f"{folder}/own.py:heavy"}
    told = trained(tmp_path / "job", tmp_path)
    assert told["steps"] == 2
    assert told["loss"] == 9.0, "the user's weights, data, and an optimizer that does not move"


def trained(job: Path, cwd: Path) -> dict[str, Any]:
    """What two steps of an exported job print at the end."""
    ended = subprocess.run(
        [str(job / "launch.sh"), "--steps", "2"],
        cwd=cwd,
        env={**os.environ, "TORCH_EXTENSIONS_DIR": str(private_copy(cwd / "ops"))},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    data: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return data
