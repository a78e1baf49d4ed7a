"""Which code a study runs: files of functions and what they import, and sources of Python objects."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bo_tuner.objectives.training.users_code import code_of
from bo_tuner.source_code import changes


def test_a_file_brings_what_it_imports_of_the_users(tmp_path: Path) -> None:
    files = {
        "model.py": "import torch\nimport json\nfrom parts import blocks\ndef build():\n    import late\n    return late\n",
        "late.py": "",
        "parts/__init__.py": "from . import norms",
        "parts/blocks.py": "from .deep.er import thing\n",
        "parts/norms.py": "",
        "parts/deep/er.py": "thing = 1",
        "other.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    found = code_of([f"{tmp_path}/model.py:build", None, "adamw"])
    assert set(found) == {str(tmp_path / name) for name in files if name != "other.py"}
    (tmp_path / "parts/norms.py").write_text("eps = 1e-6", encoding="utf-8")
    assert [change.rpartition("/")[2] for change in changes(found, code_of([f"{tmp_path}/model.py:build"]))] == [
        "norms.py changed"
    ]


def twice(x: Tensor) -> Tensor:
    return 2 * x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return twice(self.layer(x)).mean()


def samples(n: int = 3) -> list[Tensor]:
    return [torch.ones(2)] * n


def test_objects_bring_their_classes_and_the_functions_that_these_use() -> None:
    found = code_of([nn.Sequential(Net()), functools.partial(samples, 2), None])
    assert set(found) == {f"{__name__}.{name}" for name in ("Net", "twice", "samples")}


@pytest.mark.parametrize(
    ("other", "is_same"), [(lambda n: [n] * 2, True), (lambda n: [n] * 3, False)], ids=["the same", "another"]
)
def test_a_lambda_is_known_by_what_it_does(other: Callable[[int], list[int]], is_same: bool) -> None:
    first = code_of([lambda n: [n] * 2])
    assert len(first) == 1
    assert (list(first.values()) == list(code_of([other]).values())) is is_same
