"""Studies of other goals than samples/s, driven by the engine: what ends trials early, which is confirmed, what the storage holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from bo_tuner.config import TrainConfig
from bo_tuner.goal import Goal
from bo_tuner.objectives import EventSink
from bo_tuner.outcome import Outcome, TrialLimits, TrialResult
from bo_tuner.storage import best_note
from bo_tuner.trial import best_of
from tests.engine.bench import TINY, Analytic, Bench, TrialState

ENERGY = Goal(name="energy")


class Metered(Analytic):
    """Tells the energy of its three steps of 2, 4 or 6 samples of 8 tokens, by micro-batch; larger micro-batches are faster."""

    def __init__(self, joules: Mapping[int, float]) -> None:
        super().__init__()
        self._joules = joules

    def __call__(self, config: TrainConfig, *, limits: TrialLimits, on_event: EventSink) -> TrialResult:
        result = super().__call__(config, limits=limits, on_event=on_event)
        assert result.measurement is not None
        energy_j = self._joules.get(config.micro_batch_size)
        return replace(result, measurement=replace(result.measurement, energy_j=energy_j))


def test_the_most_frugal_trial_wins_and_is_confirmed_though_another_is_faster(bench: Bench) -> None:
    bench.run(Metered({1: 1.0, 2: 1.5, 3: 3.0}), "10 trials", space=TINY, goal=ENERGY, confirms=True)
    best = best_of(bench.records)
    assert best is not None and best.config.micro_batch_size == 2
    assert (best.standing_value, best.is_confirmed) == (3 * 4 * 8 / 1.5, True)
    rates = {record.config.micro_batch_size: record.samples_per_s or 0.0 for record in bench.records}
    assert rates[3] > rates[2] > rates[1]
    assert ", 64 tokens/J, peak memory" in best_note(bench.records)


@pytest.mark.parametrize(
    ("goal", "is_ended_early"),
    [(Goal(), True), (ENERGY, False), (Goal.of("cost", price_per_gpu_hour=1.0, n_ranks=2), True), (Goal(name="throughput,memory"), False)],
    ids=lambda value: value.name if isinstance(value, Goal) else "",
)  # fmt: skip
def test_trials_are_ended_early_by_their_rate_only_where_the_goal_follows_it(
    bench: Bench, goal: Goal, is_ended_early: bool
) -> None:
    objective = Metered({1: 1.0, 2: 1.5, 3: 3.0})
    bench.run(objective, "10 trials", space=TINY, goal=goal)
    incumbents = [limits.incumbent_samples_per_s for limits in objective.limits]
    assert len(incumbents) == 3
    assert [incumbent is not None for incumbent in incumbents] == [False, is_ended_early, is_ended_early]


def test_a_trial_that_does_not_tell_its_power_is_complete_and_has_no_value(bench: Bench) -> None:
    bench.run(Metered({1: 1.0, 2: 1.5}), "10 trials", space=TINY, goal=ENERGY)
    silent = next(record for record in bench.records if record.config.micro_batch_size == 3)
    assert silent.result is not None and silent.result.outcome is Outcome.COMPLETE
    assert (silent.standing_value, silent.samples_per_s is not None) == (None, True)
    states = [trial.state for trial in bench.store.study.get_trials()]
    assert states.count(TrialState.COMPLETE) == 2
    assert states[silent.number] is TrialState.PRUNED, "Optuna keeps no complete trial without a value"


def test_where_no_trial_tells_its_power_there_is_no_best_and_the_study_ends_as_any(bench: Bench) -> None:
    reason = bench.run(Metered({}), "10 trials", space=TINY, goal=ENERGY, confirms=True)
    assert reason.value == "every candidate has run or is ruled out"
    assert best_of(bench.records) is None
    assert bench.outcomes == [Outcome.COMPLETE] * 3


def test_the_fastest_of_a_front_is_confirmed(bench: Bench) -> None:
    bench.run(Metered({}), "10 trials", space=TINY, goal=Goal(name="throughput,memory"), confirms=True)
    confirmed = [record.config.micro_batch_size for record in bench.records if record.confirmation]
    assert confirmed == [3]
    assert "Front of samples/s against peak memory: `z0_gas1_mbs3` (trial " in best_note(bench.records)
