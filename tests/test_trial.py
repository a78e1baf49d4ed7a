from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from optuna.distributions import CategoricalDistribution
from optuna.trial import TrialState, create_trial

from bo_tuner.config import TrainConfig
from bo_tuner.launches import LaunchNoise, prior_of
from bo_tuner.outcome import Measurement, Outcome, TrialResult
from bo_tuner.trial import TrialRecord, best_of, launch_noise, ranked, records_of, reopened

ROW_KEYS = [
    "number",
    "name",
    "outcome",
    "reason",
    "samples_per_s",
    "trial_samples_per_s",
    "value",
    "step_time_s",
    "median_step_time_s",
    "peak_memory_bytes",
    "power_w",
    "energy_j",
    "throttling",
    "wall_s",
    "params",
    "samples_per_s_interval",
    "n_steps",
    "n_skipped",
    "engine_samples_per_s",
    "bound_samples_per_s",
    "fits_today",
    "standing_samples_per_s",
    "standing_value",
    "confirmed",
    "confirmation",
]


def measured(step_time_s: float, *, global_batch: int = 64) -> Measurement:
    times = ((step_time_s,) * 3,)
    return Measurement(
        global_batch=global_batch, seq_len=128, step_times_s=times, engine_times_s=times, peak_memory_bytes=(500,)
    )


def complete(number: int, step_time_s: float, *, peak: int | None = 500) -> TrialRecord:
    result = TrialResult(
        outcome=Outcome.COMPLETE, measurement=measured(step_time_s), peak_memory_bytes=peak, wall_s=2.5
    )
    return TrialRecord(number=number, config=TrainConfig(micro_batch_size=number + 1), result=result)


def ended(number: int, outcome: Outcome, *, measurement: Measurement | None = None) -> TrialRecord:
    result = TrialResult(outcome=outcome, reason=f"it is {outcome}", measurement=measurement, wall_s=1.5)
    return TrialRecord(number=number, config=TrainConfig(micro_batch_size=number + 1), result=result)


# -- a row of `show --json` ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "record",
    [TrialRecord(number=0, config=TrainConfig()), *(ended(1, outcome) for outcome in Outcome), complete(2, 0.5)],
)
def test_every_row_has_exactly_the_promised_keys_and_is_json(record: TrialRecord) -> None:
    row = record.to_dict()
    assert list(row) == ROW_KEYS
    assert json.loads(json.dumps(row)) == row


def test_the_row_of_a_complete_trial_has_its_numbers() -> None:
    config = TrainConfig(zero_stage=1, micro_batch_size=16, grad_accum_steps=4, extra=(("kernel", "a"),))
    result = TrialResult(outcome=Outcome.COMPLETE, measurement=measured(0.5), peak_memory_bytes=700, wall_s=2.5)
    assert TrialRecord(number=7, config=config, result=result).to_dict() == {
        "number": 7,
        "name": "z1_gas4_mbs16_kernel-a",
        "outcome": "complete",
        "reason": "",
        "samples_per_s": 128.0,
        "trial_samples_per_s": 128.0,
        "value": 128.0,
        "step_time_s": 0.5,
        "median_step_time_s": 0.5,
        "peak_memory_bytes": 700,
        "power_w": None,
        "energy_j": None,
        "throttling": [],
        "wall_s": 2.5,
        "params": {
            "zero_stage": 1,
            "micro_batch_size": 16,
            "grad_accum_steps": 4,
            "pipeline_depth": 1,
            "pipeline_schedule": "1f1b",
            "recompute": False,
            "tensor_parallel": 1,
            "offload": "none",
            "extra": {"kernel": "a"},
        },
        "samples_per_s_interval": [128.0, 128.0],
        "n_steps": 3,
        "n_skipped": 0,
        "engine_samples_per_s": 128.0,
        "bound_samples_per_s": None,
        "fits_today": True,
        "standing_samples_per_s": 128.0,
        "standing_value": 128.0,
        "confirmed": None,
        "confirmation": None,
    }


@pytest.mark.parametrize("outcome", [outcome for outcome in Outcome if outcome is not Outcome.COMPLETE])
def test_a_trial_that_did_not_complete_has_null_for_its_rate_even_when_steps_were_timed(outcome: Outcome) -> None:
    row = ended(0, outcome, measurement=measured(0.5)).to_dict()
    assert (row["samples_per_s"], row["step_time_s"]) == (None, None)
    assert (row["outcome"], row["reason"]) == (outcome.value, f"it is {outcome}")


