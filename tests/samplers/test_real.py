"""`benchmarks.real`: what it measures, and how it judges studies, without any process."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
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
        assert 1 <= len(study.confirmed) <= 3
        assert {*study.confirmed, study.winner} <= {*study.trials}


def test_studies_are_read_as_they_were_told(tmp_path: Path) -> None:
    path = tmp_path / "studies.csv"
    rows = ["3,trial,a,1.0,0.9,1.1,a", "3,trial,b,1.2,1.1,1.3,a", "3,confirm,b,1.1,1.0,1.2,b", "5,trial,c,,nan,nan,"]
    path.write_text("\n".join(["study,run,config,samples_per_s,samples_per_s_low,samples_per_s_high,best", *rows]))
    assert read_studies(path) == [
        Study(seed=3, trials=("a", "b"), best=("a", "a"), confirmed=("b",), winner="b"),
        Study(seed=5, trials=("c",), best=("",), confirmed=(), winner=""),
    ]


def test_a_configs_rate_is_the_mean_of_its_passes_without_what_those_differ_by(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    step_times_s = ((0.2, 0.4, 0.5), (0.1, 0.2, 0.25), (0.8, 0.4, 1.0))
    lines = [
        f"pass-{number},toy,cpu,2,{size},1,ok,{step_s}"
        for number, times in enumerate(step_times_s)
        for size, step_s in enumerate(times, 1)
    ]
    path.write_text("\n".join([HEADER, *lines]), encoding="utf-8")
    level = (10 * 20 * 6) ** (1 / 3)
    relative = {1: (1, 1, 2.5 / 6), 2: (1, 1, 10 / 6), 3: (1.2, 1.2, 1)}
    expected = {f"z0_gas1_mbs{size}": level * math.prod(shares) ** (1 / 3) for size, shares in relative.items()}
    assert rates(path) == pytest.approx(expected)


def of(trials: str, best: str, *, winner: str = "a") -> Study:
    return Study(seed=0, trials=tuple(trials), best=tuple(best), confirmed=(winner,), winner=winner)


def test_a_study_is_judged_by_the_tables_rate_of_what_it_held_for_the_best() -> None:
    study = replace(of("cab", "cab", winner="c"), best=("", "a", "b"))
    assert study.qualities(RATES) == pytest.approx((0.0, 0.5, 0.95))
    assert study.quality(RATES) == pytest.approx(0.945)


def test_to_have_run_one_near_the_best_it_need_not_be_held_for_the_best() -> None:
    assert of("ab", "aa").has_run_near(RATES)
    assert not of("ac", "ac").has_run_near(RATES)


@pytest.mark.parametrize(
    ("best", "after"),
    [("ab", 2), ("bb", 1), ("aa", None), ("ba", None), ("bad", 3), ("c", None)],
)
def test_the_best_is_reached_only_by_a_study_that_stays_near_it(best: str, after: int | None) -> None:
    assert of(best, best).reached_after(RATES) == after


def test_chance_counts_configs_near_the_best() -> None:
    assert by_chance(RATES) == (2, 1.0), "four configs, six trials"
    assert by_chance({"best": 2.0, **{str(number): 1.0 for number in range(9)}}) == pytest.approx((1, 0.6))
