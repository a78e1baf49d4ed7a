"""The facts at the top of the report: never invented, and told against the right trial."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bo_tuner.config import TrainConfig
from bo_tuner.outcome import Outcome, TrialResult
from bo_tuner.report.answer import answer_of, ratio
from bo_tuner.report.frontier import frontiers, layout_label
from tests.report.studies import GIB, LIMIT_BYTES, edge_studies, ended, measured, numbered

DEFAULT = TrainConfig()
FIRST = TrainConfig(zero_stage=3, micro_batch_size=2)
BEST = TrainConfig(zero_stage=1, micro_batch_size=16)
OOM = ended(Outcome.OOM, "the allocator refused 2 GiB", peak_bytes=70 * GIB)


def timed(config: TrainConfig, samples_per_s: float, *, peak_bytes: int = GIB) -> TrialResult:
    """A complete trial of exactly this rate."""
    result = measured(config, step_s=1.0, peak_bytes=peak_bytes)
    assert result.measurement is not None
    step_s = result.measurement.global_batch / samples_per_s
    return replace(result, measurement=replace(result.measurement, step_times_s=((step_s,) * 5,)))


def test_gains_are_over_the_default_and_over_the_first_that_fitted() -> None:
    records = numbered((FIRST, timed(FIRST, 20)), (DEFAULT, timed(DEFAULT, 40)), (BEST, timed(BEST, 100)))
    answer = answer_of(records, DEFAULT)
    assert answer is not None and answer.best.config == BEST
    assert answer.over_default.factor == pytest.approx(2.5)
    assert answer.over_first.factor == pytest.approx(5)
    assert answer.over_default.text == "the default config, z0_gas1_mbs1, with 40/s (trial 1)"
    assert answer.over_first.text == "the first that fitted, z3_gas1_mbs2, with 20/s (trial 0)"
    assert not answer.first_is_default


def test_a_default_that_was_the_first_to_fit_is_one_comparison() -> None:
    answer = answer_of(numbered((DEFAULT, timed(DEFAULT, 40)), (BEST, timed(BEST, 100))), DEFAULT)
    assert answer is not None and answer.first_is_default


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (OOM, "the default config (z0_gas1_mbs1) did not fit in 73.60 GiB a rank"),
        (ended(Outcome.FAILED, "rank 1 died"), "the default config (z0_gas1_mbs1) ended as failed: rank 1 died"),
        (None, "the default config (z0_gas1_mbs1) has not run in this study"),
    ],
)
def test_a_default_that_did_not_complete_gives_no_factor_but_its_fate(result: TrialResult | None, text: str) -> None:
    answer = answer_of(numbered((DEFAULT, result), (BEST, timed(BEST, 100))), DEFAULT)
    assert answer is not None
    assert (answer.over_default.factor, answer.over_default.text) == (None, text)


def test_a_default_that_fitted_under_a_later_limit_counts_as_complete() -> None:
    records = numbered((DEFAULT, OOM), (BEST, timed(BEST, 100)), (DEFAULT, timed(DEFAULT, 50)))
    answer = answer_of(records, DEFAULT)
    assert answer is not None and answer.over_default.factor == pytest.approx(2)


def test_a_best_that_is_the_default_says_so() -> None:
    answer = answer_of(numbered((DEFAULT, timed(DEFAULT, 40)), (BEST, timed(BEST, 10))), DEFAULT)
    assert answer is not None
    assert (answer.over_default.factor, answer.over_first.factor) == (None, None)
    assert answer.over_default.text == "z0_gas1_mbs1 is the default config itself: nothing beat it"


def test_the_memory_margin_is_what_the_limit_leaves_and_negative_once_the_limit_is_lowered() -> None:
    kept = timed(BEST, 100, peak_bytes=10 * GIB)
    answer = answer_of(numbered((BEST, kept)), DEFAULT)
    assert answer is not None and answer.margin_bytes == LIMIT_BYTES - 10 * GIB
    lowered = answer_of(numbered((BEST, kept), (FIRST, replace(OOM, limit_bytes=8 * GIB))), DEFAULT)
    assert lowered is not None and lowered.margin_bytes == -2 * GIB


def test_no_complete_trial_gives_no_answer() -> None:
    for name in ("nothing", "running", "none-fits", "all-failed"):
        assert answer_of(edge_studies()[name], DEFAULT) is None


@pytest.mark.parametrize(
    ("factor", "text"), [(1.0, "1.00"), (1.234, "1.23"), (1.999, "2.0"), (3.44, "3.4"), (9.97, "10"), (17.4, "17")]
)
def test_a_factor_has_two_or_three_digits(factor: float, text: str) -> None:
    assert ratio(factor) == f"{text}\N{MULTIPLICATION SIGN}"


def test_the_frontier_is_the_largest_that_ran_and_the_smallest_that_memory_ended() -> None:
    sizes = {size: TrainConfig(zero_stage=2, micro_batch_size=size) for size in (4, 8, 12, 16)}
    records = numbered(
        (sizes[4], timed(sizes[4], 10)), (sizes[16], OOM), (sizes[8], timed(sizes[8], 20)), (sizes[12], OOM)
    )
    (edge,) = frontiers(records, LIMIT_BYTES)
    assert (edge.fits, edge.fails, edge.proof, edge.n_trials) == (8, 12, 3, 4)
    assert edge.best is not None and edge.best.config == sizes[8]


def test_the_frontier_forgets_what_an_earlier_lower_limit_ended() -> None:
    (guarded, default) = frontiers(edge_studies()["earlier-limit"], LIMIT_BYTES)[::-1]
    assert (guarded.fits, guarded.fails) == (None, None)
    assert (default.fits, default.fails) == (1, None)


def test_what_ran_above_a_lowered_limit_does_not_fit_any_more() -> None:
    (edge,) = frontiers(numbered((BEST, timed(BEST, 100, peak_bytes=10 * GIB))), 8 * GIB)
    assert edge.fits is None


def test_a_layout_is_named_by_stage_and_all_that_differs_from_the_default() -> None:
    assert layout_label(TrainConfig(zero_stage=2, micro_batch_size=8, grad_accum_steps=4)) == "ZeRO 2"
    assert layout_label(TrainConfig(zero_stage=1, pipeline_depth=2, recompute=True)) == "ZeRO 1 pp2 rc"