def test_a_peak_that_was_not_read_is_null_and_one_that_was_is_kept_for_failed_trials_too() -> None:
    assert ended(0, Outcome.OOM).to_dict()["peak_memory_bytes"] is None
    result = TrialResult(outcome=Outcome.OOM, peak_memory_bytes=900)
    assert TrialRecord(number=0, config=TrainConfig(), result=result).to_dict()["peak_memory_bytes"] == 900


def test_a_trial_without_a_result_has_null_for_what_is_not_known_yet() -> None:
    row = TrialRecord(number=3, config=TrainConfig()).to_dict()
    assert row["reason"] == "no result yet"
    assert row["wall_s"] == 0
    unknown = ("outcome", "samples_per_s", "step_time_s", "peak_memory_bytes")
    assert [row[key] for key in unknown] == [None] * 4


def test_wall_time_counts_all_tries() -> None:
    first = TrialResult(outcome=Outcome.TIMEOUT, wall_s=90.0)
    second = TrialResult(outcome=Outcome.COMPLETE, measurement=measured(0.5), wall_s=2.5)
    assert TrialRecord(number=0, config=TrainConfig(), result=second, attempts=(first,)).wall_s == 92.5
    assert TrialRecord(number=0, config=TrainConfig(), attempts=(first,)).wall_s == 90.0


# -- from Optuna ---------------------------------------------------------------------------------------------------


def test_a_record_reads_back_from_optunas_attributes() -> None:
    config = TrainConfig(zero_stage=3, micro_batch_size=93, extra=(("kernel", "a"),))
    first = TrialResult(outcome=Outcome.FAILED, reason="no route to host")
    last = TrialResult(outcome=Outcome.COMPLETE, measurement=measured(0.5))
    params = config.params()
    trial = create_trial(
        state=TrialState.RUNNING,
        params=params,
        distributions={name: CategoricalDistribution((value,)) for name, value in params.items()},
        user_attrs={"result": last.to_dict(), "attempts": [first.to_dict()]},
    )
    record = TrialRecord.from_optuna(trial)
    assert (record.config, record.result, record.attempts) == (config, last, (first,))


def test_trials_that_have_no_config_yet_are_left_out() -> None:
    assert records_of([create_trial(state=TrialState.RUNNING)]) == []


# -- ranking -------------------------------------------------------------------------------------------------------


def test_complete_trials_are_ranked_fastest_first_and_all_others_left_out() -> None:
    records = [
        complete(0, 0.4),
        ended(1, Outcome.PRUNED, measurement=measured(0.001)),
        complete(2, 0.2),
        TrialRecord(number=3, config=TrainConfig()),
        complete(4, 0.3),
        ended(5, Outcome.OOM),
    ]
    assert [record.number for record in ranked(records)] == [2, 4, 0]
    best = best_of(records)
    assert best is not None and best.number == 2


def test_of_equally_fast_trials_the_one_with_the_lower_peak_is_better_then_the_earlier() -> None:
    records = [complete(0, 0.2, peak=900), complete(2, 0.2, peak=300), complete(1, 0.2, peak=300)]
    assert [record.number for record in ranked(records)] == [1, 2, 0]


def test_nothing_complete_means_no_best() -> None:
    assert best_of([]) is None
    assert best_of([ended(0, Outcome.OOM), TrialRecord(number=1, config=TrainConfig())]) is None


# -- what is learned later -----------------------------------------------------------------------------------------


def confirmed(record: TrialRecord, step_time_s: float, *, peak: int = 500) -> TrialRecord:
    return replace(record, confirmations=(complete(9, step_time_s, peak=peak).result,))  # type: ignore[arg-type]  # it has one


@pytest.mark.parametrize("again_s", [0.5, 0.4])
def test_what_a_config_does_is_what_its_confirmation_says(again_s: float) -> None:
    record = confirmed(complete(0, 0.5), again_s)
    assert record.is_confirmed
    assert record.trial_samples_per_s == 128.0
    assert record.samples_per_s == record.standing_samples_per_s == record.goal.value(record)
    assert record.samples_per_s == pytest.approx(64 / again_s)


def test_a_slower_confirmation_takes_the_place_of_the_promise() -> None:
    record = confirmed(complete(0, 0.5), 1.0)
    assert record.is_confirmed is False
    assert (record.trial_samples_per_s, record.samples_per_s, record.standing_samples_per_s) == (128.0, 64.0, 64.0)
    assert best_of([record, complete(1, 0.8)]) == complete(1, 0.8)


def noisy(number: int, step_time_s: float, *, half_width: float) -> TrialRecord:
    noise = LaunchNoise(sd=half_width / 1.96, half_width=half_width / math.sqrt(2), far=0.0, n_free=9)
    return replace(complete(number, step_time_s), noise=noise)


