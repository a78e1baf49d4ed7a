"""The bar in a notebook, drawn by a real kernel."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import start_new_kernel

from bo_tuner.report.notebook import is_notebook

_SETUP = """
import sys
from bo_tuner.budget import Budget, Spent
from bo_tuner.config import TrainConfig
from bo_tuner.engine import Snapshot
from bo_tuner.outcome import Measurement, Outcome, TrialResult
from bo_tuner.report import default_progress
from bo_tuner.trial import TrialRecord

measurement = Measurement(
    global_batch=8, seq_len=16, step_times_s=((0.25, 0.25),), engine_times_s=((0.25, 0.25),), peak_memory_bytes=(1,)
)
done = TrialRecord(
    number=0, config=TrainConfig(micro_batch_size=4), result=TrialResult(outcome=Outcome.COMPLETE, measurement=measurement)
)
running = TrialRecord(number=1, config=TrainConfig(zero_stage=1))
"""
_RUN = """
progress = default_progress()
progress.shows(Snapshot(records=[done, running], budget=Budget.parse(BUDGET), spent=BEFORE, running=running))
progress.ended(running, Snapshot(records=[done], budget=Budget.parse(BUDGET), spent=AFTER))
progress.close()
"""


class Kernel:
    """Runs cells as a notebook does."""

    def __init__(self, client: BlockingKernelClient) -> None:
        self._client = client

    def run(self, code: str) -> list[dict[str, Any]]:
        """What the cell showed, as messages with `msg_type` and `content`."""
        messages: list[dict[str, Any]] = []
        reply = self._client.execute_interactive(code, output_hook=messages.append, timeout=200, allow_stdin=False)
        assert reply["content"]["status"] == "ok", reply["content"]
        return messages


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    manager, client = start_new_kernel()
    try:
        kernel = Kernel(client)
        kernel.run(_SETUP)
        yield kernel
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def text_bar(kernel: Kernel, budget: str, *, before: str, after: str) -> list[str]:
    """What the bar looked like, in turn, where ipywidgets are not installed."""
    code = (
        _RUN.replace("BUDGET", repr(budget)).replace("BEFORE", f"Spent({before})").replace("AFTER", f"Spent({after})")
    )
    messages = kernel.run(f"sys.modules['ipywidgets'] = None\n{code}")
    assert {message["msg_type"] for message in messages} <= {"stream", "status", "execute_input"}
    streams = [message["content"] for message in messages if message["msg_type"] == "stream"]
    assert {stream["name"] for stream in streams} == {"stderr"}
    lines = re.split(r"[\r\n]+", "".join(stream["text"] for stream in streams))
    return [line.strip() for line in lines if line.strip()]


def test_the_bar_has_the_trials_of_the_budget_the_best_and_what_runs(kernel: Kernel) -> None:
    shown = text_bar(kernel, "4 trials, 1h", before="trials=1", after="trials=2")
    assert any(
        re.search(r"^25%\|.*\| 1 of 4 trials \[.*, best 32/s z0_gas1_mbs4, z1_gas1_mbs1 runs\]$", s) for s in shown
    )
    assert re.search(r"^50%\|.*\| 2 of 4 trials \[.*, best 32/s z0_gas1_mbs4\]$", shown[-1])


@pytest.mark.parametrize(
    ("budget", "after", "expected"),
    [
        ("10m", "seconds=61.5", "10%|X| 61 of 600 s ["),
        ("10m", "seconds=700", "100%|X| 600 of 600 s ["),
        ("2 gpu-h", "device_seconds=1800", "25%|X| 0.5 of 2.0 gpu-h ["),
    ],
)
def test_a_budget_without_trials_is_a_bar_of_time(kernel: Kernel, budget: str, after: str, expected: str) -> None:
    last = text_bar(kernel, budget, before="", after=after)[-1]
    assert re.sub(r"\|.*\|", "|X|", last).startswith(expected)


def test_with_ipywidgets_the_bar_is_a_widget(kernel: Kernel) -> None:
    code = _RUN.replace("BUDGET", "'4 trials'").replace("BEFORE", "Spent(trials=1)").replace("AFTER", "Spent(trials=2)")
    messages = kernel.run(f"sys.modules.pop('ipywidgets', None)\n{code}")
    shown = [message["content"] for message in messages if message["msg_type"] == "display_data"]
    assert len(shown) == 1
    assert "application/vnd.jupyter.widget-view+json" in shown[0]["data"]
    comms = [message["content"] for message in messages if message["msg_type"].startswith("comm_")]
    told = json.dumps(comms, ensure_ascii=False).replace("\N{FIGURE SPACE}", " ")
    assert "2 of 4 trials" in told
    assert "best 32/s z0_gas1_mbs4" in told
    assert not [message for message in messages if message["msg_type"] == "stream"]


def test_this_process_is_no_notebook() -> None:
    assert not is_notebook()
