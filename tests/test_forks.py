"""Studies whose code has changed since: refused with the file, gone on with after a comment, forked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bo_tuner import TuneResult, tune
from bo_tuner.errors import ConfigError, StoreError, StudyMismatchError
from bo_tuner.report import SilentProgress
from bo_tuner.trial import ranked

FILES = {
    "model.py": """
import torch
from torch import nn
from block import Block

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x, labels):
        return (self.block(x) - labels).pow(2).mean()

def build():
    return Net()
""",
    "block.py": """
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x)
""",
    "data.py": """
import torch

def dataset():
    return [(torch.ones(4), torch.zeros(4))] * 64
""",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(**options: Any) -> TuneResult:
    usual: dict[str, Any] = {"data": "data.py:dataset", "budget": "4 trials", "study": "old", "min_gain": 0}
    return tune(
        "model.py:build", simulate=True, cluster="2xV100-16GB", progress=SilentProgress(), **{**usual, **options}
    )


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new), encoding="utf-8")


def test_changed_code_is_refused_by_file_a_comment_is_not_and_a_fork_begins_with_the_best(folder: Path) -> None:
    old = run()
    edit(folder / "block.py", "return", "# once\n        return")
    assert len(run(budget="5 trials").trials) == 5
    edit(folder / "block.py", "self.layer(x)", "self.layer(self.layer(x))")
    with pytest.raises(StudyMismatchError) as caught:
        run(budget="6 trials")
    assert str(caught.value) == (
        "study 'old' was tuned with other code (block.py changed), and its figures need not hold any more: start another study with "
        "--study NAME, or with --fork NAME one that begins with the best configs of this one"
    )
    edit(folder / "data.py", "* 64", "* 32")
    with pytest.raises(StudyMismatchError, match=r"\(block.py changed; data.py changed\)"):
        run()
    best = [record.config for record in ranked(run_of_old(folder))[:3]]
    forked = run(fork="new", budget="3 trials")
    assert forked.study_name == "new"
    assert [record.config for record in forked.trials] == best
    assert forked.manifest.fork is not None and forked.manifest.fork.study == "old"
    assert len(run(fork="new", budget="4 trials").trials) == 4, "the same command goes on"
    assert len(run(study="new", budget="5 trials").trials) == 5
    assert len(run_of_old(folder)) == len(old.trials) + 1, "the old one is left as it was"
    with pytest.raises(ConfigError, match="--fork must name a new study, or one forked from 'new' before, and 'old'"):
        run(study="new", fork="old")


def run_of_old(folder: Path) -> Any:
    from bo_tuner.storage import Location, StudyStore

    return StudyStore(Location(folder=folder / "bo_tuner_studies"), "old").records()


def test_a_fork_needs_a_study_to_begin_with() -> None:
    with pytest.raises(StoreError, match="no study 'nothing'"):
        run(study="nothing", fork="new")
