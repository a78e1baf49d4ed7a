"""Configs that run again: to learn what launches differ by, to confirm the winner, and after clocks were held down."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from bo_tuner.budget import Budget
from bo_tuner.config import TrainConfig
from bo_tuner.confirmation import confirmation_steps
from bo_tuner.engine import StopReason
from bo_tuner.objectives import EventSink
from bo_tuner.outcome import Measurement, Outcome, TrialLimits, TrialResult
from bo_tuner.samplers import CandidateSampler
from bo_tuner.trial import TrialRecord, best_of, reopened
from tests.engine.bench import LIMIT_BYTES, TINY, Analytic, Bench, Told

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


@pytest.mark.parametrize(
    ("step_s", "n_steps", "n_again"), [(0.1, 40, 80), (0.5, 8, 16), (1.0, 6, 10), (2.0, 3, 5), (5.0, 3, 5)]
)
def test_a_confirmation_measures_fewer_steps_where_they_are_long(step_s: float, n_steps: int, n_again: int) -> None:
    times = ((step_s,) * n_steps,)
    trial = Measurement(global_batch=1, seq_len=1, step_times_s=times, engine_times_s=times, peak_memory_bytes=(1,))
    assert confirmation_steps(trial) == n_again


TINY_BY_SPEED = ["z0_gas1_mbs3", "z0_gas1_mbs2", "z0_gas1_mbs1"]


def test_where_the_winner_is_slower_than_its_interval_the_next_one_is_confirmed(bench: Bench) -> None:
    objective = Analytic(slowed={"z0_gas1_mbs3": [1.0, *[2.0] * 9]})
    bench.run(objective, "10 trials", space=TINY, confirms=True)
    confirmed = objective.calls[objective.calls.index("z0_gas1_mbs3") + 1 :]
    confirmed = confirmed[confirmed.index("z0_gas1_mbs3") :]
    assert confirmed[:2] == TINY_BY_SPEED[:2]
    assert set(confirmed) == set(TINY_BY_SPEED[:2])
    records = {record.config.name: record for record in bench.records}
    slow = records["z0_gas1_mbs3"]
    assert slow.is_confirmed is False
    assert slow.trial_samples_per_s == pytest.approx(2 * (slow.standing_samples_per_s or 0.0))
    best = best_of(bench.records)
    assert best is not None and best.config.name == "z0_gas1_mbs2" and best.is_confirmed


class SureOfTheEnd(CandidateSampler):
    """Goes through the candidates, and takes the best of two for the best of all, unless a confirmation taught otherwise."""

    def choose(self, records: Sequence[TrialRecord], candidates: Sequence[TrainConfig]) -> TrainConfig:
        return candidates[0]

    def chance_of_gain(self, records: Sequence[TrialRecord], min_gain: float) -> float | None:
        return 0.0 if len(records) > 1 and not any(record.is_confirmed is False for record in records) else 0.5


@pytest.mark.parametrize(("factor", "reason"), [(1.0, StopReason.CONVERGED), (2.0, StopReason.EXHAUSTED)])
def test_a_search_that_had_ended_goes_on_where_the_confirmation_makes_a_gain_likely(
    bench: Bench, factor: float, reason: StopReason
) -> None:
    objective = Analytic(slowed={"z0_gas1_mbs2": [1.0, *[factor] * 9]})
    ended = bench.run(objective, "10 trials", space=TINY, sampler=SureOfTheEnd, confirms=True, min_gain=0.01)
    assert ended is reason
    once = [name for number, name in enumerate(objective.calls) if name not in objective.calls[:number]]
    assert once == TINY_BY_SPEED[::-1][: 2 if factor == 1.0 else 3]
    best = best_of(bench.records)
    assert best is not None and best.config.name == once[-1] and best.is_confirmed


def test_when_time_is_up_one_confirmation_is_made_at_a_time(bench: Bench) -> None:
    bench.run(Analytic(), "10 trials", space=TINY)
    nothing = Analytic()
    bench.run(nothing, Budget(seconds=1e-6), space=TINY, confirms=True, is_timed=True)
    assert nothing.calls == [], "a budget holds for confirmations too"
    for name in TINY_BY_SPEED[:2]:
        little = Budget(seconds=bench.store.spent().seconds + 1.9)  # less than twice what a trial says that it took
        objective = Analytic(slowed={"z0_gas1_mbs3": [2.0]})
        bench.run(objective, little, space=TINY, confirms=True, is_timed=True)
        assert objective.calls == [name]


def test_a_winner_that_is_slower_when_confirmed_and_still_the_fastest_stays_the_best(bench: Bench) -> None:
    objective = Analytic(slowed={"z0_gas1_mbs3": [1.0, *[1.3] * 9]})
    bench.run(objective, "10 trials", space=TINY, confirms=True)
    best = best_of(bench.records)
    assert best is not None and best.config.name == "z0_gas1_mbs3" and best.is_confirmed is False


def test_finalists_within_noise_are_confirmed_in_turn_and_the_pairs_decide(bench: Bench) -> None:
    """The machine grows slower all the time: who ran later looks slower, and pairs do not mind."""
    moods = [1.0, *(1.06 * 1.1**n for n in range(6))]
    objective = Analytic(slowed={"z0_gas1_mbs3": [mood * 1.25 for mood in moods], "z0_gas1_mbs2": moods})
    bench.run(objective, "7 trials", space=TINY, confirms=True)
    again = objective.calls[3:]
    assert again[:4] == TINY_BY_SPEED[:2] * 2
    draws = [limits.data_draw for limits in objective.limits[3:]]
    assert draws[0] == draws[1] < draws[2] == draws[3], "a round sees the same data"
    best = best_of(bench.records)
    assert best is not None and best.config.name == "z0_gas1_mbs3" and len(best.confirmations) >= 2
    assert bench.run(Analytic(), "7 trials", space=TINY, confirms=True) is StopReason.EXHAUSTED


def test_a_winner_far_ahead_needs_no_rival_and_one_confirmation(bench: Bench) -> None:
    objective = Analytic(slowed={"z0_gas1_mbs3": [0.3] * 5})
    bench.run(objective, "7 trials", space=TINY, confirms=True)
    assert objective.calls[3:] == ["z0_gas1_mbs3"]


def test_no_study_ends_with_a_trial_ended_early_whose_bound_is_above_the_best(bench: Bench) -> None:
    class EndsSlowOnes(Analytic):
        """A trial that is slower than the best by more than what it is told launches differ by is ended early, as in training."""

        def __call__(self, config: TrainConfig, *, limits: TrialLimits, on_event: EventSink) -> TrialResult:
            result = super().__call__(config, limits=limits, on_event=on_event)
            rate, best = result.samples_per_s, limits.incumbent_samples_per_s
            if rate is None or best is None or rate * math.exp(limits.launch_half_width) > best:
                return result
            bound = rate * math.exp(limits.launch_half_width)
            return replace(result, outcome=Outcome.PRUNED, bound_samples_per_s=bound)

    objective = EndsSlowOnes(slowed={"z0_gas1_mbs3": [0.4, *[2.0] * 9]})
    told = Told()
    bench.run(objective, "7 trials", sampler=FastestFirst, space=TINY, confirms=True, progress=told)
    ended = [
        record.config.name for record in bench.records if record.result and record.result.outcome is Outcome.PRUNED
    ]
    assert ended == TINY_BY_SPEED[1:], "the lucky first trial ended all others early"
    assert reopened(bench.records) == []
    best = best_of(bench.records)
    assert best is not None and best.config.name == "z0_gas1_mbs2" and best.is_confirmed
    assert best.number > 2, "it has run again"
    assert bench.store.spent().trials == 3, "no config counts twice"


class FastestFirst(CandidateSampler):
    def choose(self, records: Sequence[TrialRecord], candidates: Sequence[TrainConfig]) -> TrainConfig:
        return max(candidates, key=lambda config: config.micro_batch_size)

    @property
    def expects(self) -> bool:
        return True


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
    assert noisy.calls[:5] == ["z0_gas1_mbs1"] * 5
    assert len({limits.data_draw for limits in noisy.limits[:5]}) == 5
    assert [snapshot.purpose for _, snapshot in told.again[:4]] == ["repeat"] * 4
    assert len(bench.records[0].repeats) == 4
    calm = Bench(bench.store.location.study_folder("calm"))
    calm.run(quiet, "8 trials", confirms=True)
    wide, narrow = bench.records[0].noise, calm.records[0].noise
    assert wide is not None and narrow is not None
    assert wide.half_width > 1.3 * narrow.half_width
    assert noisy.limits[5].launch_half_width > quiet.limits[5].launch_half_width > 0
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


@pytest.mark.parametrize("second", ["hot", "failed"])
def test_a_confirmation_with_clocks_held_down_counts_where_another_is_no_better(bench: Bench, second: str) -> None:
    objective = Hot("cool", "hot", second)
    bench.run(objective, "1 trial", space=TINY, confirms=True)
    assert len(objective.calls) == 3
    (record,) = bench.records
    assert record.confirmation is not None
    assert (record.confirmation.outcome, record.confirmation.is_throttled) == (Outcome.COMPLETE, True)


def test_a_confirmation_that_is_made_again_with_free_clocks_counts(bench: Bench) -> None:
    objective = Hot("cool", "hot")
    bench.run(objective, "1 trial", space=TINY, confirms=True)
    assert len(objective.calls) == 3
    assert bench.records[0].is_confirmed
