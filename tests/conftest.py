"""What several test folders share: the machine's own cluster, a preset, one fork server for all real trials, a browser."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect, sync_playwright

from bo_tuner.cluster import Cluster
from bo_tuner.objectives.launch import ForkServer
from bo_tuner.objectives.training import ModelFacts, model_facts, training_server
from bo_tuner.workload import ModelSpec, Workload

# A shell that starts this in the background has it ignore Ctrl-C, and so would every command that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Rank targets of tests are imported in forked ranks, which search where this process searches.
TARGETS = Path(__file__).parent / "targets"
sys.path.append(str(TARGETS))

LONGEST_FILES = (
    "test_docs.py",
    "test_tune.py",
    "faults/test_soak.py",
    "cli/test_commands.py",
    "objectives/training/test_objective.py",
    "cli/test_interrupt.py",
    "cli/test_watch.py",
    "storage/test_crash.py",
    "report/test_html.py",
    "objectives/training/test_faults.py",
    "test_opening.py",
    "cli/test_bad_input.py",
    "cli/test_own_code.py",
    "cli/test_terminal.py",
    "samplers/test_samplers.py",
    "objectives/training/test_profiles.py",
    "report/test_export.py",
    "cli/test_dimensions.py",
    "samplers/test_search.py",
)
"""About the longest first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first, so that no worker is left alone with one at the end."""
    order = {Path(__file__).parent / name: number for number, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: order.get(item.path, len(order)))


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    """Two CPU ranks of this machine."""
    return Cluster.detect(device="cpu", n_ranks=2)


@pytest.fixture(scope="session")
def server(cluster: Cluster) -> Iterator[ForkServer]:
    """One started fork server; a trial costs under half a second more than its steps."""
    with training_server(cluster) as server:
        server.start()
        yield server


@pytest.fixture(scope="session")
def driver_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a library that pynvml takes for the driver's, in processes that find it by LD_LIBRARY_PATH."""
    return build_driver(tmp_path_factory.mktemp("nvml"))


@pytest.fixture(scope="session")
def old_driver_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, of a driver that lacks newer functions."""
    return build_driver(tmp_path_factory.mktemp("old_nvml"), "-DOLD_DRIVER")


def build_driver(folder: Path, *flags: str) -> Path:
    library = str(folder / "libnvidia-ml.so.1")
    subprocess.run(["c++", "-x", "c", "-shared", "-fPIC", *flags, "-o", library, str(TARGETS / "nvml.c")], check=True)
    return folder


@pytest.fixture(scope="session")
def bert_tiny() -> ModelSpec:
    return ModelSpec.resolve("bert-tiny")


@pytest.fixture(scope="session")
def facts(bert_tiny: ModelSpec, server: ForkServer) -> ModelFacts:
    return model_facts(Workload(model=bert_tiny, n_parameters=0, seq_len=16), server)


@pytest.fixture(scope="session")
def workload(bert_tiny: ModelSpec, facts: ModelFacts) -> Workload:
    """bert-tiny on very short samples: a step takes some 20 ms."""
    return Workload(model=bert_tiny, n_parameters=facts.n_parameters, seq_len=16, structure=facts.structure)


OWN_CODE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, inputs, labels):
        return nn.functional.mse_loss(self.layer(inputs), labels)


def build():
    return Net()


def layers():
    return [nn.Linear(4, 4), nn.Linear(4, 4)], nn.MSELoss()


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.ones(4), torch.zeros(4)


def data():
    return Samples()


"""
"""A user's file: a model, a list of layers, and data for both."""


@pytest.fixture(scope="session")
def own_code() -> str:
    """What `own_file` writes anyway."""
    return OWN_CODE


@pytest.fixture
def own_file(tmp_path: Path) -> Callable[[str], Path]:
    """`own_file(more)` writes own.py: what a user has, and more."""

    def write(more: str = "") -> Path:
        file = tmp_path / "own.py"
        file.write_text(OWN_CODE + more, encoding="utf-8")
        return file

    return write


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium, without a window; tests that need it are skipped where it is not installed."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium is installed (Debian: apt-get install chromium)")
    expect.set_options(timeout=60_000)  # a busy machine draws slowly
    options = ["--no-sandbox"] if os.geteuid() == 0 else []  # its sandbox does not work for root
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=options)
        yield browser
        browser.close()
