"""What the models expect against published measurements, on groups that set no constant."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.tables import calibrates, compared, tables
from benchmarks.validation import Agreement, agreement, rank_correlation, summary


@pytest.fixture(scope="module")
def found() -> list[Agreement]:
    """Of every group that tests."""
    wanted = [table for name in ("ultrascale_playbook", "vtrain") for table in tables(name) if not calibrates(table)]
    return [agreement(one) for table in wanted if (one := compared(table)) is not None]


def test_the_groups_that_test_are_many_and_calibrate_nothing(found: list[Agreement]) -> None:
    assert len(found) >= 40
    assert not any(one.calibrates for one in found)


def test_the_order_of_configs_is_mostly_known(found: list[Agreement]) -> None:
    assert summary(found)["rank_correlation"] >= 0.90


def test_a_config_within_5_percent_of_the_best_is_among_the_first_five(found: list[Agreement]) -> None:
    assert summary(found)["hit_among_5"] >= 0.90


def test_times_near_the_best_are_off_by_six_percent_at_most_in_the_median(found: list[Agreement]) -> None:
    assert summary(found)["near_error"] <= 0.06


def test_most_failures_are_expected_and_few_runs_refused(found: list[Agreement]) -> None:
    of = summary([one for one in found if one.data_set == "ultrascale_playbook"])
    assert of["oom_precision"] >= 0.90
    assert of["oom_recall"] >= 0.90
    assert of["memory_error"] <= 0.125


def test_a_rank_correlation_takes_ties_at_their_mean_rank() -> None:
    rising = np.array([1.0, 2.0, 3.0, 4.0])
    assert rank_correlation(rising, rising**3) == pytest.approx(1.0)
    assert rank_correlation(rising, -rising) == pytest.approx(-1.0)
    # Ranks 1.5, 1.5, 3, 4 against 1, 2, 3, 4: Pearson's of those is 3 / sqrt(10).
    assert rank_correlation(np.array([1.0, 1.0, 3.0, 4.0]), rising) == pytest.approx(3 / 10**0.5)
    assert rank_correlation(rising, np.ones(4)) is None
    assert rank_correlation(rising[:2], rising[:2]) is None
