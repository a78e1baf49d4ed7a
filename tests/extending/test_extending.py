"""What `docs/extending.md` says is done as it says it: one file of at most 100 lines, and an entry point."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bo_tuner.dimension import DIMENSIONS
from bo_tuner.errors import ConfigError
from bo_tuner.objectives.training.dimensions import dimensions_of
from bo_tuner.opening import TuneOptions
from bo_tuner.plan import plan
from bo_tuner.schedules import Pipeline, simulate
from tests.extending.eager_schedule import Eager
from tests.extending.host_optimizer import HOST_OPTIMIZER

HERE = Path(__file__).parent
PAGE = HERE.parent.parent / "docs" / "extending.md"


@pytest.mark.parametrize("file", sorted(HERE.glob("*_*.py")), ids=lambda file: file.name)
def test_a_part_is_one_file_of_at_most_100_lines_and_stands_on_the_page(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    if file.name.startswith("test_"):
        return
    assert len(text.splitlines()) <= 100
    assert f"```python\n{text}```" in PAGE.read_text(encoding="utf-8")


def installed(folder: Path, module: str, group: str, point: str) -> dict[str, str]:
    """The environment of a Python that has a package of one module with one entry point, which the page shows."""
    assert f'[project.entry-points."{group}"]\n{point}\n' in PAGE.read_text(encoding="utf-8")
    shutil.copy(HERE / f"{module}.py", folder)
    information = folder / f"{module}-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    name, _, value = point.partition(" = ")
    (information / "entry_points.txt").write_text(f"[{group}]\n{name} = {value.strip(chr(34))}\n")
    return {**os.environ, "PYTHONPATH": str(folder)}


def run(arguments: tuple[str, ...], env: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("bo-tuner")
    return subprocess.run([program, *arguments], env=env, cwd=folder, capture_output=True, text=True, check=False)


SMALL = ("plan", "bert-tiny", "--cluster", "2x2xV100-16GB@25Gb/s", "--global-batch", "8", "--seq-len", "16", "--json")


def test_a_schedule_of_an_installed_package_is_planned_by_its_own_formulas(tmp_path: Path) -> None:
    env = installed(tmp_path, "eager_schedule", "bo_tuner.schedules", 'eager = "eager_schedule:Eager"')
    done = run((*SMALL, "--schedules", "1f1b,eager"), env, tmp_path)
    assert done.returncode == 0, done.stderr
    candidates: dict[str, Any] = {one["name"]: one for one in json.loads(done.stdout)["candidates"]}
    ours, usual = candidates["z0_pp2_eager_gas4_mbs1"], candidates["z0_pp2_gas4_mbs1"]
    assert ours["params"]["pipeline_schedule"] == "eager"
    assert ours["memory_bytes"]["activations"] > usual["memory_bytes"]["activations"]
    assert ours["time_s"]["exchange"] < usual["time_s"]["exchange"]

    unknown = run((*SMALL, "--schedules", "eager"), {**os.environ}, tmp_path)
    assert (unknown.returncode, unknown.stderr) == (
        2,
        "error: --schedules must be one of 1f1b, gpipe, 2bw; got 'eager'\n",
    )


@pytest.mark.parametrize("message_s", [0.0, 1.0, 2.5])
def test_the_formulas_of_the_page_are_what_its_order_simulates(message_s: float) -> None:
    schedule = Eager()
    for depth, m in ((2, 4), (4, 8), (4, 16)):
        pipeline = Pipeline.even(depth=depth, n_micro_batches=m, forward_s=1.0, backward_s=2.0, message_s=message_s)
        timeline = simulate(
            [schedule.actions(rank, depth=depth, n_micro_batches=m) for rank in range(depth)],
            forward_s=[1.0] * depth,
            backward_s=[2.0] * depth,
            message_s=[message_s] * (depth - 1),
        )
        held = [schedule.peak_held(rank, depth=depth, n_micro_batches=m) for rank in range(depth)]
        assert list(timeline.peak_held) == held
        if message_s <= 1:
            assert timeline.makespan_s == pytest.approx(schedule.period_s(pipeline))
        else:
            assert timeline.makespan_s <= schedule.period_s(pipeline)


def test_a_schedule_that_nothing_runs_is_planned_and_not_tuned() -> None:
    with pytest.raises(ConfigError) as caught:
        TuneOptions(model="bert-tiny", schedules=("1f1b", "gpipe")).check()
    assert str(caught.value) == (
        "--schedules must be some that DeepSpeed runs; got gpipe, which only `bo-tuner plan` takes"
    )
    TuneOptions(model="bert-tiny", schedules=("1f1b",)).check()


def test_a_schedule_that_changes_training_is_planned_where_that_is_allowed() -> None:
    told: dict[str, Any] = {"cluster": "2xH100", "seq_len": 16, "global_batch": 8, "schedules": ("2bw",)}
    with pytest.raises(ConfigError) as caught:
        plan("bert-tiny", **told)
    assert str(caught.value) == (
        "--allow-2bw must be given for 2bw, which changes training: its gradients are one optimizer step old"
    )
    assert plan("bert-tiny", **told, allow_2bw=True).best_pipeline().config.pipeline_schedule == "2bw"  # type: ignore[union-attr]


DIMENSION = ("host_optimizer", "bo_tuner.dimensions", 'host_optimizer = "host_optimizer:HOST_OPTIMIZER"')


def test_a_dimension_of_an_installed_package_is_planned_by_its_own_terms(tmp_path: Path) -> None:
    done = run((*SMALL, "--dimension", "host_optimizer"), installed(tmp_path, *DIMENSION), tmp_path)
    assert done.returncode == 0, done.stderr
    candidates: dict[str, Any] = {one["name"]: one for one in json.loads(done.stdout)["candidates"]}
    assert "z0_gas1_mbs2_host_optimizer-cpu" not in candidates  # not legal
    usual, ours = (candidates[f"z1_gas1_mbs2_host_optimizer-{value}"] for value in ("none", "cpu"))
    assert ours["params"]["host_optimizer"] == "cpu"
    assert (ours["memory_bytes"]["optimizer"], usual["memory_bytes"]["optimizer"] > 0) == (0, True)
    assert ours["time_s"]["optimizer"] > usual["time_s"]["optimizer"]
    assert ours["time_s"]["compute"] == usual["time_s"]["compute"]


def test_a_study_of_it_is_simulated_shown_and_exported(tmp_path: Path) -> None:
    env = installed(tmp_path, *DIMENSION)
    study = ("--study", "hosted", "--dimension", "host_optimizer=cpu", "--zero-stages", "1", "--seq-len", "16")
    begun = run(
        ("tune", "bert-tiny", "--simulate", "--cluster", "2xV100-16GB", *study, "--max-global-batch", "8", "--max-depth", "1",
         "--budget", "2 trials", "--no-confirm"),
        env, tmp_path,
    )  # fmt: skip
    assert begun.returncode == 0, begun.stderr
    assert "does not know what" not in begun.stderr
    shown = run(("show", "hosted", "--json"), env, tmp_path)
    trials = json.loads(shown.stdout)["trials"]
    assert all("host_optimizer" in json.dumps(trial) for trial in trials), shown.stderr
    assert run(("show", "hosted"), {**os.environ}, tmp_path).returncode == 0  # also where the package is gone
    exported = run(("export", "hosted", "--out", "job"), env, tmp_path)
    assert exported.returncode == 0, exported.stderr
    settings = json.loads((tmp_path / "job" / "ds_config.json").read_text(encoding="utf-8"))
    assert settings["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}


def test_what_other_commands_could_not_find_is_refused() -> None:
    assert "host_optimizer" not in DIMENSIONS
    with pytest.raises(ConfigError, match="dimension host_optimizer must be registered, since it has a term"):
        dimensions_of([HOST_OPTIMIZER])
