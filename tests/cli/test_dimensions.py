"""The user's own dimensions through the whole program: they reach DeepSpeed's steps, exports, and a study that goes on."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from bo_tuner import Dimension, TuneResult, tune
from bo_tuner.errors import StudyMismatchError
from bo_tuner.report import SilentProgress

Run = Callable[..., CompletedProcess[str]]

TELLING = """
class Telling(torch.optim.SGD):
    def step(self, closure=None):
        squares = [p.grad.square().sum() for group in self.param_groups for p in group["params"]]
        print(f"norm {torch.stack(squares).sum().sqrt():.6f}", flush=True)
        return super().step(closure)


def telling(parameters):
    return Telling(parameters, lr=0.01)


def loud(config, value):
    config["steps_per_print"] = value


def loudness():
    from bo_tuner import Dimension
    return Dimension(name="loudness", values=(1000, 2000), change=loud)
"""
TUNE = [
    *(
        "tune",
        "own.py:build",
        "--data",
        "own.py:data",
        "--optimizer",
        "own.py:telling",
        "--device",
        "cpu",
        "--ranks",
        "2",
    ),
    *("--global-batch", "2", "--zero-stages", "0", "--study", "own", "--sampler", "tpe"),
    *("--dimension", "own.py:loudness", "--dimension"),
]


def test_a_dimension_reaches_deepspeeds_steps_and_the_exported_config(
    run: Run, own_file: Callable[[str], Path]
) -> None:
    folder = own_file(TELLING).parent
    clip = [*TUNE, "clip=0.001,1000:gradient_clipping"]
    ended = run(*clip, "--budget", "4 trials", "--max-steps", "4", "--no-confirm", "--json", "--out", "job", cwd=folder)
    assert ended.returncode == 0, ended.stderr
    assert "dimension clip: 0.001, 1000.0; changes gradient_clipping" in ended.stderr
    told = json.loads(ended.stdout)
    assert told["trials"][0]["params"]["extra"] == {"clip": 0.001, "loudness": 1000}
    assert {trial["outcome"] for trial in told["trials"]} <= {"complete", "pruned"}
    assert len({trial["name"] for trial in told["trials"]}) == 4
    for trial in told["trials"]:
        log = (folder / "bo_tuner_studies" / "own" / "logs" / f"{trial['name']}.rank0.log").read_text(encoding="utf-8")
        norms = [float(norm) for norm in re.findall(r"norm (\S+)", log)]
        is_clipped = trial["params"]["extra"]["clip"] == 0.001
        assert len(norms) >= 2
        assert (max(norms) < 0.0011) if is_clipped else (min(norms) > 0.01), f"{trial['name']}: {norms}"
    best = told["best"]["params"]["extra"]
    settings = json.loads((folder / "job" / "ds_config.json").read_text(encoding="utf-8"))
    assert (settings["gradient_clipping"], settings["steps_per_print"]) == (best["clip"], best["loudness"])
    assert json.loads(run("export", "own", cwd=folder).stdout) == settings
    assert "loudness" not in "".join(file.read_text(encoding="utf-8") for file in (folder / "job").glob("*.py"))

    other = run(*TUNE, "clip=0.001,2000:gradient_clipping", "--budget", "4 trials", cwd=folder)
    assert other.returncode == 2
    assert "space dimensions clip values is [0.001, 1000.0], not [0.001, 2000.0]" in other.stderr

    own_file(TELLING.replace("= value", "= value + 1"))
    changed = run("export", "own", cwd=folder)
    assert changed.returncode == 2
    assert "dimension loudness must do what it did when the study began" in changed.stderr.splitlines()[-1]
    page = run("report", "own", cwd=folder)
    assert page.returncode == 0, page.stderr
    assert "dimension loudness must do what it did" in (folder / "own.html").read_text(encoding="utf-8")


def test_what_deepspeed_refuses_is_told_before_a_study_begins(run: Run, small: list[str], tmp_path: Path) -> None:
    ended = run("tune", "bert-tiny", *small, "--dimension", "x=1,2:zero_optimization.no_such", cwd=tmp_path)
    assert ended.returncode == 2
    assert "model bert-tiny must train for one step, and does not" in ended.stderr.splitlines()[-1]
    assert "no_such" in ended.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


# -- simulated ---------------------------------------------------------------------------------------------------------


def simulate(*dimensions: Dimension | str, **options: Any) -> TuneResult:
    usual: dict[str, Any] = {"cluster": "1x4xV100-16GB", "seq_len": 64, "budget": "3 trials", "study": "pretended"}
    return tune("bert-tiny", simulate=True, dimensions=dimensions, progress=SilentProgress(), **{**usual, **options})


def test_a_function_from_python_is_exported_by_another_process_and_a_study_goes_on_with_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def with_rate(rate: float) -> Dimension:
        return Dimension(
            name="faster",
            values=(1, 2, 3),
            change=lambda config, value: config["optimizer"]["params"].update(lr=rate * value),
        )

    first = simulate(with_rate(0.5))
    assert first.best is not None
    value = dict(first.best.config.extra)["faster"]
    assert first.best.deepspeed_config()["optimizer"]["params"]["lr"] == 0.5 * value  # type: ignore[operator]  # a number
    exported = run("export", "pretended", cwd=tmp_path)
    assert json.loads(exported.stdout) == first.best.deepspeed_config(), exported.stderr
    further = simulate(with_rate(0.5), budget="5 trials")
    assert [trial.config for trial in further.trials][:3] == [trial.config for trial in first.trials]
    assert further.best is not None
    assert further.best.deepspeed_config()["optimizer"]["params"]["lr"] in (0.5, 1.0, 1.5)
    assert json.loads((further.best.export(tmp_path / "job")[0].parent / "ds_config.json").read_text("utf-8"))
    with pytest.raises(StudyMismatchError, match="space dimensions faster digest is"):
        simulate(with_rate(0.25))
    assert (
        "the cost model does not know what faster would change: only noise tells its values apart"
        in capfd.readouterr().err
    )


def test_a_simulation_expects_the_same_of_every_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    still = {"noise": 0.0, "step_noise": 0.0, "straggler_probability": 0.0}
    from bo_tuner import Simulation

    result = tune(
        "bert-tiny",
        simulate=Simulation(**still),
        cluster="1x4xV100-16GB",
        seq_len=64,
        global_batch=4,
        zero_stages=(1,),
        max_depth=1,
        recompute="off",
        budget="3 trials",
        dimensions=["clip=0.25,1,2:gradient_clipping"],
        confirm=False,
        sampler="grid",
        progress=SilentProgress(),
    )
    rates = {trial.config.extra: trial.samples_per_s or 0.0 for trial in result.trials}
    assert len(rates) == 3
    assert max(rates.values()) == pytest.approx(min(rates.values()), rel=1e-6)


def test_a_replay_has_the_tables_dimensions_alone(run: Run, tmp_path: Path) -> None:
    ended = run("tune", "--replay", "runs.csv", "--dimension", "clip=1,2:gradient_clipping", cwd=tmp_path)
    assert ended.returncode == 2
    assert "with --replay the table tells model, devices and configs; got --dimension: leave it out" in ended.stderr
