"""`benchmarks.real`: what it measures, and how it judges studies, without any process."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks.real import FOLDER, N_TRIALS, Study, by_chance, rates, read_studies, space
from bo_tuner.cluster import Cluster
from bo_tuner.config import TrainConfig
from bo_tuner.objectives.table import MeasuredTable, group_sizes
from bo_tuner.objectives.training import DeepSpeedBackEnd

HEADER = "group,model,gpu,num_gpus,mbs,gas,status,step_time_s"
RATES = {"a": 10.0, "b": 19.0, "c": 18.9, "d": 20.0}


@pytest.fixture(scope="module")
def configs() -> tuple[TrainConfig, ...]:
    cluster = Cluster.detect(device="cpu", n_ranks=2)
    return space(cluster).candidates(cluster, DeepSpeedBackEnd())


def test_the_space_is_sixty_legal_configs_the_same_every_time(configs: tuple[TrainConfig, ...]) -> None:
    assert len(set(configs)) == len(configs) == 60
    assert all(DeepSpeedBackEnd().legal(config) and config.global_batch(2) <= 8 for config in configs)
    assert configs == space(Cluster.detect(device="cpu", n_ranks=2)).listed
    assert {config.zero_stage for config in configs} == {0, 1, 2, 3}
    assert {config.pipeline_depth for config in configs} == {1, 2}


def test_each_pass_of_the_table_holds_the_whole_space(configs: tuple[TrainConfig, ...]) -> None:
    path = FOLDER / "runs.csv"
    for group in group_sizes(path):
        table = MeasuredTable.read(path, group)
        assert set(table.configs) == set(configs)
        assert (len(table.runs), table.n_ranks, table.notes) == (60, 2, ())
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            assert 0 <= float(row["step_time_low_s"]) < float(row["step_time_s"]) < float(row["step_time_high_s"])
            assert int(row["n_steps"]) >= 3


def test_the_studies_ran_configs_of_the_space_each_once(configs: tuple[TrainConfig, ...]) -> None:
    names = {config.name for config in configs}
    for study in read_studies(FOLDER / "studies.csv"):
        assert len(set(study.trials)) == len(study.trials) == len(study.best) == N_TRIALS
        assert set(study.trials) <= names
        assert all(best in study.trials[: number + 1] for number, best in enumerate(study.best))


def test_a_configs_rate_is_the_median_of_its_passes(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    lines = [
        f"pass-{number},toy,cpu,2,{size},1,ok,{step_s}"
        for number, size, step_s in ((1, 1, 0.2), (1, 2, 0.5), (2, 1, 0.1), (2, 2, 0.4), (3, 1, 0.4))
    ]
    path.write_text("\n".join([HEADER, *lines]), encoding="utf-8")
    assert rates(path) == pytest.approx({"z0_gas1_mbs1": 10.0, "z0_gas1_mbs2": 9.0})


def test_a_study_is_judged_by_the_tables_rate_of_what_it_held_for_the_best() -> None:
    study = Study(seed=0, trials=("c", "a", "b"), best=("", "a", "b"))
    assert study.qualities(RATES) == pytest.approx((0.0, 0.5, 0.95))


def test_to_have_run_one_near_the_best_it_need_not_be_held_for_the_best() -> None:
    assert Study(seed=0, trials=("a", "b"), best=("a", "a")).has_run_near(RATES)
    assert not Study(seed=0, trials=("a", "c"), best=("a", "c")).has_run_near(RATES)


@pytest.mark.parametrize(
    ("best", "after"),
    [("ab", 2), ("bb", 1), ("aa", None), ("ba", None), ("bad", 3), ("c", None)],
)
def test_the_best_is_reached_only_by_a_study_that_stays_near_it(best: str, after: int | None) -> None:
    assert Study(seed=0, trials=tuple(best), best=tuple(best)).reached_after(RATES) == after


def test_chance_counts_configs_near_the_best() -> None:
    assert by_chance(RATES) == (2, 1.0), "four configs, six trials"
    assert by_chance({"best": 2.0, **{str(number): 1.0 for number in range(9)}}) == pytest.approx((1, 0.6))
