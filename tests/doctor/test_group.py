"""Two real ranks meet and exchange; where they do not, the doctor says why, in time."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from bo_tuner.cluster import Cluster
from bo_tuner.doctor.finding import Status
from bo_tuner.doctor.group import meeting, server_start
from bo_tuner.objectives.launch import ForkServer


def test_two_ranks_meet_and_exchange(server: ForkServer, cluster: Cluster) -> None:
    group, exchange = meeting(server, cluster)
    assert (group.status, group.details["back_end"]) == (Status.OK, "gloo")
    assert 0 < group.details["form_s"] < 60
    assert exchange.status is Status.OK, exchange.log_tail
    sizes = exchange.details["sizes"]
    assert [size["n_bytes"] for size in sizes] == [2**20, 2**24, 2**26]
    for size in sizes:
        assert size["algorithm_gb_per_s"] == pytest.approx(size["n_bytes"] / size["median_s"] / 1e9)
        assert size["bus_gb_per_s"] == pytest.approx(size["algorithm_gb_per_s"])  # 2 (n-1) / n is 1 for two ranks


def test_ranks_meet_again_on_the_same_server(server: ForkServer, cluster: Cluster) -> None:
    assert [finding.status for finding in meeting(server, cluster)] == [Status.OK, Status.OK]


def test_one_rank_has_nothing_to_exchange(server: ForkServer, cluster: Cluster) -> None:
    group, exchange = meeting(server, replace(cluster, n_ranks=1))
    assert group.found.startswith("1 rank met")
    assert exchange.found == "one rank has nothing to exchange"


def test_a_rank_that_waits_in_vain_is_shown_where_it_waits(server: ForkServer, cluster: Cluster) -> None:
    started = time.monotonic()
    (found,) = meeting(server, cluster, target="misbehave:meet_alone", longest_s=3.0)
    assert time.monotonic() - started < 20
    assert (found.name, found.status) == ("process group", Status.FAIL)
    assert found.found == "2 ranks must meet: they were not done in time, their stacks are below"
    assert "init_process_group" in found.log_tail
    assert "loopback" in found.mend


@pytest.mark.parametrize(("target", "how"), [("raise_error", "exit code 1"), ("crash", "SIGSEGV")])
def test_a_rank_that_dies_before_they_meet_is_named(
    server: ForkServer, cluster: Cluster, target: str, how: str
) -> None:
    (found,) = meeting(server, cluster, target=f"misbehave:{target}")
    assert (found.name, found.status) == ("process group", Status.FAIL)
    assert how in found.found
    assert target != "raise_error" or "RuntimeError: on purpose" in found.log_tail


def test_a_rank_that_dies_after_they_met_fails_the_exchange(server: ForkServer, cluster: Cluster) -> None:
    (found,) = meeting(server, cluster, target="misbehave:meet_and_leave")
    assert (found.name, found.status) == ("all-reduce", Status.FAIL)
    assert found.found.startswith("2 ranks must exchange: ")


def test_a_server_that_starts_tells_how_long_it_took() -> None:
    with ForkServer(preload=[], prepare=None, environment={}) as server:
        found = server_start(server)
        assert (found.status, found.found) == (Status.OK, f"ready after {found.details['start_s']:.1f} s")


def test_a_server_that_cannot_import_is_a_problem_that_names_what_is_missing() -> None:
    with ForkServer(preload=["no_such_module"], prepare=None, environment={}) as server:
        found = server_start(server)
        assert found.status is Status.FAIL
        assert "No module named 'no_such_module'" in found.found
        assert not server.is_started


def test_a_server_that_started_cuda_is_a_warning() -> None:
    with ForkServer(preload=["pretend_cuda"], prepare=None, environment={}) as server:
        found = server_start(server)
        assert found.status is Status.WARN
        assert "fresh interpreters" in found.found
