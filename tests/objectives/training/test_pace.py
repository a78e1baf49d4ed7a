"""What micro-batches tell of a step before it ends."""

from __future__ import annotations

import pytest

from bo_tuner.objectives.training.pace import Pace


def after(seconds: float, *, n_of_step: int, first_s: float, each_s: float, longest_s: float | None = 10.0) -> Pace:
    """Micro-batches that take equally long, but for the first."""
    pace, now = Pace(n_micro_batches=n_of_step, longest_s=longest_s), 0.0
    while now <= seconds:
        n_done = 0 if now < first_s else 1 + int((now - first_s) / each_s)
        pace.note(now, n_begun=n_done + 1, n_steps=n_done // n_of_step)
        now += 0.05
    return pace


def test_a_step_of_many_long_micro_batches_is_known_to_be_too_long_soon_after_the_second_begins() -> None:
    assert after(7.0, n_of_step=64, first_s=7.5, each_s=7.5).too_long(7.0) is None
    at_least_s = after(10.5, n_of_step=64, first_s=7.5, each_s=7.5).too_long(10.5)
    assert at_least_s is not None and 10 < at_least_s < 64 * 7.5


def test_a_step_that_is_short_enough_is_left_alone_also_after_a_slow_first_micro_batch() -> None:
    pace = after(60.0, n_of_step=8, first_s=30.0, each_s=1.2)
    assert all(pace.too_long(now) is None for now in (31.0, 45.0, 60.0))


def test_a_stall_that_is_shorter_than_a_quarter_of_what_a_step_may_take_cuts_nothing() -> None:
    pace = after(5.0, n_of_step=64, first_s=0.1, each_s=0.1)
    assert pace.too_long(5.0 + 2.4) is None


@pytest.mark.parametrize(("each_s", "is_too_long"), [(11.0, False), (14.0, True)])
def test_of_one_micro_batch_a_step_the_second_shows_how_long_steps_take(each_s: float, is_too_long: bool) -> None:
    pace = after(29.0, n_of_step=1, first_s=15.0, each_s=each_s)
    assert (pace.too_long(29.0) is not None) == is_too_long


def test_a_first_micro_batch_that_does_not_end_is_cut_too() -> None:
    pace = after(71.0, n_of_step=1, first_s=1e9, each_s=1.0)
    assert pace.too_long(69.0) is None
    assert pace.too_long(71.0) == pytest.approx(71.0)
    assert pace.too_long(75.0, excused_s=10.0) is None, "it compiled for so long"


def test_without_a_limit_nothing_is_too_long() -> None:
    assert after(100.0, n_of_step=2, first_s=1e9, each_s=1.0, longest_s=None).too_long(1e6) is None


def test_the_running_micro_batch_is_counted_within_its_step() -> None:
    pace = Pace(n_micro_batches=4, longest_s=None)
    assert pace.micro_batch == 0
    for n_begun, n_steps, expected in ((1, 0, 1), (4, 0, 4), (4, 1, 1), (6, 1, 2), (8, 1, 4)):
        pace.note(float(n_begun), n_begun=n_begun, n_steps=n_steps)
        assert pace.micro_batch == expected
    assert pace.running_s(8.5) == pytest.approx(4.5)


def test_a_rank_that_begins_its_first_micro_batch_after_the_others_second_undoes_nothing() -> None:
    pace = Pace(n_micro_batches=4, longest_s=10.0)
    pace.note(0.0, n_begun=2, n_steps=0)
    pace.note(0.1, n_begun=1, n_steps=0)
    assert pace.too_long(0.1) is None
    assert pace.micro_batch == 2


def test_waiting_for_a_loader_between_two_steps_does_not_count() -> None:
    pace = after(3.0, n_of_step=2, first_s=1.0, each_s=1.0)
    assert pace.too_long(20.0) is not None
    pace.wait(20.0)
    pace.note(20.0, n_begun=2, n_steps=1)
    assert pace.too_long(25.0) is None
    assert pace.running_s(20.5) < 2.1
    assert pace.too_long(27.0) is not None, "what comes then does"
