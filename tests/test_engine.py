from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from sqlalchemy import Engine as Database
from sqlalchemy import event

from bo_tuner.budget import Budget
from bo_tuner.cluster import Cluster
from bo_tuner.config import TrainConfig
from bo_tuner.engine import Engine, Snapshot, StopReason
from bo_tuner.objectives import EventSink, TrialEvent
from bo_tuner.open_candidates import OpenCandidates
from bo_tuner.outcome import Measurement, Outcome, TrialLimits, TrialResult
from bo_tuner.samplers import make_sampler
from bo_tuner.space import BackEnd, SearchSpace
from bo_tuner.storage import Location, Manifest, StudyStore
from bo_tuner.trial import TrialRecord, best_of
from bo_tuner.workload import ModelSpec, Workload

N_RANKS = 2
LIMIT_BYTES = 1000
CLUSTER = Cluster(device="cpu", n_ranks=N_RANKS, device_name="a thought", memory_bytes=10 * LIMIT_BYTES)
SMALL = SearchSpace(zero_stages=(0, 1), max_micro_batch=8, max_grad_accum=2)
"""32 candidates; every micro-batch is a rung."""
TINY = SearchSpace(zero_stages=(0,), max_micro_batch=3, max_grad_accum=1)
"""Three candidates."""
WIDE = SearchSpace()
TrialState = optuna.trial.TrialState


class AnyBackEnd:
    """A back end that runs everything."""

    def legal(self, config: TrainConfig) -> bool:
        return True


class Analytic:
    """An objective by formula: larger batches are faster, and cost memory by layout.

    `bytes_of` a ZeRO stage are needed before the first sample. `script` overrides: how the first runs of a config end, in
    turn; "*" stands for every config. `interrupts_at` is the number of the call that Ctrl-C hits. `slowed` tells by which factors the
    runs of a config take longer than they should, in turn.
    """

    def __init__(
        self,
        *,
        bytes_of: Mapping[int, int] | None = None,
        script: Mapping[str, list[Outcome]] | None = None,
        interrupts_at: int | None = None,
        slowed: Mapping[str, list[float]] | None = None,
    ) -> None:
        self.calls: list[str] = []
        self.limits: list[TrialLimits] = []
        self._bytes_of = bytes_of or {0: 500, 1: 300, 2: 200, 3: 100}
        self._script = {name: list(outcomes) for name, outcomes in (script or {}).items()}
        self._interrupts_at = interrupts_at
        self._slowed = {name: list(factors) for name, factors in (slowed or {}).items()}

    def __call__(self, config: TrainConfig, *, limits: TrialLimits, on_event: EventSink) -> TrialResult:
        self.calls.append(config.name)
        self.limits.append(limits)
        if len(self.calls) == self._interrupts_at:
            raise KeyboardInterrupt
        on_event(TrialEvent(phase="measure", step=1, n_steps=6))
        planned = self._script.get(config.name) or self._script.get("*")
        if planned:
            return TrialResult(outcome=planned.pop(0), reason="as planned", wall_s=3.0, limit_bytes=limits.memory_bytes)
        used = self._bytes_of[config.zero_stage] + 100 * config.micro_batch_size
        if used > limits.memory_bytes:
            return TrialResult(
                outcome=Outcome.OOM,
                reason="out of memory",
                peak_memory_bytes=limits.memory_bytes,
                requested_bytes=used - limits.memory_bytes,
                limit_bytes=limits.memory_bytes,
            )
        batch = config.global_batch(N_RANKS)
        slowed = self._slowed.get(config.name)
        step_s = (0.01 + 0.001 * batch + 0.002 * config.zero_stage) * (slowed.pop(0) if slowed else 1.0)
        times = ((step_s,) * 3,) * N_RANKS
        measurement = Measurement(
            global_batch=batch,
            seq_len=8,
            step_times_s=times,
            engine_times_s=times,
            peak_memory_bytes=(used,) * N_RANKS,
            launch_half_width=limits.launch_half_width,
        )
        return TrialResult(
            outcome=Outcome.COMPLETE,
            measurement=measurement,
            peak_memory_bytes=used,
            limit_bytes=limits.memory_bytes,
            wall_s=1.0,
            phases_s={"start": 20.0},
        )


