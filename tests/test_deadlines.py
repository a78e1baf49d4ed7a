"""A trial as a whole is given up late: by the workload at first, then by what the trials so far took."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bo_tuner.config import TrainConfig
from bo_tuner.deadlines import trial_deadline_s
from bo_tuner.outcome import Measurement, Outcome, TrialResult
from bo_tuner.trial import TrialRecord
from bo_tuner.workload import ModelSpec, Workload

SMALL = Workload(model=ModelSpec(name="toy", architecture={"model_type": "bert"}), n_parameters=10**6, seq_len=16)
LARGE = replace(SMALL, n_parameters=10**9, seq_len=512)
ONE, FOUR = TrainConfig(micro_batch_size=1), TrainConfig(micro_batch_size=4)


def deadline_s(config: TrainConfig, *records: TrialRecord, workload: Workload = SMALL) -> float:
    return trial_deadline_s(config, records, n_steps=7, workload=workload, device="cpu", n_ranks=2)


def complete(config: TrainConfig, *, step_s: float, start_s: float) -> TrialRecord:
    times = ((step_s,), (step_s,))
    measurement = Measurement(
        global_batch=config.global_batch(2),
        seq_len=16,
        step_times_s=times,
        engine_times_s=times,
        peak_memory_bytes=(1, 1),
    )
    result = TrialResult(outcome=Outcome.COMPLETE, measurement=measurement, phases_s={"start": start_s})
    return TrialRecord(number=0, config=config, result=result)


def test_the_first_trial_of_a_small_model_has_ten_minutes_and_of_a_large_one_what_a_slow_machine_takes() -> None:
    assert deadline_s(ONE) == 600.0
    assert deadline_s(ONE, workload=LARGE) == pytest.approx(7 * 8 * 1e9 * 512 / 5e9)
    assert deadline_s(FOUR, workload=LARGE) == pytest.approx(4 * deadline_s(ONE, workload=LARGE))


def test_later_ones_follow_the_longest_start_and_the_slowest_rate() -> None:
    known = complete(ONE, step_s=4.0, start_s=3.0)
    assert deadline_s(ONE, known) == pytest.approx(10 * (3.0 + 7 * 4.0))
    assert deadline_s(FOUR, known) == pytest.approx(10 * (3.0 + 7 * 16.0))
    assert deadline_s(ONE, complete(ONE, step_s=0.01, start_s=0.5)) == 90.0


def test_a_second_try_after_a_timeout_has_twice_as_long() -> None:
    tried = TrialRecord(number=1, config=FOUR, attempts=(TrialResult(outcome=Outcome.TIMEOUT),))
    assert deadline_s(FOUR, tried) == 1200.0
    assert deadline_s(ONE, tried) == 600.0
    failed = replace(tried, attempts=(TrialResult(outcome=Outcome.FAILED),))
    assert deadline_s(FOUR, failed) == 600.0
