"""Twenty trials with random faults, the supervisor killed on the way: every trial accounted for, nothing left, the same best."""

from __future__ import annotations

from pathlib import Path

import pytest

from bo_tuner.cluster import Cluster
from bo_tuner.objectives.launch import ForkServer
from bo_tuner.outcome import Outcome
from bo_tuner.trial import best_of
from tests.faults.study import GREEDY, Soaked, configs, drive, records, soak

N = 15
"""Configs: with those that are tried twice, some twenty trials."""
DIE_AT = (9,)


@pytest.fixture(scope="module")
def soaked(tmp_path_factory: pytest.TempPathFactory) -> Soaked:
    return soak(tmp_path_factory.mktemp("soak"), n=N, seed=37, die_at=DIE_AT)


def test_every_trial_is_accounted_for(soaked: Soaked) -> None:
    assert soaked.n_deaths == len(DIE_AT)
    assert sorted(record.config.name for record in soaked.records) == sorted(config.name for config in configs(N))
    for record in soaked.records:
        assert record.result is not None
        if record.config in GREEDY:
            assert record.result.outcome in (Outcome.OOM, Outcome.GUARDED), record.result.reason
        else:
            assert record.result.outcome in (Outcome.COMPLETE, Outcome.PRUNED), record.result.reason
    hit = [attempt for record in soaked.records for attempt in record.attempts]
    assert {attempt.outcome for attempt in hit} == {Outcome.FAILED, Outcome.TIMEOUT}, "the faults are drawn badly"
    assert soaked.n_launches >= 20
    assert soaked.n_launches == N + len(hit) + soaked.n_deaths


def test_nothing_leaks(soaked: Soaked) -> None:
    assert soaked.processes == []
    assert soaked.temporary == []
    assert soaked.shared_memory == []
    assert len(soaked.held) > 5
    assert soaked.held[-1] == soaked.held[1]


def test_the_best_is_that_of_the_study_without_faults(
    soaked: Soaked, server: ForkServer, cluster: Cluster, tmp_path: Path
) -> None:
    drive(tmp_path, server, cluster, n=N, seed=None)
    best, calm = best_of(soaked.records), best_of(records(tmp_path))
    assert best is not None and calm is not None
    assert best.config == calm.config