class Told:
    """A progress that remembers."""

    def __init__(self) -> None:
        self.shown: list[Snapshot] = []
        self.over: list[tuple[TrialRecord, Snapshot]] = []
        self.again: list[tuple[TrialRecord, Snapshot]] = []
        self.n_closed = 0

    def shows(self, snapshot: Snapshot) -> None:
        self.shown.append(snapshot)

    def ended(self, record: TrialRecord, snapshot: Snapshot) -> None:
        self.over.append((record, snapshot))

    def ran_again(self, record: TrialRecord, snapshot: Snapshot) -> None:
        self.again.append((record, snapshot))

    def close(self) -> None:
        self.n_closed += 1


class Bench:
    """A study in a real database; every `run` opens it anew, as another process would."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._opened: list[StudyStore] = []
        self.store = StudyStore(Location(folder=folder), "study")
        """As the latest run opened it."""

    def run(
        self,
        objective: Analytic,
        budget: str | Budget,
        *,
        space: SearchSpace = SMALL,
        sampler: str = "random",
        memory_bytes: int = LIMIT_BYTES,
        progress: Told | None = None,
        is_timed: bool = False,
        back_end: BackEnd | None = None,
        confirms: bool = False,
    ) -> StopReason:
        """Go on with the study; `is_timed` takes the lease, which counts the time and takes some."""
        self.store = store = StudyStore(Location(folder=self._folder), "study")
        self._opened.append(store)
        if store.manifest() is None:
            workload = Workload(model=ModelSpec.resolve("bert-tiny"), n_parameters=1, seq_len=8)
            store.create(Manifest(workload=workload, cluster=CLUSTER, space=space, seed=3))
        candidates = OpenCandidates(
            space.candidates(CLUSTER, back_end or AnyBackEnd()),
            space=space,
            n_ranks=N_RANKS,
            limit_bytes=memory_bytes,
            longest_step_s=20.0,
        )
        engine = Engine(
            store=store,
            sampler=make_sampler(sampler, candidates, seed=3),
            candidates=candidates,
            objective=objective,
            budget=Budget.parse(budget),
            memory_bytes=memory_bytes,
            n_ranks=N_RANKS,
            progress=progress or Told(),
            confirms=confirms,
        )
        with store.drive(n_ranks=N_RANKS) if is_timed else contextlib.nullcontext():
            return engine.run()

    @property
    def records(self) -> list[TrialRecord]:
        return self.store.records()

    @property
    def names(self) -> list[str]:
        return [record.config.name for record in self.records]

    @property
    def outcomes(self) -> list[Outcome | None]:
        return [record.result.outcome if record.result else None for record in self.records]

    def close(self) -> None:
        for store in self._opened:
            store.location.open().engine.dispose()


@pytest.fixture(autouse=True, scope="module")
def the_disk_is_not_waited_for() -> Iterator[None]:
    """Nobody pulls the plug here, and a commit that reaches the disk costs 10 ms."""

    def on_connect(connection: Any, record: object) -> None:
        connection.execute("PRAGMA synchronous = OFF")

    event.listen(Database, "connect", on_connect)
    yield
    event.remove(Database, "connect", on_connect)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.close()


# -- budget --------------------------------------------------------------------------------------------------------


def test_a_study_runs_to_its_budget_of_trials(bench: Bench) -> None:
    objective = Analytic()
    assert bench.run(objective, "5 trials") is StopReason.BUDGET
    assert len(objective.calls) == len(set(objective.calls)) == 5
    assert bench.names == objective.calls
    assert bench.store.spent().trials == 5


def test_a_study_ends_when_its_time_is_up(bench: Bench) -> None:
    objective = Analytic()
    assert bench.run(objective, "5000 trials, 0.3s", space=WIDE, is_timed=True) is StopReason.BUDGET
    spent = bench.store.spent()
    assert spent.seconds >= 0.3
    assert spent.trials == len(objective.calls) < 5000


def test_a_study_ends_when_its_device_hours_are_up(bench: Bench) -> None:
    budget = Budget(trials=5000, device_hours=0.6 / 3600)
    assert bench.run(Analytic(), budget, space=WIDE, is_timed=True) is StopReason.BUDGET
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


# -- running again -------------------------------------------------------------------------------------------------


def test_the_winner_is_confirmed_longer_on_other_data_at_the_longest_and_is_never_pruned(bench: Bench) -> None:
    objective, told = Analytic(), Told()
    assert bench.run(objective, "4 trials", confirms=True, progress=told) is StopReason.BUDGET
    best = best_of(bench.records)
    assert best is not None and best.is_confirmed
    assert objective.calls[4:] == [best.config.name], "four trials are too few to repeat the first"
    trial, again = objective.limits[3], objective.limits[4]
    assert (trial.data_draw, trial.longest_of) == (0, 0)
    assert again.data_draw > 0 and again.longest_of > 1
    assert again.min_steps >= 10 and again.incumbent_samples_per_s is None
    ((record, snapshot),) = told.again
    assert (record.number, snapshot.purpose) == (best.number, "confirm")
    assert bench.store.spent().trials == 4, "a confirmation is no trial"
    bench.run(Analytic(), "4 trials", confirms=True)
    assert objective.calls.count(best.config.name) == 2, "once is enough"


TINY_BY_SPEED = ["z0_gas1_mbs3", "z0_gas1_mbs2", "z0_gas1_mbs1"]


def test_where_the_winner_is_slower_than_its_interval_the_next_one_is_confirmed(bench: Bench) -> None:
    objective = Analytic(slowed={"z0_gas1_mbs3": [1.0, 2.0]})
    bench.run(objective, "10 trials", space=TINY, confirms=True)
    assert objective.calls[-2:] == TINY_BY_SPEED[:2]
    records = {record.config.name: record for record in bench.records}
    slow = records["z0_gas1_mbs3"]
    assert slow.is_confirmed is False
    assert slow.samples_per_s == pytest.approx(2 * (slow.standing_samples_per_s or 0.0))
    best = best_of(bench.records)
    assert best is not None and best.config.name == "z0_gas1_mbs2" and best.is_confirmed


def test_when_time_is_up_one_confirmation_is_made_at_a_time(bench: Bench) -> None:
    bench.run(Analytic(), "10 trials", space=TINY)
    no_time = Budget(seconds=1e-6)
    for name in TINY_BY_SPEED[:2]:
        objective = Analytic(slowed={"z0_gas1_mbs3": [2.0]})
        bench.run(objective, no_time, space=TINY, confirms=True, is_timed=True)
        assert objective.calls == [name]


def test_a_winner_that_is_slower_when_confirmed_and_still_the_fastest_stays_the_best(bench: Bench) -> None:
    objective = Analytic(slowed={"z0_gas1_mbs3": [1.0, 1.2]})
    bench.run(objective, "10 trials", space=TINY, confirms=True)
    best = best_of(bench.records)
    assert best is not None and best.config.name == "z0_gas1_mbs3" and best.is_confirmed is False
    assert objective.calls.count("z0_gas1_mbs2") == 1


@pytest.mark.parametrize("outcome", [Outcome.OOM, Outcome.FAILED])
def test_a_winner_that_fails_when_confirmed_is_not_the_best(bench: Bench, outcome: Outcome) -> None:
    class FailsWhenConfirmed(Analytic):
        def __call__(self, config: TrainConfig, *, limits: TrialLimits, on_event: EventSink) -> TrialResult:
            if limits.longest_of and config.name == "z0_gas1_mbs3":
                self.calls.append(config.name)
                return TrialResult(outcome=outcome, reason="on purpose", limit_bytes=limits.memory_bytes)
            return super().__call__(config, limits=limits, on_event=on_event)

    objective = FailsWhenConfirmed()
    bench.run(objective, "10 trials", space=TINY, confirms=True)
    assert objective.calls.count("z0_gas1_mbs3") == (3 if outcome is Outcome.FAILED else 2)
    best = best_of(bench.records)
    assert best is not None and best.config.name == "z0_gas1_mbs2" and best.is_confirmed


def test_the_first_complete_config_is_repeated_and_sets_how_wide_later_intervals_are(bench: Bench) -> None:
    quiet, noisy = Analytic(), Analytic(slowed={"z0_gas1_mbs1": [1.0, 1.3, 0.8]})
    told = Told()
    bench.run(noisy, "8 trials", confirms=True, progress=told)
    assert noisy.calls[:3] == ["z0_gas1_mbs1"] * 3
    assert len({limits.data_draw for limits in noisy.limits[:3]}) == 3
    assert [snapshot.purpose for _, snapshot in told.again[:2]] == ["repeat"] * 2
    assert len(bench.records[0].repeats) == 2
    assert noisy.limits[3].launch_half_width > 3 * noisy.limits[0].launch_half_width
    calm = Bench(bench.store.location.study_folder("calm"))
    calm.run(quiet, "8 trials", confirms=True)
    assert quiet.limits[3].launch_half_width < quiet.limits[0].launch_half_width
    calm.close()


def test_repeats_do_not_eat_up_a_short_budget_of_time(bench: Bench) -> None:
    objective = Analytic()
    bench.run(objective, Budget(trials=8, seconds=30), confirms=True, is_timed=True)
    assert objective.calls.count("z0_gas1_mbs1") == 1, "two repeats of a second are over a twentieth of half a minute"


def test_time_for_the_confirmation_is_kept_back(bench: Bench) -> None:
    objective = Analytic()
    bench.run(objective, Budget(trials=50, seconds=1.9), confirms=True, is_timed=True)
    assert len(objective.calls) == 2, "a trial says that it took a second: two are kept back once there is a best"
    assert bench.records[0].is_confirmed


def test_a_lower_limit_dethrones_a_best_that_is_over_it_and_a_higher_one_reinstates_it(bench: Bench) -> None:
    bench.run(Analytic(), "10 trials", space=TINY)
    assert [record.peak_memory_bytes for record in bench.records if record.config.micro_batch_size == 3] == [800]
    bench.run(Analytic(), "10 trials", space=TINY, memory_bytes=750)
    best = best_of(bench.records)
    assert best is not None and best.config.name == "z0_gas1_mbs2"
    bench.run(Analytic(), "10 trials", space=TINY, memory_bytes=LIMIT_BYTES)
    best = best_of(bench.records)
    assert best is not None and best.config.name == "z0_gas1_mbs3"


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


def test_a_study_where_every_trial_runs_out_of_memory_ends_without_a_best(bench: Bench) -> None:
    objective = Analytic(bytes_of=dict.fromkeys(range(4), 10 * LIMIT_BYTES))
    assert bench.run(objective, "1000 trials", space=WIDE, sampler="grid") is StopReason.EXHAUSTED
    assert objective.calls == [f"z{stage}_gas1_mbs1" for stage in (0, 3, 1, 2)]
    assert bench.outcomes == [Outcome.OOM] * 4
    assert best_of(bench.records) is None


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


# -- clocks that were held down ------------------------------------------------------------------------------------


class Hot(Analytic):
    """The first tries of a trial end as scripted: "hot" is complete with clocks held down, at 80 % of the rate."""

    def __init__(self, *script: str) -> None:
        super().__init__()
        self._tries = list(script)

    def __call__(self, config: TrainConfig, *, limits: TrialLimits, on_event: EventSink) -> TrialResult:
        result = super().__call__(config, limits=limits, on_event=on_event)
        how = self._tries.pop(0) if self._tries else "cool"
        if how == "failed":
            return TrialResult(outcome=Outcome.FAILED, reason="as planned", wall_s=1.0)
        if how == "cool" or result.measurement is None:
            return result
        times = tuple(tuple(time_s / 0.8 for time_s in row) for row in result.measurement.step_times_s)
        measurement = replace(result.measurement, step_times_s=times, throttling=("hardware slowdown",))
        return replace(result, measurement=measurement, reason="clocks were held down")


@pytest.mark.parametrize(
    ("script", "n_tries", "is_throttled", "attempts"),
    [
        (["hot"], 2, False, ["hot"]),
        (["hot", "hot"], 2, True, ["hot"]),
        (["failed", "hot"], 3, False, ["failed", "hot"]),
        (["hot", "failed", "failed"], 3, True, ["failed", "failed"]),
    ],
)
def test_a_trial_measured_with_clocks_held_down_is_measured_again_once(
    bench: Bench, script: list[str], n_tries: int, is_throttled: bool, attempts: list[str]
) -> None:
    objective = Hot(*script)
    bench.run(objective, "1 trial", space=TINY)
    (record,) = bench.store.records()
    assert len(objective.calls) == n_tries
    assert record.result is not None
    assert (record.result.outcome, record.result.is_throttled) == (Outcome.COMPLETE, is_throttled)
    told = ["hot" if attempt.is_throttled else attempt.outcome.value for attempt in record.attempts]
    assert told == attempts
    assert bench.store.spent().trials == 1
