"""Ranks of trials and of exported jobs run with the same variables."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from bo_tuner.cluster import Cluster
from bo_tuner.objectives.training.environment import changed_variables, rank_environment, recorded_environment
from bo_tuner.objectives.training.objective import training_server

CPU = Cluster(device="cpu", n_ranks=2, device_name="a thought", memory_bytes=2**33, threads_per_rank=3)
GPU = replace(CPU, device="cuda", threads_per_rank=1)
SET = {
    "NCCL_ALGO": "Ring",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "HOME": "/home/me",
    "OMP_NUM_THREADS": "7",
}


def test_what_the_user_set_of_allocator_communication_and_threads_is_recorded_and_nothing_else() -> None:
    assert recorded_environment(GPU, SET) == {name: value for name, value in SET.items() if name != "HOME"}


def test_the_threads_of_a_rank_on_a_gpu_are_never_left_to_who_starts_it() -> None:
    threads = recorded_environment(replace(GPU, n_ranks=10**6), {})
    assert threads == {"OMP_NUM_THREADS": "1"}
    assert rank_environment(GPU, threads)["OMP_NUM_THREADS"] == "1"


def test_ranks_get_what_was_recorded_but_for_what_must_be_otherwise() -> None:
    recorded = recorded_environment(CPU, {**SET, "GLOO_SOCKET_IFNAME": "eth0"})
    ranks = rank_environment(CPU, recorded)
    assert (ranks["NCCL_ALGO"], ranks["OMP_NUM_THREADS"], ranks["GLOO_SOCKET_IFNAME"]) == ("Ring", "3", "lo")
    assert rank_environment(CPU, None) == rank_environment(CPU, {})


def test_what_has_changed_since_a_study_began_is_told() -> None:
    told = changed_variables({"NCCL_ALGO": "Ring"}, {"NCCL_DEBUG": "INFO"})
    assert told == "NCCL_ALGO is not set, and was Ring, NCCL_DEBUG is INFO, and was not set"
    assert changed_variables(None, SET) == changed_variables(SET, SET) == ""


@pytest.mark.parametrize("users", [None, "0", "1"])
def test_whether_users_code_may_download_is_left_to_the_user(
    monkeypatch: pytest.MonkeyPatch, users: str | None
) -> None:
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
    for name in names:
        monkeypatch.delenv(name, raising=False)
        if users is not None:
            monkeypatch.setenv(name, users)
    with training_server(CPU) as server:
        seen = {**os.environ, **server.environment}  # of the process that ranks are forked from
        assert [seen.get(name) for name in names] == [users] * 3
