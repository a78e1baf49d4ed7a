from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from bo_tuner.outcome import Measurement, Outcome, TrialResult

MEMORY = (Outcome.OOM, Outcome.GUARDED, Outcome.HOST_OOM)


def measurement(*rows: tuple[float, ...], global_batch: int = 64) -> Measurement:
    """One row of step times per rank; forward + backward + step takes half of each."""
    return Measurement(
        global_batch=global_batch,
        seq_len=128,
        step_times_s=rows,
        engine_times_s=tuple(tuple(time / 2 for time in row) for row in rows),
        peak_memory_bytes=tuple(1000 + rank for rank in range(len(rows))),
    )


TWO_RANKS = measurement((1.0, 4.0, 2.0), (3.0, 2.0, 2.5))


# -- measurement ---------------------------------------------------------------------------------------------------


def test_the_slowest_rank_is_the_one_that_took_longest_in_all() -> None:
    assert TWO_RANKS.slowest_s == (3.0, 2.0, 2.5), (
        "that the other rank took 4 s for one step cost nothing: it waited in the others"
    )


def test_step_time_is_the_mean_with_the_median_beside_it() -> None:
    assert TWO_RANKS.step_time_s == 2.5
    assert TWO_RANKS.engine_time_s == 1.25
    uneven = measurement((1.0, 1.0, 1.0, 5.0))
    assert (uneven.step_time_s, uneven.median_step_time_s) == (2.0, 1.0)


def test_rates_are_samples_over_time() -> None:
    assert TWO_RANKS.samples_per_s == 3 * 64 / 7.5
    assert TWO_RANKS.tokens_per_s == 128 * 3 * 64 / 7.5


def test_where_every_fourth_step_stalls_the_rate_is_what_training_does_and_it_is_said() -> None:
    stalls = measurement((1.0, 1.0, 1.0, 2.5) * 6 + (1.0, 1.0))
    assert stalls.samples_per_s == pytest.approx(64 / 1.375, rel=1e-6)
    assert stalls.unevenness == "steps repeat every 4: the mean, which counts, is 1.38 times the median"
    assert measurement((1.0, 1.01, 0.99, 1.0)).unevenness == ""


def test_a_stall_that_does_not_come_back_is_left_out_and_told() -> None:
    once = measurement((1.0,) * 5 + (20.0,) + (1.0,) * 20)
    assert once.samples_per_s == 64.0
    assert once.unevenness == "one of 26 steps took 20.0 times the median and is left out"


def test_of_one_step_nothing_is_known() -> None:
    assert measurement((2.0,)).step_time_interval_s == (0.0, math.inf)


def test_deepspeeds_count_leaves_out_what_is_neither_forward_backward_nor_step() -> None:
    assert TWO_RANKS.engine_samples_per_s == 64 / 1.25
    assert TWO_RANKS.overstatement == 1.0


def test_ranks_that_report_unequal_numbers_of_steps_are_our_bug_and_not_hidden() -> None:
    with pytest.raises(ValueError, match="zip"):
        _ = measurement((1.0, 2.0), (1.0,)).step_time_s


def test_a_measurement_reads_back_from_json_as_the_same() -> None:
    odd = Measurement(
        global_batch=7,
        seq_len=1,
        step_times_s=((0.1, 0.2), (0.3, 0.1 + 0.2)),
        engine_times_s=((0.05, 0.1), (0.15, 0.2)),
        peak_memory_bytes=(2**40, 3),
        is_loss_finite=False,
        n_warmup=3,
        is_settled=False,
    )
    assert Measurement.from_dict(json.loads(json.dumps(odd.to_dict()))) == odd
    assert Measurement.from_dict({**odd.to_dict(), "launch_half_width": 0.03}) == odd, "as older studies have it"


# -- outcome -------------------------------------------------------------------------------------------------------


def test_memory_was_the_cause_of_exactly_three_outcomes() -> None:
    assert {outcome for outcome in Outcome if outcome.is_memory} == set(MEMORY)


def test_all_outcomes_but_timeout_and_failed_teach() -> None:
    assert {outcome for outcome in Outcome if not outcome.teaches} == {Outcome.TIMEOUT, Outcome.FAILED}


def test_outcomes_are_stored_under_the_words_of_the_design() -> None:
    assert [str(outcome) for outcome in Outcome] == [
        "complete",
        "pruned",
        "oom",
        "guarded",
        "host_oom",
        "timeout",
        "rejected",
        "failed",
    ]


