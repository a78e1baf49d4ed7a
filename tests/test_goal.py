"""`Goal`: what it makes of trials, in which unit, and which of them it takes for the best."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from bo_tuner.config import TrainConfig
from bo_tuner.errors import ConfigError
from bo_tuner.goal import GOALS, THROUGHPUT, Goal
from bo_tuner.outcome import Measurement, Outcome, TrialResult
from bo_tuner.trial import TrialRecord, best_of, pareto_front, ranked

COST = Goal.of("cost", price_per_gpu_hour=2.0, n_ranks=8)
ENERGY = Goal(name="energy")
BOTH = Goal(name="throughput,memory")
EVERY = [COST if name == "cost" else Goal(name=name) for name in GOALS]


def measured(step_s: float = 0.5, *, energy_j: float | None = None, batch: int = 64) -> Measurement:
    """Three steps of 64 samples of 128 tokens."""
    times = ((step_s,) * 3,) * 8
    return Measurement(
        global_batch=batch,
        seq_len=128,
        step_times_s=times,
        engine_times_s=times,
        peak_memory_bytes=(500,) * 8,
        energy_j=energy_j,
    )


def result(step_s: float = 0.5, *, energy_j: float | None = None, peak: int | None = 500) -> TrialResult:
    return TrialResult(
        outcome=Outcome.COMPLETE, measurement=measured(step_s, energy_j=energy_j), peak_memory_bytes=peak
    )


def record(number: int, step_s: float, *, goal: Goal = THROUGHPUT, **of_result: Any) -> TrialRecord:
    config = TrainConfig(micro_batch_size=number + 1)
    return TrialRecord(number=number, config=config, result=result(step_s, **of_result), goal=goal)


# -- arithmetic --------------------------------------------------------------------------------------------------------


def test_throughput_is_samples_a_second() -> None:
    assert (THROUGHPUT.value(result(0.5)), THROUGHPUT.score(result(0.5))) == (128.0, 128.0)


def test_latency_is_seconds_a_step_and_scores_the_inverse() -> None:
    goal = Goal(name="latency")
    assert (goal.value(result(0.5)), goal.score(result(0.5))) == (0.5, 2.0)


def test_energy_is_tokens_of_the_measured_steps_a_joule() -> None:
    assert ENERGY.value(result(0.5, energy_j=768.0)) == 3 * 64 * 128 / 768.0 == 32.0
    assert ENERGY.score(result(0.5, energy_j=768.0)) == 32.0


def test_cost_is_the_price_of_all_ranks_for_a_million_tokens() -> None:
    tokens_per_s = 64 * 128 / 0.5
    assert COST.value(result(0.5)) == pytest.approx(2.0 * 8 / (3600 * tokens_per_s) * 1e6, rel=1e-15)
    assert COST.score(result(0.5)) == pytest.approx(3600 * tokens_per_s / 1e6 / 16, rel=1e-15)


def test_two_at_once_are_samples_a_second_and_bytes() -> None:
    assert BOTH.values(result(0.5, peak=1000)) == [128.0, 1000]
    assert BOTH.scores(result(0.5, peak=1000)) == [128.0, 1 / 1000]
    assert BOTH.value(result(0.5, peak=1000)) == 128.0
    assert BOTH.values(result(0.5, peak=None)) is None


def test_what_is_not_known_is_none() -> None:
    assert (ENERGY.value(result(0.5)), ENERGY.score(result(0.5)), ENERGY.scores(result(0.5))) == (None, None, None)
    running = TrialRecord(number=0, config=TrainConfig())
    failed = TrialResult(outcome=Outcome.OOM, measurement=measured(energy_j=1.0), peak_memory_bytes=500)
    for goal in EVERY:
        assert [goal.value(run) for run in (running, failed)] == [None, None]
        assert [goal.scores(run) for run in (running, failed)] == [None, None]


@pytest.mark.parametrize("goal", EVERY, ids=lambda goal: goal.name)
def test_scores_are_positive_and_larger_where_better_and_follow_samples_a_second_where_it_says_so(goal: Goal) -> None:
    fast, slow = result(0.25, energy_j=200.0), result(0.5, energy_j=300.0)
    best, other = goal.score(fast), goal.score(slow)
    assert best is not None and other is not None
    assert best > other > 0
    assert (best / other == pytest.approx(2)) == (goal.follows_rate or goal == BOTH)
    of_fast, of_slow = goal.value(fast), goal.value(slow)
    assert of_fast is not None and of_slow is not None
    assert (of_fast < of_slow) == (goal.measure.direction == "minimize")


@pytest.mark.parametrize("goal", [goal for goal in EVERY if goal.follows_rate], ids=lambda goal: goal.name)
def test_a_trial_that_was_ended_early_scores_at_most_what_its_bound_would(goal: Goal) -> None:
    ended = replace(result(0.5), outcome=Outcome.PRUNED, bound_samples_per_s=256.0)
    assert goal.scores(ended) is None
    assert goal.bounds(ended) == pytest.approx([goal.score(result(0.25))])
    assert goal.bounds(result(0.5)) is None


# -- which is best -----------------------------------------------------------------------------------------------------


def test_the_best_by_energy_need_not_be_the_fastest() -> None:
    trials = [
        record(0, 0.5, energy_j=100.0, goal=ENERGY),
        record(1, 0.25, energy_j=120.0, goal=ENERGY),
        record(2, 0.1, goal=ENERGY),
    ]
    assert [trial.number for trial in ranked(trials)] == [0, 1], "a trial without power has no place"
    assert best_of([replace(trial, goal=THROUGHPUT) for trial in trials]) == replace(trials[2], goal=THROUGHPUT)


def test_a_best_that_is_slower_when_confirmed_has_the_value_of_its_confirmation() -> None:
    promised = record(0, 0.5, energy_j=100.0, goal=ENERGY)
    confirmed = replace(promised, confirmations=(result(1.0, energy_j=200.0, peak=700),))
    assert confirmed.standing_value == ENERGY.value(result(1.0, energy_j=200.0))
    assert confirmed.standing is not None and confirmed.standing.peak_memory_bytes == 700
    assert (confirmed.beside, promised.beside) == (", 122.9 tokens/J", ", 245.8 tokens/J")
    assert replace(confirmed, memory_limit_bytes=600).standing_value is None


def test_the_front_holds_what_nothing_beats_in_both_the_fastest_first() -> None:
    peaks = {0: (0.5, 400), 1: (0.25, 900), 2: (0.5, 500), 3: (1.0, 200), 4: (2.0, 200), 5: (0.3, 900), 6: (0.2, None)}
    trials = [record(number, step_s, peak=peak, goal=BOTH) for number, (step_s, peak) in peaks.items()]
    assert [trial.number for trial in pareto_front(trials)] == [1, 0, 3]
    best = best_of(trials[:6])
    assert best is not None and best.number == 1
    lowered = [replace(trial, memory_limit_bytes=450) for trial in trials]
    assert [trial.number for trial in pareto_front(lowered)] == [0, 3]


def test_a_front_counts_the_peak_of_all_runs() -> None:
    trials = [record(0, 0.5, peak=400, goal=BOTH), record(1, 0.4, peak=300, goal=BOTH)]
    fuller = replace(trials[1], confirmations=(result(0.4, peak=600),))
    assert [trial.number for trial in pareto_front(trials)] == [1]
    assert [trial.number for trial in pareto_front([trials[0], fuller])] == [1, 0]


@pytest.mark.parametrize("goal", [goal for goal in EVERY if goal != BOTH], ids=lambda goal: goal.name)
def test_a_goal_of_one_figure_has_no_front(goal: Goal) -> None:
    assert pareto_front([record(0, 0.5, energy_j=1.0, goal=goal)]) == []


# -- words -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("goal", "text", "cell", "described"),
    [
        (THROUGHPUT, "", "128", "throughput (samples/s)"),
        (Goal(name="latency"), ", 500 ms a step", "500 ms", "latency (seconds a step of a fixed batch)"),
        (ENERGY, ", 32 tokens/J", "32", "energy (tokens a joule)"),
        (COST, ", 0.2713 a million tokens", "0.2713", "cost (cost of a million tokens at 2 a rank-hour)"),
        (BOTH, "", "128", "throughput,memory (samples/s against peak memory)"),
    ],
    ids=lambda part: part.name if isinstance(part, Goal) else "",
)
def test_values_are_told_with_their_unit(goal: Goal, text: str, cell: str, described: str) -> None:
    run = result(0.5, energy_j=768.0)
    assert (goal.beside(run), goal.cell(run), str(goal)) == (text, cell, described)


def test_a_value_that_is_not_known_is_said_to_be_so() -> None:
    assert (ENERGY.beside(result(0.5)), ENERGY.cell(result(0.5))) == (", tokens/J unknown", "-")
    assert (ENERGY.beside(None), ENERGY.cell(None)) == ("", "-")


@pytest.mark.parametrize("goal", EVERY, ids=lambda goal: goal.name)
def test_a_goal_survives_json(goal: Goal) -> None:
    assert Goal.from_dict(json.loads(json.dumps(goal.to_dict()))) == goal


def test_names_of_studies_tell_a_goal_that_is_not_the_usual_one() -> None:
    assert [goal.label for goal in EVERY] == ["", "_latency", "_energy", "_cost", "_throughput-memory"]


# -- options -----------------------------------------------------------------------------------------------------------


def test_blanks_in_a_name_do_not_count() -> None:
    assert Goal.of("throughput, memory", n_ranks=8) == BOTH


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"objective": "latncy"}, "--objective must be one of throughput; latency; energy; cost; throughput,memory"),
        ({"objective": "latncy"}, "got 'latncy' (did you mean latency?)"),
        ({"objective": "cost"}, "add --price-per-gpu-hour P"),
        ({"objective": "cost", "price_per_gpu_hour": 0.0}, "--price-per-gpu-hour must be a number over 0; got 0"),
        ({"objective": "cost", "price_per_gpu_hour": float("nan")}, "must be a number over 0; got nan"),
        ({"objective": "energy", "price_per_gpu_hour": 2.0}, "--price-per-gpu-hour goes with --objective cost"),
    ],
)
def test_a_goal_that_makes_no_sense_is_refused_in_one_line(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Goal.of(**options, n_ranks=8)
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("price", [1e-320, 1e308])
def test_a_price_whose_costs_would_lose_their_digits_is_refused(price: float) -> None:
    with pytest.raises(ConfigError, match="--price-per-gpu-hour must be from 1e-09 to 1e"):
        Goal.of("cost", price_per_gpu_hour=price, n_ranks=2)
