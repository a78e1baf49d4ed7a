"""`SimulatedObjective`: the models' figures with seeded noise, and all that can befall a trial."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import Any

import pytest

from bo_tuner.config import TrainConfig
from bo_tuner.errors import ConfigError
from bo_tuner.models.cost import times_of
from bo_tuner.models.memory import memory_of
from bo_tuner.models.software import DEEPSPEED
from bo_tuner.objectives import ignore_events
from bo_tuner.objectives.simulated import SimulatedObjective, Simulation
from bo_tuner.outcome import Outcome, TrialLimits, TrialResult
from tests.models.gpt import choices, problem

GIB = 2**30
QUIET = Simulation(noise=0, step_noise=0, time_bias=0, memory_bias=0, straggler_probability=0)
CONFIG = TrainConfig(zero_stage=1, micro_batch_size=4)


def simulated(
    config: TrainConfig = CONFIG, *, settings: Simulation = QUIET, seed: int = 0, n_ranks: int = 8, **limits: Any
) -> TrialResult:
    objective = SimulatedObjective(problem(n_ranks=n_ranks), seed=seed, settings=settings)
    given = TrialLimits(**{"memory_bytes": 80 * GIB, **limits})
    return objective(config, limits=given, on_event=ignore_events)


def test_without_noise_time_and_memory_are_the_models() -> None:
    result = simulated()
    assert result.measurement is not None
    assert result.measurement.step_time_s == pytest.approx(times_of(problem(), choices(CONFIG)).total[0])
    assert result.peak_memory_bytes == int(memory_of(problem(), choices(CONFIG)).total[0])


def test_layers_are_dealt_by_the_costs_that_are_given() -> None:
    piped, real = TrainConfig(pipeline_depth=2, grad_accum_steps=8), problem(software=DEEPSPEED)
    costs = (100.0, *[1.0] * (len(real.profile.layers) - 1))
    slow, even = (
        SimulatedObjective(replace(real, layer_costs=given), settings=QUIET)(
            piped, limits=TrialLimits(memory_bytes=80 * GIB), on_event=ignore_events
        ).samples_per_s
        for given in (costs, ())
    )
    assert slow == pytest.approx(8 * 4 / times_of(replace(real, layer_costs=costs), choices(piped)).total[0])
    assert slow != pytest.approx(even)


def test_noise_spreads_launches_by_as_much_as_it_says_and_a_seed_repeats_them() -> None:
    noisy = Simulation(noise=0.02, step_noise=0, time_bias=0, memory_bias=0, straggler_probability=0)
    quiet = simulated().samples_per_s
    assert quiet
    rates = [simulated(settings=noisy, seed=seed).samples_per_s or 0.0 for seed in range(300)]
    spread = statistics.stdev(math.log(rate / quiet) for rate in rates)
    assert 0.017 < spread < 0.023
    assert rates[7] == simulated(settings=noisy, seed=7).samples_per_s


def test_launches_of_one_config_differ_and_its_bias_does_not() -> None:
    objective = SimulatedObjective(problem(), settings=Simulation(noise=0.02, step_noise=0, straggler_probability=0))
    limits = TrialLimits(memory_bytes=80 * GIB)
    again = [objective(CONFIG, limits=limits, on_event=ignore_events) for _ in range(3)]
    assert len({result.samples_per_s for result in again}) == 3
    assert len({result.peak_memory_bytes for result in again}) == 1


def test_the_models_are_wrong_by_layout_and_not_by_micro_batch() -> None:
    biased = Simulation(noise=0, step_noise=0, straggler_probability=0)

    def errors(config: TrainConfig) -> tuple[float, float]:
        one, other = simulated(config, settings=biased), simulated(config)
        assert one.peak_memory_bytes and other.peak_memory_bytes and one.samples_per_s and other.samples_per_s
        return one.peak_memory_bytes / other.peak_memory_bytes, one.samples_per_s / other.samples_per_s

    ones = errors(TrainConfig(zero_stage=1, micro_batch_size=1))
    assert errors(TrainConfig(zero_stage=1, micro_batch_size=4)) == pytest.approx(ones, rel=1e-6)
    others = errors(TrainConfig(zero_stage=2, micro_batch_size=1))
    assert all(abs(one - other) > 1e-3 for one, other in zip(ones, others, strict=True))


def test_more_than_the_device_is_refused_and_more_than_the_limit_is_guarded() -> None:
    needed = int(memory_of(problem(), choices(CONFIG)).total[0])
    guarded = simulated(memory_bytes=needed - 1)
    assert (guarded.outcome, guarded.peak_memory_bytes) == (Outcome.GUARDED, needed)
    assert "over the limit of" in guarded.reason
    large = TrainConfig(micro_batch_size=1000)
    refused = simulated(large, memory_bytes=needed)
    assert refused.outcome is Outcome.OOM
    assert refused.requested_bytes == int(memory_of(problem(), choices(large)).total[0]) - 80 * GIB
    assert simulated(memory_bytes=needed).outcome is Outcome.COMPLETE


def test_a_trial_that_cannot_beat_the_incumbent_is_pruned_with_a_bound() -> None:
    rate = simulated().samples_per_s
    assert rate
    pruned = simulated(incumbent_samples_per_s=2 * rate)
    assert pruned.outcome is Outcome.PRUNED
    assert pruned.bound_samples_per_s and rate <= pruned.bound_samples_per_s < 2 * rate, "it makes equal steps"
    assert simulated(incumbent_samples_per_s=0.9 * rate).outcome is Outcome.COMPLETE


def test_a_trial_that_is_not_done_at_its_deadline_is_given_up_there() -> None:
    late = simulated(deadline_s=20.001)
    assert (late.outcome, late.wall_s) == (Outcome.TIMEOUT, 20.001)
    assert late.reason == "not done after 20 s, still in step 1"


def test_hangs_come_as_often_as_asked_for_and_end_at_the_deadline() -> None:
    hanging = Simulation(hang_probability=0.3)
    ends = [simulated(settings=hanging, seed=seed).outcome for seed in range(200)]
    assert 0.2 < ends.count(Outcome.TIMEOUT) / len(ends) < 0.4
    hung = simulated(settings=Simulation(hang_probability=1.0), deadline_s=120.0)
    assert (hung.outcome, hung.wall_s) == (Outcome.TIMEOUT, 120)
    assert "hangs" in hung.reason
    assert Outcome.TIMEOUT not in [simulated(settings=Simulation(), seed=seed).outcome for seed in range(50)]


def test_a_straggler_holds_up_all_ranks() -> None:
    late = Simulation(noise=0, step_noise=0, time_bias=0, memory_bias=0, straggler_probability=1.0)
    one, other = simulated(settings=late).measurement, simulated().measurement
    assert one is not None and other is not None
    assert one.step_time_s == pytest.approx(1.5 * other.step_time_s)
    assert one.step_times_s[0] == one.step_times_s[1], "the others wait"


def test_start_up_costs_what_it_is_said_to() -> None:
    slow = Simulation(noise=0, step_noise=0, time_bias=0, memory_bias=0, straggler_probability=0, start_up_s=300)
    assert simulated(settings=slow, deadline_s=1000).wall_s == pytest.approx(simulated().wall_s + 280)


def test_hundreds_of_ranks_are_written_down_as_a_few() -> None:
    result = simulated(n_ranks=512)
    assert result.measurement is not None
    assert len(result.measurement.step_times_s) == len(result.measurement.peak_memory_bytes) == 4
    assert result.measurement.global_batch == 4 * 512


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"noise": -0.1}, "noise of a simulation must be a number of at least 0; got -0.1"),
        ({"start_up_s": math.inf}, "start_up_s of a simulation must be a number of at least 0; got inf"),
        ({"hang_probability": 1.5}, "hang_probability of a simulation must be from 0 to 1; got 1.5"),
    ],
)
def test_impossible_settings_are_refused(setting: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Simulation(**setting)
    assert str(caught.value) == words
