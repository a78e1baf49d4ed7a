"""What every objective promises that runs nothing: it answers at once, the same in another process, with what a trial would have shown."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bo_tuner.config import TrainConfig
from bo_tuner.objectives import Objective, TrialEvent
from bo_tuner.objectives.replay import ReplayObjective
from bo_tuner.objectives.simulated import SimulatedObjective
from bo_tuner.objectives.table import MeasuredTable
from bo_tuner.outcome import Outcome, TrialLimits, TrialResult
from tests.made_up_table import write_table
from tests.models.gpt import problem

LIMITS = TrialLimits(memory_bytes=70 * 2**30)
Made = Callable[[], tuple[Objective, TrainConfig, TrainConfig]]


@pytest.fixture(params=["simulated", "replay"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Made:
    """A new objective, a config that fits, and one that does not."""

    def make() -> tuple[Objective, TrainConfig, TrainConfig]:
        if request.param == "simulated":
            small, large = (TrainConfig(zero_stage=1, micro_batch_size=size) for size in (2, 900))
            return SimulatedObjective(problem(), seed=5), small, large
        table = MeasuredTable.read(write_table(tmp_path), "mixed")
        return ReplayObjective(table), table.configs[0], table.configs[2]

    return make


def run(
    objective: Objective, config: TrainConfig, limits: TrialLimits = LIMITS
) -> tuple[TrialResult, list[TrialEvent]]:
    events: list[TrialEvent] = []
    return objective(config, limits=limits, on_event=events.append), events


def test_a_config_that_fits_is_complete_with_a_rate_a_peak_and_a_duration(made: Made) -> None:
    objective, fits, _ = made()
    began = time.monotonic()
    result, _ = run(objective, fits)
    assert result.outcome is Outcome.COMPLETE
    assert result.samples_per_s and result.peak_memory_bytes and result.limit_bytes == LIMITS.memory_bytes
    assert result.measurement is not None
    assert result.measurement.global_batch / result.measurement.step_time_s == result.samples_per_s
    assert result.wall_s > 20, "a start, and steps"
    assert time.monotonic() - began < 5, "nobody waits"


def test_the_steps_are_told_as_they_would_come(made: Made) -> None:
    objective, fits, _ = made()
    result, events = run(objective, fits)
    assert [event.phase for event in events[:2]] == ["start", "warmup"]
    assert events[-1].phase == "measure"
    assert [event.step for event in events] == list(range(len(events)))
    assert result.measurement is not None
    assert len(result.measurement.slowest_s) + result.measurement.n_warmup == events[-1].step
    assert len(result.measurement.step_times_s) <= 4


def test_a_config_that_does_not_fit_is_out_of_memory_for_a_reason(made: Made) -> None:
    objective, _, large = made()
    result, _ = run(objective, large)
    assert result.outcome is Outcome.OOM
    assert result.measurement is None and result.samples_per_s is None
    assert result.reason and result.constraint > 0 and result.wall_s > 0


def test_another_process_finds_the_same(made: Made) -> None:
    for config in made()[1:]:
        first, second = (run(made()[0], config)[0] for _ in range(2))
        assert first == second
        assert TrialResult.from_dict(json.loads(json.dumps(first.to_dict()))) == first


def test_no_more_steps_are_made_than_allowed_and_no_fewer_than_wanted(made: Made) -> None:
    objective, fits, _ = made()
    few = run(objective, fits, TrialLimits(memory_bytes=70 * 2**30, max_steps=4))[1]
    assert few[-1].step == 4
    many = run(objective, fits, TrialLimits(memory_bytes=70 * 2**30, min_steps=30))[0]
    assert many.measurement is not None and len(many.measurement.slowest_s) >= 30
