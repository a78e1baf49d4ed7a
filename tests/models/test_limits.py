"""What `benchmarks.limits` says of configs that a memory limit divides."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.limits import EdgeTrial, run_at_edge, verdicts_at
from bo_tuner.config import TrainConfig
from bo_tuner.objectives import EventSink
from bo_tuner.outcome import Outcome, TrialLimits, TrialResult

MEASURED = [1.0, 2.0, 3.0, 4.0, 5.0]


def test_of_configs_over_the_limit_precision_and_recall_count_those_predicted_so() -> None:
    found = verdicts_at(50, predicted_bytes=[1.0, 9.0, 9.0, 9.0, 1.0], measured_bytes=MEASURED)
    assert (found.limit_bytes, found.n_over, found.precision, found.recall) == (3.0, 2, 1 / 3, 1 / 2)
    right = verdicts_at(30, predicted_bytes=MEASURED, measured_bytes=MEASURED)
    assert right.limit_bytes == pytest.approx(2.2)
    assert (right.n_over, right.precision, right.recall) == (3, 1.0, 1.0)


def test_where_nothing_is_over_the_limit_no_share_is_invented() -> None:
    found = verdicts_at(100, predicted_bytes=[1.0] * 5, measured_bytes=MEASURED)
    assert (found.n_over, found.precision, found.recall) == (0, None, None)


def test_as_many_configs_are_run_from_either_side_of_the_limit_the_nearest_first() -> None:
    given: list[TrialLimits] = []

    def objective(config: TrainConfig, *, limits: TrialLimits, on_event: EventSink) -> TrialResult:
        given.append(limits)
        return TrialResult(outcome=Outcome.GUARDED if config.micro_batch_size > 5 else Outcome.COMPLETE)

    configs = [TrainConfig(micro_batch_size=size) for size in range(1, 9)]
    predicted = np.array([10.0 * config.micro_batch_size for config in configs])
    ran = run_at_edge(objective, configs, predicted, limits=TrialLimits(memory_bytes=45), n_trials=4)
    assert [trial.predicted_bytes for trial in ran] == [40, 30, 50, 60]
    assert [trial.is_as_predicted for trial in ran] == [True, True, False, True]
    assert {limits.memory_bytes for limits in given} == {45}


@pytest.mark.parametrize(
    ("predicted_bytes", "outcome", "is_right"),
    [(99.0, Outcome.COMPLETE, True), (99.0, Outcome.GUARDED, False), (101.0, Outcome.HOST_OOM, True)],
)
def test_a_trial_is_as_predicted_when_both_or_neither_exceed(
    predicted_bytes: float, outcome: Outcome, is_right: bool
) -> None:
    trial = EdgeTrial(name="z0", limit_bytes=100, predicted_bytes=predicted_bytes, outcome=outcome)
    assert trial.is_as_predicted is is_right
