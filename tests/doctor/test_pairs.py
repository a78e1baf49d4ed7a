"""Real ranks exchange two by two, over gloo; the pair that does not is named."""

from __future__ import annotations

from dataclasses import replace

from bo_tuner.cluster import Cluster
from bo_tuner.doctor.finding import Status
from bo_tuner.doctor.pairs import pairs, rounds_of
from bo_tuner.objectives.launch import ForkServer


def test_each_pair_has_its_round_and_no_rank_is_in_two_of_one() -> None:
    wanted = [(a, b) for a in range(8) for b in range(a + 1, 8)]
    rounds = rounds_of(wanted, 8)
    assert sorted(pair for pairs in rounds for pair in pairs) == wanted
    assert all(len({rank for pair in pairs for rank in pair}) == 2 * len(pairs) for pairs in rounds)


def test_the_pair_that_hangs_is_named_by_its_gpus_and_the_others_are_tried(
    server: ForkServer, cluster: Cluster
) -> None:
    three = replace(cluster, n_ranks=3)
    found = pairs(server, three, gpus=(4, 5, 7), target="misbehave:exchange_but_with_two", longest_s=10.0)
    assert (found.status, found.found) == (Status.FAIL, "1 pair of 3 cannot exchange: 4-7")
    assert set(found.details["seconds"]) == {"0-1", "1-2"}
    assert "CUDA_VISIBLE_DEVICES" in found.mend
