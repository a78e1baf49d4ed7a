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

from bo_tuner.schedules import Pipeline, simulate
from tests.extending.eager_schedule import Eager

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
