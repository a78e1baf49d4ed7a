"""Where profiles come from: a workload that is looked at here, or a model that another process builds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bo_tuner.errors import ModelError
from bo_tuner.objectives.launch import ForkServer
from bo_tuner.objectives.training import model_facts
from bo_tuner.objectives.training.job.layers import layer_stack
from bo_tuner.objectives.training.profiles import profile_of, workload_profile
from bo_tuner.objectives.training.sources import model_spec
from bo_tuner.workload import ModelSpec, Workload


def test_a_large_model_is_profiled_in_seconds() -> None:
    architecture = {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 6656,
        "num_hidden_layers": 60,
        "num_attention_heads": 52,
        "intermediate_size": 17920,
    }
    spec = ModelSpec(name="llama-30b", architecture=architecture)
    started = time.perf_counter()
    found = workload_profile(Workload(model=spec, n_parameters=0, seq_len=2048, precision="bf16"))
    assert time.perf_counter() - started < 20
    per_block = 4 * 6656**2 + 3 * 6656 * 17920 + 2 * 6656
    assert found.n_parameters == 60 * per_block + 2 * 32000 * 6656 + 6656
    products = 60 * (per_block - 2 * 6656) + 32000 * 6656
    assert found.layers[0].matmul_flops == 2 * 2048 * products
    assert found.layers[0].attention_flops == 60 * 4 * 2048**2 * 6656


def test_a_model_from_a_file_is_profiled_in_this_process_on_its_own_data(own_file: Callable[[str], Path]) -> None:
    file = own_file("")
    workload = Workload(
        model=model_spec(f"{file}:layers"), n_parameters=0, seq_len=1, precision="bf16", data=f"{file}:data"
    )
    found = workload_profile(workload, device="cpu")
    assert found.n_parameters == 2 * (4 * 4 + 4)
    assert (len(found.layers), found.element_bytes, found.seq_len) == (2, 2, 1)
    assert found.layers[0].output_bytes == 4 * 2


def test_a_model_that_cannot_be_built_is_named(own_file: Callable[[str], Path]) -> None:
    file = own_file("def wrong(): raise KeyError('nope')")
    workload = Workload(model=model_spec(f"{file}:wrong"), n_parameters=0, seq_len=1, data=f"{file}:data")
    with pytest.raises(
        ModelError, match=r"^model own-wrong: the model function must not raise, and raises KeyError: 'nope'"
    ):
        workload_profile(workload)


@pytest.fixture
def facts_of(own_file: Callable[[str], Path], server: ForkServer) -> Iterator[Callable[..., Any]]:
    """`facts_of(code)`: what is found of the function `model` in it."""

    def look(code: str, **options: Any) -> Any:
        file = own_file(code)
        workload = Workload(model=model_spec(f"{file}:model"), n_parameters=0, seq_len=1, data=f"{file}:data")
        return model_facts(workload, server, traces=True, **options)

    yield look


def test_facts_tell_the_profile_that_is_found_here_too(facts_of: Callable[[str], Any]) -> None:
    found = facts_of("def model(): return [nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)], nn.MSELoss()")
    model = layer_stack([nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)], nn.MSELoss())
    batch = (torch.ones(1, 4), torch.zeros(1, 4))
    assert found.profile == profile_of(model, batch, name="own-model", precision="fp32", device="cpu")
    assert found.unprofiled_because == ""


def test_facts_tell_why_there_is_no_profile(facts_of: Callable[[str], Any]) -> None:
    found = facts_of("""
class Reading(Net):
    def forward(self, *batch):
        return super().forward(*batch) * (1.0 if self.layer.weight.sum() > 0 else 2.0)

def model(): return Reading()
""")
    assert found.profile is None
    assert found.unprofiled_because.startswith(
        "own-model: Reading must run where weights have shapes and no values, and raises "
    )


ON_META = """
import os, time

class Breaking(Net):
    def forward(self, inputs, labels):
        if inputs.device.type == "meta" or self.layer.weight.device.type == "meta":
            {does}
        return super().forward(inputs, labels)

def model(): return Breaking()
"""


@pytest.mark.parametrize(
    ("does", "told"),
    [
        ("os._exit(3)", "the process that traces own-model ended with exit code 3 and said nothing"),
        ("os.kill(os.getpid(), 11)", "the process that traces own-model was ended by SIGSEGV"),
        ("time.sleep(60)", "the process that traces own-model gave no answer for 2 s"),
        ("raise SystemExit(4)", "own-model must not raise, and raises SystemExit: 4"),
    ],
)
def test_a_model_that_breaks_while_it_is_traced_keeps_its_facts(
    facts_of: Callable[..., Any], does: str, told: str
) -> None:
    found = facts_of(ON_META.format(does=does), longest_trace_s=2.0)
    assert (found.profile, found.unprofiled_because) == (None, told)
    assert found.n_parameters == 4 * 4 + 4