# -- constraint ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", MEMORY)
@pytest.mark.parametrize(
    ("peak", "requested", "limit", "constraint"),
    [
        (900, 600, 1000, 0.5),  # peak and refused request together
        (1200, None, 1000, 0.2),
        (None, 3000, 1000, 2.0),
        (700, 100, 1000, 0.01),  # refused below the limit: fragmentation, or another process
        (1000, 0, 1000, 0.01),
        (1005, None, 1000, 0.01),
        (None, None, 1000, 0.01),
        (900, 600, None, 0.01),
        (None, None, None, 0.01),
    ],
)
def test_running_out_of_memory_is_a_constraint_above_zero(
    outcome: Outcome, peak: int | None, requested: int | None, limit: int | None, constraint: float
) -> None:
    result = TrialResult(outcome=outcome, peak_memory_bytes=peak, requested_bytes=requested, limit_bytes=limit)
    assert result.constraint == pytest.approx(constraint)
    assert result.constraint >= 0.01


@pytest.mark.parametrize("outcome", [outcome for outcome in Outcome if outcome not in MEMORY])
@pytest.mark.parametrize(
    ("peak", "limit", "constraint"),
    [
        (600, 1000, -0.4),
        (1000, 1000, 0.0),
        (1100, 1000, 0.0),  # over by a reading that the guard missed, and yet it ran
        (None, 1000, -0.01),
        (600, None, -0.01),
        (None, None, -0.01),
    ],
)
def test_any_other_end_is_a_constraint_of_at_most_zero(
    outcome: Outcome, peak: int | None, limit: int | None, constraint: float
) -> None:
    result = TrialResult(outcome=outcome, peak_memory_bytes=peak, limit_bytes=limit)
    assert result.constraint == pytest.approx(constraint)
    assert result.constraint <= 0


# -- samples/s of a result -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", list(Outcome))
def test_only_a_complete_trial_has_a_rate(outcome: Outcome) -> None:
    rate = TrialResult(outcome=outcome, measurement=TWO_RANKS).samples_per_s
    assert rate == (64 / 2.5 if outcome is Outcome.COMPLETE else None)


def test_a_complete_trial_without_a_measurement_has_no_rate() -> None:
    assert TrialResult(outcome=Outcome.COMPLETE).samples_per_s is None


@pytest.mark.parametrize("time_s", [0.0, math.nan])
def test_nonsense_from_the_clock_gives_no_rate_and_no_error(time_s: float) -> None:
    result = TrialResult(outcome=Outcome.COMPLETE, measurement=measurement((time_s, time_s)))
    assert result.samples_per_s is None


# -- storage -------------------------------------------------------------------------------------------------------

FULL: dict[str, Any] = {
    "reason": "rank 1 asked for 600 MiB",
    "measurement": TWO_RANKS,
    "bound_samples_per_s": 12.5,
    "steps_bound_samples_per_s": 12.1,
    "step_limit_s": 10.0,
    "peak_memory_bytes": 900,
    "rank_peaks_bytes": (900, 700),
    "requested_bytes": 600,
    "limit_bytes": 1000,
    "wall_s": 3.25,
    "phases_s": {"start": 1.0, "measure": 2.25},
    "log_tail": "line 1\nline 2 é",
}


@pytest.mark.parametrize("outcome", list(Outcome))
@pytest.mark.parametrize("values", [{}, FULL])
def test_a_result_reads_back_from_json_as_the_same(outcome: Outcome, values: dict[str, Any]) -> None:
    result = TrialResult(outcome=outcome, **values)
    assert TrialResult.from_dict(json.loads(json.dumps(result.to_dict()))) == result


def test_a_measurement_stored_before_devices_were_watched_still_reads() -> None:
    fields = ("process_peak_bytes", "device_peak_bytes", "power_w", "energy_j", "throttling")
    old = {name: value for name, value in TWO_RANKS.to_dict().items() if name not in fields}
    assert Measurement.from_dict(old) == TWO_RANKS


def test_what_devices_told_reads_back_from_json_as_the_same() -> None:
    told = replace(
        TWO_RANKS,
        process_peak_bytes=(5, 6),
        device_peak_bytes=(7, 8),
        power_w=1.5,
        energy_j=2.5,
        throttling=("power brake",),
    )
    assert Measurement.from_dict(json.loads(json.dumps(told.to_dict()))) == told


def test_every_field_of_a_result_is_stored() -> None:
    stored = TrialResult(outcome=Outcome.OOM, **FULL).to_dict()
    assert set(stored) == {"outcome", *FULL}
    assert stored["outcome"] == "oom"
    assert stored["rank_peaks_bytes"] == [900, 700]
    assert stored["measurement"]["global_batch"] == 64