def test_the_best_that_is_confirmed_gives_way_only_to_what_is_ahead_by_more_than_its_interval() -> None:
    lucky, held, slow = (noisy(number, step_s, half_width=0.2) for number, step_s in enumerate((0.40, 0.42, 0.60)))
    assert [record.number for record in ranked([slow, held, lucky])] == [0, 1, 2]
    held = confirmed(held, 0.44)
    assert [record.number for record in ranked([slow, held, lucky])] == [1, 0, 2]
    ahead = noisy(3, 0.30, half_width=0.2)
    assert [record.number for record in ranked([slow, held, lucky, ahead])] == [3, 1, 0, 2]
    assert [record.number for record in ranked([slow, held, confirmed(lucky, 0.43)])] == [0, 1, 2]


def test_several_confirmations_count_as_one_run_of_all_their_steps() -> None:
    record = confirmed(complete(0, 0.5), 0.5)
    again = replace(record, confirmations=(*record.confirmations, *confirmed(record, 0.7, peak=800).confirmations))
    assert again.confirmation is not None and again.confirmation.measurement is not None
    assert sorted(again.confirmation.measurement.slowest_s) == [0.5] * 3 + [0.7] * 3
    assert again.samples_per_s == pytest.approx(64 / 0.6)
    assert again.peak_memory_bytes == 800


def test_a_confirmation_that_failed_leaves_the_trial_its_figure_and_takes_its_standing() -> None:
    record = confirmed(complete(0, 0.5), 0.5)
    failed = replace(record, confirmations=(*record.confirmations, ended(0, Outcome.OOM).result))  # type: ignore[arg-type]  # it has one
    assert (failed.samples_per_s, failed.standing_samples_per_s, failed.is_confirmed) == (128.0, None, False)


def test_intervals_and_bounds_of_trials_that_ran_follow_what_is_known_of_launches() -> None:
    record = replace(complete(0, 0.5), noise=prior_of("cuda").given([]))
    assert record.result is not None
    pruned = replace(
        record,
        result=replace(
            record.result, outcome=Outcome.PRUNED, bound_samples_per_s=200.0, steps_bound_samples_per_s=130.0
        ),
    )
    repeated = [complete(9, step_s).result for step_s in (0.5, 0.504, 0.496, 0.5, 0.502, 0.498)]
    quiet = launch_noise([replace(record, repeats=tuple(repeated))], prior_of("cuda"))  # type: ignore[arg-type]  # they have
    before, after = (replace(record, noise=noise).samples_per_s_interval for noise in (record.noise, quiet))
    assert before is not None and after is not None
    assert before[0] < after[0] < 128.0 < after[1] < before[1]
    bounds = [replace(pruned, noise=noise).bound_samples_per_s or 0.0 for noise in (record.noise, quiet)]
    assert bounds[0] > bounds[1] > after[1]


def test_a_trial_that_was_ended_early_is_open_again_while_its_bound_is_above_the_best() -> None:
    noise = LaunchNoise(sd=0.02, half_width=0.04, far=0.05, n_free=9)
    best = replace(complete(0, 0.5), noise=noise)
    slow = complete(1, 0.55).result
    assert slow is not None
    result = replace(slow, outcome=Outcome.PRUNED, bound_samples_per_s=120.0, steps_bound_samples_per_s=117.0)
    early = replace(complete(1, 0.55), result=result, noise=noise)
    assert reopened([best, early]) == []
    fallen = confirmed(best, 0.53)
    assert reopened([fallen, early]) == [early]
    long = replace(early, result=replace(result, step_limit_s=20.0))
    assert reopened([fallen, long]) == [], "its steps are too long, however fast it is"
    assert reopened([fallen, early, replace(complete(2, 0.55), config=early.config)]) == [], "it has run to its end"


def test_the_peak_is_that_of_all_runs_and_counts_against_todays_limit() -> None:
    record = confirmed(complete(0, 0.5, peak=500), 0.5, peak=900)
    assert record.peak_memory_bytes == 900
    assert replace(record, memory_limit_bytes=900).standing_samples_per_s == 128.0
    assert replace(record, memory_limit_bytes=899).standing_samples_per_s is None
    assert not replace(record, memory_limit_bytes=899).fits_today


def test_what_launches_differ_by_is_told_by_repeats_and_confirmations() -> None:
    prior = prior_of("cuda")
    alone = launch_noise([complete(0, 0.5), complete(1, 0.7)], prior)
    repeated = replace(complete(0, 0.5), repeats=(complete(0, 0.55).result,))  # type: ignore[arg-type]  # it has one
    assert launch_noise([confirmed(repeated, 0.6)], prior).n_free == alone.n_free + 2
    assert launch_noise([confirmed(repeated, 0.6)], prior).sd > alone.sd
