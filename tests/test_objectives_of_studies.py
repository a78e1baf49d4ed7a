"""`tune` with every objective, on simulated clusters and replayed tables: which trial wins, what is stored, and what is refused."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from optuna.study import StudyDirection

from bo_tuner import TuneResult, tune
from bo_tuner.errors import ConfigError, StudyMismatchError
from bo_tuner.outcome import Outcome
from bo_tuner.report import SilentProgress
from bo_tuner.storage import Location, StudyStore
from bo_tuner.trial import TrialRecord
from tests.made_up_table import KNOWN, MIXED, write_table

MAXIMIZE, MINIMIZE = StudyDirection.MAXIMIZE, StudyDirection.MINIMIZE


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def simulate(objective: str, **options: Any) -> TuneResult:
    usual: dict[str, Any] = {
        "simulate": True,
        "cluster": "2x4xV100-16GB",
        "seq_len": 64,
        "budget": "9 trials",
        "progress": SilentProgress(),
        **options,
    }
    return tune("bert-tiny", objective=objective, **usual)


@pytest.fixture(scope="module")
def studies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TuneResult]:
    """One of each objective that a simulation can have."""
    with contextlib.chdir(tmp_path_factory.mktemp("studies")):
        return {
            "throughput": simulate("throughput", sampler="tpe"),  # it tries slow ones too, which are ended early
            "latency": simulate("latency", global_batch=64),
            "cost": simulate("cost", price_per_gpu_hour=2.5, sampler="tpe"),
            "throughput,memory": simulate("throughput,memory", budget="12 trials"),
        }


def complete(result: TuneResult) -> list[TrialRecord]:
    found = [trial for trial in result.trials if trial.samples_per_s is not None]
    assert len(found) > 1
    return found


# -- each objective ----------------------------------------------------------------------------------------------------


def test_studies_of_several_objectives_have_names_of_their_own(studies: dict[str, TuneResult]) -> None:
    label = "bert-tiny_seq64_fp16_2x4xV100-16GB"
    assert [result.study_name for result in studies.values()] == [
        f"{label}_simulated",
        f"{label}_latency_simulated",
        f"{label}_cost_simulated",
        f"{label}_throughput-memory_simulated",
    ]


def test_cost_is_exact_and_the_cheapest_trial_wins(studies: dict[str, TuneResult]) -> None:
    result = studies["cost"]
    for trial in complete(result):
        tokens_per_s = 64 * (trial.samples_per_s or 0.0)
        assert trial.goal.value(trial) == pytest.approx(2.5 * 8 / (3600 * tokens_per_s) * 1e6, rel=1e-12)
    values = [trial.standing_value or 0.0 for trial in complete(result)]
    assert result.best is not None and result.best.record.standing_value == min(values)


def test_cost_is_searched_and_ended_early_as_throughput_is(studies: dict[str, TuneResult]) -> None:
    cost, throughput = studies["cost"], studies["throughput"]
    assert [(trial.config, trial.result) for trial in cost.trials] == [
        (trial.config, trial.result) for trial in throughput.trials
    ]
    assert any(trial.result and trial.result.outcome is Outcome.PRUNED for trial in cost.trials)


def test_latency_is_the_time_of_steps_of_one_batch_and_the_shortest_wins(studies: dict[str, TuneResult]) -> None:
    result = studies["latency"]
    assert {trial.config.global_batch(8) for trial in result.trials} == {64}
    for trial in complete(result):
        assert trial.told is not None and trial.told.measurement is not None
        assert trial.goal.value(trial) == pytest.approx(trial.told.measurement.step_time_s, rel=1e-12)
    best = min(complete(result), key=lambda trial: trial.standing_value or 0.0)
    assert result.best is not None and result.best.record == best


def test_the_lowest_latency_is_not_the_highest_throughput_where_that_may_have_another_batch(
    studies: dict[str, TuneResult],
) -> None:
    latency, throughput = studies["latency"].best, studies["throughput"].best
    assert latency is not None and throughput is not None
    assert latency.measurement.step_time_s < throughput.measurement.step_time_s
    assert latency.measurement.samples_per_s < throughput.measurement.samples_per_s


def test_two_at_once_give_the_front_and_the_fastest_as_the_best(studies: dict[str, TuneResult]) -> None:
    result = studies["throughput,memory"]
    points = {
        trial.number: (trial.standing_samples_per_s or 0.0, trial.peak_memory_bytes or 0) for trial in complete(result)
    }
    unbeaten = [
        number
        for number, (rate, peak) in points.items()
        if not any(
            other_rate >= rate and other_peak <= peak and (other_rate, other_peak) != (rate, peak)
            for other_rate, other_peak in points.values()
        )
    ]
    front = [trial.number for trial in result.pareto]
    assert len(front) > 1
    assert sorted(front) == sorted(unbeaten)
    assert front == sorted(front, key=lambda number: -points[number][0])
    assert result.best is not None and result.best.record.number == front[0]
    assert result.best.record.confirmation is not None
    told = result.to_dict()
    assert (told["objective"], told["pareto"]) == ("throughput,memory", front)


def test_under_two_at_once_nothing_is_ended_for_being_slow(studies: dict[str, TuneResult]) -> None:
    trials = studies["throughput,memory"].trials
    assert all(trial.result and trial.result.outcome is not Outcome.PRUNED for trial in trials)


def test_optuna_has_the_values_of_the_objective_and_which_of_them_are_better(studies: dict[str, TuneResult]) -> None:
    directions = {name: result.study.directions for name, result in studies.items()}
    assert directions == {
        "throughput": [MAXIMIZE],
        "latency": [MINIMIZE],
        "cost": [MINIMIZE],
        "throughput,memory": [MAXIMIZE, MINIMIZE],
    }
    for result in studies.values():
        told = {trial.number: trial.values for trial in result.study.get_trials() if trial.values is not None}
        assert told == {trial.number: trial.goal.values(trial) for trial in complete(result)}


def test_plain_data_have_the_objective_its_unit_and_values(studies: dict[str, TuneResult]) -> None:
    told = json.loads(json.dumps(studies["latency"].to_dict()))
    assert (told["objective"], told["unit"], told["direction"], told["pareto"]) == ("latency", "s", "minimize", None)
    for trial in told["trials"]:
        assert trial["value"] == (None if trial["step_time_s"] is None else pytest.approx(trial["step_time_s"]))
    standing = [trial["standing_value"] for trial in told["trials"] if trial["standing_value"] is not None]
    assert told["best"]["standing_value"] == min(standing)


def test_a_job_that_is_exported_knows_what_it_was_chosen_for(studies: dict[str, TuneResult], tmp_path: Path) -> None:
    best = studies["cost"].best
    assert best is not None
    best.export(tmp_path / "job")
    measured = json.loads((tmp_path / "job" / "model.json").read_text(encoding="utf-8"))["measured"]
    assert measured["objective"] == {"name": "cost", "price_per_gpu_hour": 2.5, "n_ranks": 8}
    assert measured["value"] is measured["samples_per_s"] is None, "nothing was measured"


# -- going on ----------------------------------------------------------------------------------------------------------


def test_a_study_goes_on_under_its_objective() -> None:
    first = simulate("throughput,memory", budget="3 trials", confirm=False)
    rest = simulate("throughput,memory", budget="5 trials", confirm=False)
    assert rest.trials[:3] == first.trials
    assert len(rest.trials) == 5


@pytest.mark.parametrize(
    ("first", "then", "words"),
    [
        ({"objective": "throughput"}, {"objective": "latency", "global_batch": 64}, "(objective is throughput, not latency; "),
        ({"objective": "throughput"}, {"objective": "throughput,memory"}, "(objective is throughput, not throughput,memory):"),
        (
            {"objective": "cost", "price_per_gpu_hour": 2.0},
            {"objective": "cost", "price_per_gpu_hour": 3.0},
            "(objective price_per_gpu_hour is 2.0, not 3.0):",
        ),
    ],
)  # fmt: skip
def test_a_study_does_not_go_on_under_another_objective(
    first: dict[str, Any], then: dict[str, Any], words: str
) -> None:
    before = simulate(**first, study="mine", budget=1)
    with pytest.raises(StudyMismatchError) as caught:
        simulate(**then, study="mine", budget=2)
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert StudyStore(Location(), "mine").records() == before.trials


# -- replays -----------------------------------------------------------------------------------------------------------


def replay(objective: str, table: Path, group: str = "known", **options: Any) -> TuneResult:
    return tune(replay=table, group=group, objective=objective, progress=SilentProgress(), **options)


def test_a_table_can_be_searched_for_cost_latency_and_the_front(tmp_path: Path) -> None:
    table = write_table(tmp_path)
    cost = replay("cost", table, price_per_gpu_hour=4.0)
    assert cost.best is not None
    assert cost.best.record.standing_value == pytest.approx(4.0 * 8 / (3600 * 64 / 0.85 * 2048) * 1e6)
    latency = replay("latency", table)
    assert latency.best is not None and latency.best.record.standing_value == pytest.approx(0.85)
    assert latency.study_name == "known_latency_replayed"
    front = replay("throughput,memory", table).pareto
    assert [trial.config.micro_batch_size for trial in front] == [8, 4, 2, 1], "each step less memory costs speed"


# -- options -----------------------------------------------------------------------------------------------------------


def other_batch() -> list[str]:
    return [MIXED[0], MIXED[1].replace(",16,4,1,1,2,2,", ",32,4,1,1,2,4,")]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": "bert-tiny", "objective": "speed"}, "--objective must be one of throughput; latency; "),
        ({"model": "bert-tiny", "objective": "latency"}, "add --global-batch N"),
        ({"model": "bert-tiny", "objective": "latency", "max_global_batch": 64}, "add --global-batch N"),
        ({"model": "bert-tiny", "objective": "cost"}, "add --price-per-gpu-hour P"),
        ({"model": "bert-tiny", "price_per_gpu_hour": 2.0}, "--price-per-gpu-hour goes with --objective cost"),
        (
            {"model": "bert-tiny", "objective": "energy", "device": "cpu"},
            "--objective energy needs power that is measured, and CPU ranks tell none",
        ),
        ({"model": "bert-tiny", "objective": "energy", "simulate": True, "cluster": "8xH100"}, "a simulation draws none"),
        ({"objective": "energy", "replay": "runs.csv", "group": "known"}, "a replay draws none"),
        (
            {"objective": "latency", "replay": "runs.csv", "group": "mixed"},
            "--objective latency compares steps of one size, and those of group mixed hold from 16 to 32 samples",
        ),
        (
            {"objective": "cost", "price_per_gpu_hour": 1, "replay": "runs.csv", "group": "known"},
            "--objective cost counts tokens, and group known does not tell its seq_len",
        ),
    ],
)  # fmt: skip
def test_an_objective_that_cannot_be_met_is_refused_in_one_line_and_leaves_nothing(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    write_table(tmp_path, other_batch(), [line.replace(",2048,64,", ",,64,") for line in KNOWN])
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError) as caught:
        tune(**options)
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == before
