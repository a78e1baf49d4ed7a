"""What runs, in which order and under which limits, and when a study ends."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from bo_tuner.budget import Budget
from bo_tuner.config import TrainConfig
from bo_tuner.engine import StopReason
from bo_tuner.outcome import Outcome
from bo_tuner.space import SearchSpace
from bo_tuner.trial import best_of
from tests.engine.bench import LIMIT_BYTES, N_RANKS, TINY, WIDE, Analytic, Bench, Told, TrialState

# -- budget --------------------------------------------------------------------------------------------------------


def test_a_study_runs_to_its_budget_of_trials(bench: Bench) -> None:
    objective = Analytic()
    assert bench.run(objective, "5 trials") is StopReason.BUDGET
    assert len(objective.calls) == len(set(objective.calls)) == 5
    assert bench.names == objective.calls
    assert bench.store.spent().trials == 5


def test_a_study_ends_when_its_time_is_up(bench: Bench) -> None:
    objective = Analytic(wall_s=0.001)
    assert bench.run(objective, "5000 trials, 0.3s", space=WIDE, is_timed=True) is StopReason.BUDGET
    spent = bench.store.spent()
    assert spent.seconds >= 0.3
    assert spent.trials == len(objective.calls) < 5000


def test_a_study_ends_when_its_device_hours_are_up(bench: Bench) -> None:
    budget = Budget(trials=5000, device_hours=0.6 / 3600)
    assert bench.run(Analytic(wall_s=0.001), budget, space=WIDE, is_timed=True) is StopReason.BUDGET
    spent = bench.store.spent()
    assert spent.device_seconds >= 0.6
    assert spent.device_seconds == pytest.approx(N_RANKS * spent.seconds)
    assert spent.trials < 5000


def test_a_used_up_budget_runs_nothing_more(bench: Bench) -> None:
    bench.run(Analytic(), "3 trials")
    again = Analytic()
    assert bench.run(again, "3 trials") is StopReason.BUDGET
    assert again.calls == []


def test_a_larger_budget_goes_on_as_if_it_had_been_given_at_first(tmp_path: Path, bench: Bench) -> None:
    first, second = Analytic(), Analytic()
    bench.run(first, "3 trials", sampler="tpe")
    assert bench.run(second, "7 trials", sampler="tpe") is StopReason.BUDGET
    assert (len(first.calls), len(second.calls)) == (3, 4)
    whole = Bench(tmp_path / "whole")
    whole.run(Analytic(), "7 trials", sampler="tpe")
    assert bench.names == whole.names == first.calls + second.calls
    whole.close()


def test_time_spent_adds_up_over_runs(bench: Bench) -> None:
    bench.run(Analytic(), "1 trials", is_timed=True)
    before = bench.store.spent().seconds
    assert before > 0
    bench.run(Analytic(), "2 trials", is_timed=True)
    assert bench.store.spent().seconds > before


# -- order and limits ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", ["tpe", "random", "grid"])
def test_the_default_config_runs_first(bench: Bench, sampler: str) -> None:
    objective = Analytic()
    bench.run(objective, "1 trials", space=WIDE, sampler=sampler)
    assert objective.calls == ["z0_gas1_mbs1"]


@pytest.mark.parametrize("sampler", ["tpe", "random", "grid"])
def test_where_the_default_config_does_not_fit_the_lightest_candidate_runs_second(bench: Bench, sampler: str) -> None:
    objective = Analytic()
    bench.run(objective, "3 trials", space=WIDE, sampler=sampler, memory_bytes=550)
    assert objective.calls[:2] == ["z0_gas1_mbs1", "z3_gas1_mbs1"]
    assert len(set(objective.calls)) == 3


def test_every_trial_runs_under_the_memory_limit_and_the_incumbent_so_far(bench: Bench) -> None:
    objective = Analytic()
    bench.run(objective, "6 trials", memory_bytes=1234)
    assert {limits.memory_bytes for limits in objective.limits} == {1234}
    records = bench.records
    for number, limits in enumerate(objective.limits):
        best = best_of(records[:number])
        assert limits.incumbent_samples_per_s == (best.samples_per_s if best else None)
    assert objective.limits[0].incumbent_samples_per_s is None
    assert len({limits.incumbent_samples_per_s for limits in objective.limits}) > 2


def test_deadlines_are_generous_at_first_and_follow_start_and_slowest_rate_later(bench: Bench) -> None:
    objective = Analytic()
    bench.run(objective, "3 trials")
    assert objective.limits[0].deadline_s == 600.0
    first = bench.records[0]
    assert first.samples_per_s is not None
    steps_s = 12 * bench.records[1].config.global_batch(N_RANKS) / first.samples_per_s
    assert objective.limits[1].deadline_s == pytest.approx(10 * (20.0 + steps_s))


def test_progress_is_told_of_every_event_and_once_of_every_end(bench: Bench) -> None:
    told = Told()
    bench.run(Analytic(script={"z0_gas1_mbs1": [Outcome.TIMEOUT]}), "3 trials", progress=told)
    assert [record.number for record, _ in told.over] == [0, 1, 2]
    assert [snapshot.spent.trials for _, snapshot in told.over] == [1, 2, 3]
    assert [record for record, _ in told.over] == bench.records
    assert len(told.shown) == 4
    assert [snapshot.running.number if snapshot.running else None for snapshot in told.shown] == [0, 0, 1, 2]
    assert all(snapshot.event is not None and snapshot.memory_limit_bytes == LIMIT_BYTES for snapshot in told.shown)
    assert told.n_closed == 1


def test_progress_is_told_when_each_try_began(bench: Bench) -> None:
    told = Told()
    started = time.monotonic()
    bench.run(Analytic(script={"z0_gas1_mbs1": [Outcome.TIMEOUT]}), "2 trials", progress=told)
    began = [snapshot.running_since or 0.0 for snapshot in told.shown]
    assert len(set(began)) == 3
    assert started <= began[0] and began == sorted(began) and began[-1] <= time.monotonic()


def test_progress_is_closed_when_a_run_is_interrupted(bench: Bench) -> None:
    told = Told()
    with pytest.raises(KeyboardInterrupt):
        bench.run(Analytic(interrupts_at=2), "3 trials", progress=told)
    assert told.n_closed == 1


# -- failures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", [Outcome.TIMEOUT, Outcome.FAILED])
def test_what_teaches_nothing_is_retried_once_and_counted_once(bench: Bench, outcome: Outcome) -> None:
    objective = Analytic(script={"z0_gas1_mbs1": [outcome, outcome]})
    assert bench.run(objective, "3 trials") is StopReason.BUDGET
    assert objective.calls[:2] == ["z0_gas1_mbs1"] * 2
    assert objective.calls.count("z0_gas1_mbs1") == 2
    assert bench.outcomes == [outcome, Outcome.COMPLETE, Outcome.COMPLETE]
    assert bench.store.spent().trials == 3
    first = bench.records[0]
    assert [attempt.outcome for attempt in first.attempts] == [outcome]
    assert first.wall_s == 6.0
    assert [trial.state for trial in bench.store.study.trials] == [TrialState.FAIL, *[TrialState.COMPLETE] * 2]


@pytest.mark.parametrize("outcome", [Outcome.TIMEOUT, Outcome.FAILED])
def test_the_success_of_a_retry_is_kept_with_the_attempt_before(bench: Bench, outcome: Outcome) -> None:
    bench.run(Analytic(script={"z0_gas1_mbs1": [outcome]}), "2 trials")
    first = bench.records[0]
    assert first.result is not None and first.result.outcome is Outcome.COMPLETE
    assert [(attempt.outcome, attempt.reason) for attempt in first.attempts] == [(outcome, "as planned")]
    trial = bench.store.study.trials[0]
    assert (trial.state, trial.value) == (TrialState.COMPLETE, first.samples_per_s)


@pytest.mark.parametrize("outcome", [Outcome.OOM, Outcome.GUARDED, Outcome.HOST_OOM, Outcome.REJECTED, Outcome.PRUNED])
def test_what_teaches_is_never_retried(bench: Bench, outcome: Outcome) -> None:
    objective = Analytic(script={"z0_gas1_mbs1": [outcome]})
    bench.run(objective, "3 trials", sampler="grid")
    assert objective.calls.count("z0_gas1_mbs1") == 1
    assert bench.outcomes[0] is outcome
    trial = bench.store.study.trials[0]
    assert (trial.state, trial.values) == (TrialState.PRUNED, None)


def test_three_failures_in_a_row_end_a_study_in_which_nothing_completed(bench: Bench) -> None:
    objective = Analytic(script={"*": [Outcome.FAILED] * 100})
    assert bench.run(objective, "20 trials") is StopReason.BROKEN
    assert bench.outcomes == [Outcome.FAILED] * 3
    assert len(objective.calls) == 6


def test_failures_do_not_end_a_study_in_which_a_trial_completed(bench: Bench) -> None:
    bench.run(Analytic(), "1 trials")
    assert bench.run(Analytic(script={"*": [Outcome.FAILED] * 100}), "5 trials") is StopReason.BUDGET
    assert bench.outcomes == [Outcome.COMPLETE, *[Outcome.FAILED] * 4]


def test_running_out_of_memory_is_no_failure(bench: Bench) -> None:
    objective = Analytic(script={"*": [Outcome.FAILED] * 4 + [Outcome.OOM] + [Outcome.FAILED] * 4})
    bench.run(objective, "5 trials")
    assert bench.outcomes == [Outcome.FAILED] * 2 + [Outcome.OOM] + [Outcome.FAILED] * 2


def test_a_broken_study_tries_again_when_it_is_run_again(bench: Bench) -> None:
    bench.run(Analytic(script={"*": [Outcome.FAILED] * 100}), "20 trials")
    mended = Analytic()
    assert bench.run(mended, "6 trials") is StopReason.BUDGET
    assert bench.outcomes == [Outcome.FAILED] * 3 + [Outcome.COMPLETE] * 3


# -- memory --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", ["tpe", "grid"])
def test_out_of_memory_rules_out_larger_micro_batches_of_that_layout_and_the_study_goes_on(
    bench: Bench, sampler: str
) -> None:
    space = SearchSpace(zero_stages=(0, 1), max_micro_batch=6, max_grad_accum=1)
    assert bench.run(Analytic(), "1000 trials", space=space, sampler=sampler, memory_bytes=700) is StopReason.EXHAUSTED
    fits = {0: 2, 1: 4}
    least = {0: 10**9, 1: 10**9}
    complete: set[TrainConfig] = set()
    for record in bench.records:
        config = record.config
        assert config.micro_batch_size < least[config.zero_stage]
        assert record.result is not None
        if config.micro_batch_size > fits[config.zero_stage]:
            assert record.result.outcome is Outcome.OOM
            least[config.zero_stage] = config.micro_batch_size
        else:
            assert record.result.outcome is Outcome.COMPLETE
            complete.add(config)
    assert len(complete) == 2 + 4
    best = best_of(bench.records)
    assert best is not None and best.config.name == "z1_gas1_mbs4"


def test_an_out_of_memory_trial_is_pruned_for_optuna_with_a_constraint_above_zero(bench: Bench) -> None:
    bench.run(Analytic(), "1000 trials", sampler="grid", space=TINY, memory_bytes=750)
    assert bench.outcomes == [Outcome.COMPLETE, Outcome.COMPLETE, Outcome.OOM]
    ran, _, failed = bench.store.study.trials
    assert (failed.state, failed.values) == (TrialState.PRUNED, None)
    assert ran.state is TrialState.COMPLETE
    assert failed.constraints["memory"] == pytest.approx(50 / 750)
    assert failed.system_attrs["constraints"] == [pytest.approx(50 / 750)]  # what dashboards up to 0.21 read
    assert ran.constraints["memory"] == pytest.approx(600 / 750 - 1)


def test_where_nothing_fits_the_lightest_candidate_shows_it_and_the_study_ends_without_a_best(bench: Bench) -> None:
    objective = Analytic(bytes_of=dict.fromkeys(range(4), 10 * LIMIT_BYTES))
    assert bench.run(objective, "1000 trials", space=WIDE, sampler="grid") is StopReason.NOTHING_FITS
    assert objective.calls == ["z0_gas1_mbs1", "z3_gas1_mbs1"]
    assert bench.outcomes == [Outcome.OOM] * 2
    assert best_of(bench.records) is None
    again = Analytic()
    assert bench.run(again, "1000 trials", space=WIDE, sampler="grid") is StopReason.NOTHING_FITS
    assert again.calls == []


def test_the_edge_of_memory_is_found_to_the_sample(bench: Bench) -> None:
    # Few are legal, so that the study is short; the ladder has 64 and 68, and 65 to 67 are refined.
    class Coarse:
        def legal(self, config: TrainConfig) -> bool:
            return config.micro_batch_size == 1 or config.micro_batch_size >= 64

    space = SearchSpace(zero_stages=(0,), max_micro_batch=68, max_grad_accum=1)
    objective = Analytic()
    reason = bench.run(objective, "1000 trials", space=space, memory_bytes=7200, back_end=Coarse())
    assert reason is StopReason.EXHAUSTED
    best = best_of(bench.records)
    assert best is not None and best.config.micro_batch_size == 67
    assert objective.calls.count(best.config.name) == 1


# -- the end, and going on -----------------------------------------------------------------------------------------


def test_a_space_that_was_run_through_ends_the_study(bench: Bench) -> None:
    objective = Analytic()
    assert bench.run(objective, "1000 trials", space=TINY) is StopReason.EXHAUSTED
    assert sorted(objective.calls) == ["z0_gas1_mbs1", "z0_gas1_mbs2", "z0_gas1_mbs3"]
    again = Analytic()
    assert bench.run(again, "2000 trials", space=TINY) is StopReason.EXHAUSTED
    assert again.calls == []


@pytest.mark.parametrize("interrupts_at", [1, 3])
def test_an_interrupted_trial_runs_again_first_and_the_study_goes_on_as_if_never_interrupted(
    tmp_path: Path, bench: Bench, interrupts_at: int
) -> None:
    interrupted = Analytic(interrupts_at=interrupts_at)
    with pytest.raises(KeyboardInterrupt):
        bench.run(interrupted, "5 trials", sampler="tpe")
    assert bench.outcomes == [*[Outcome.COMPLETE] * (interrupts_at - 1), None]
    resumed = Analytic()
    assert bench.run(resumed, "5 trials", sampler="tpe") is StopReason.BUDGET
    assert resumed.calls[0] == interrupted.calls[-1]
    whole = Bench(tmp_path / "whole")
    whole.run(Analytic(), "5 trials", sampler="tpe")
    assert bench.names == whole.names
    assert None not in bench.outcomes
    assert bench.store.spent().trials == 5
    whole.close()


def test_a_retry_that_was_interrupted_is_not_retried_a_second_time(bench: Bench) -> None:
    first = Analytic(script={"*": [Outcome.FAILED]}, interrupts_at=2)
    with pytest.raises(KeyboardInterrupt):
        bench.run(first, "1 trials")
    second = Analytic(script={"*": [Outcome.FAILED] * 5})
    bench.run(second, "1 trials")
    assert (len(first.calls), len(second.calls)) == (2, 1)
    assert bench.outcomes == [Outcome.FAILED]
    assert len(bench.records[0].attempts) == 1
