"""What even pipelines take, by arithmetic, against the simulator: exact where it says so, else from above."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy
import pytest

from bo_tuner.schedules import Pipeline, Schedule, find_schedule
from tests.schedules.pipelines import NAMES, random_shapes, simulate_even

FREE = ("message_s", "update_s", "all_reduce_s")


def even_pipelines(name: str, n: int, *, without: tuple[str, ...] = ()) -> Iterator[tuple[Schedule, Pipeline, int]]:
    numbers = random.Random(f"{name} {n} {without}")
    for schedule, depth, m, n_batches in random_shapes(name, n):
        pipeline = Pipeline.even(
            depth=depth,
            n_micro_batches=m,
            forward_s=float(numbers.randint(1, 30)),
            backward_s=float(numbers.randint(1, 30)),
            **{
                cost: 0.0 if cost in without else float(numbers.randint(0, most))
                for cost, most in zip(FREE, (40, 30, 60 * m), strict=True)
            },
        )
        yield schedule, pipeline, n_batches


@pytest.mark.parametrize("name", NAMES)
def test_with_free_messages_and_updates_only_the_bubble_is_added(name: str) -> None:
    for schedule, pipeline, n_batches in even_pipelines(name, 40, without=FREE):
        depth, m, work_s = pipeline.depth, pipeline.n_micro_batches, pipeline.work_s
        known_s = {
            "gpipe": n_batches * (m + depth - 1) * work_s,
            "1f1b": n_batches * (m + depth - 1) * work_s,
            "interleaved": n_batches * (m + (depth - 1) / schedule.n_chunks) * work_s,
            "2bw": (n_batches * m + depth - 1) * work_s,
        }[name]
        assert schedule.makespan_s(pipeline, n_batches) == pytest.approx(known_s, rel=1e-12)
        assert simulate_even(schedule, pipeline, n_batches).makespan_s == pytest.approx(known_s, rel=1e-9)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_flushes_are_exact_whatever_messages_updates_and_all_reduces_take(name: str) -> None:
    for schedule, pipeline, n_batches in even_pipelines(name, 120):
        assert simulate_even(schedule, pipeline, n_batches).makespan_s == schedule.makespan_s(pipeline, n_batches)


def test_interleaving_is_exact_while_messages_are_no_longer_than_a_pass_and_bounded_beyond() -> None:
    n_exact = n_bounded = 0
    for schedule, pipeline, n_batches in even_pipelines("interleaved", 120):
        simulated_s = simulate_even(schedule, pipeline, n_batches).makespan_s
        closed_s = schedule.makespan_s(pipeline, n_batches)
        if pipeline.message_s <= min(pipeline.forward_s, pipeline.backward_s) / schedule.n_chunks:
            n_exact += 1
            assert closed_s == pytest.approx(simulated_s, rel=1e-9)
        else:
            n_bounded += 1
            assert closed_s >= simulated_s * (1 - 1e-9)
    assert n_exact >= 10
    assert n_bounded >= 10


@pytest.mark.parametrize("without", [("message_s",), ("update_s", "all_reduce_s")])
def test_2bw_is_exact_without_messages_or_without_updates(without: tuple[str, ...]) -> None:
    for schedule, pipeline, n_batches in even_pipelines("2bw", 120, without=without):
        if pipeline.depth > 1:
            assert simulate_even(schedule, pipeline, n_batches).makespan_s == schedule.makespan_s(pipeline, n_batches)


@pytest.mark.parametrize("without", [(), ("all_reduce_s",), ("update_s",)])
def test_2bw_with_messages_and_updates_takes_no_longer_than_said(without: tuple[str, ...]) -> None:
    for schedule, pipeline, n_batches in even_pipelines("2bw", 120, without=without):
        simulated_s = simulate_even(schedule, pipeline, n_batches).makespan_s
        assert simulated_s <= schedule.makespan_s(pipeline, n_batches) * (1 + 1e-12)


@pytest.mark.parametrize("without", [(), ("message_s",), ("update_s", "all_reduce_s")])
def test_2bw_goes_from_update_to_update_in_its_period(without: tuple[str, ...]) -> None:
    numbers = random.Random(f"{without}")
    for schedule, pipeline, _ in even_pipelines("2bw", 12, without=without):
        depth = numbers.randint(2, 5)
        m = depth + numbers.randint(0, 4)
        pipeline = Pipeline.even(
            depth=depth,
            n_micro_batches=m,
            forward_s=pipeline.forward_s,
            backward_s=pipeline.backward_s,
            **{cost: getattr(pipeline, cost) for cost in FREE},
        )
        settled, n_more = 2 * depth + 4, 12 * depth  # a multiple of depth, so that round trips come out whole
        longer_s = simulate_even(schedule, pipeline, settled + n_more).makespan_s
        measured_s = (longer_s - simulate_even(schedule, pipeline, settled).makespan_s) / n_more
        if without:
            assert schedule.period_s(pipeline) == pytest.approx(measured_s, rel=1e-9)
        else:
            assert schedule.period_s(pipeline) >= measured_s * (1 - 1e-9)


def test_2bw_waits_for_a_share_of_a_round_trip_per_micro_batch() -> None:
    pipeline = Pipeline.even(depth=4, n_micro_batches=8, forward_s=1.0, backward_s=2.0, message_s=0.5)
    assert find_schedule("2bw").period_s(pipeline) == 8 * (3.0 + 2 * 0.5 * 3 / 4)


@pytest.mark.parametrize("all_reduce_s", [0.0, 14.9, 15.0, 15.1, 20.0, 40.0])
def test_2bw_waits_for_what_its_all_reduce_takes_beyond_the_slack_of_rank_0(all_reduce_s: float) -> None:
    """The slack is (m + 1 - d) micro-batches, here 5 of 3 seconds."""
    pipeline = Pipeline.even(depth=4, n_micro_batches=8, forward_s=1.0, backward_s=2.0, all_reduce_s=all_reduce_s)
    period_s = find_schedule("2bw").period_s(pipeline)
    assert period_s == pytest.approx(24.0 + max(0.0, all_reduce_s - 15.0))
    runs_s = [simulate_even(find_schedule("2bw"), pipeline, n).makespan_s for n in (6, 7)]
    assert runs_s[1] - runs_s[0] == pytest.approx(period_s)


def test_a_flush_costs_m_plus_d_less_one_over_m_times_2bw_in_a_long_run() -> None:
    for depth, m in ((2, 2), (4, 8), (8, 8), (16, 20)):
        pipeline = Pipeline.even(depth=depth, n_micro_batches=m, forward_s=1.0, backward_s=2.0)
        flush, two_bw = find_schedule("1f1b"), find_schedule("2bw")
        assert flush.period_s(pipeline) / two_bw.period_s(pipeline) == (m + depth - 1) / m
        ratio = simulate_even(flush, pipeline, 60).makespan_s / simulate_even(two_bw, pipeline, 60).makespan_s
        assert ratio == pytest.approx((m + depth - 1) / m, rel=1 / 60)
        assert ratio == pytest.approx((m + depth - 1) * 60 / (60 * m + depth - 1), rel=1e-12)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
def test_the_bubble_is_the_share_of_wall_time_in_which_each_rank_idles(name: str) -> None:
    for schedule, pipeline, _ in even_pipelines(name, 40, without=("message_s",)):
        idle = simulate_even(schedule, pipeline).idle_fraction
        assert idle == pytest.approx([schedule.bubble_fraction(pipeline)] * pipeline.depth, abs=1e-9)


def test_the_bubble_by_name() -> None:
    pipeline = Pipeline.even(depth=4, n_micro_batches=8, forward_s=1.0, backward_s=2.0)
    bubbles = {
        name: find_schedule(name, n_chunks=3 if name == "interleaved" else 1).bubble_fraction(pipeline)
        for name in NAMES
    }
    assert bubbles == pytest.approx({"gpipe": 3 / 11, "1f1b": 3 / 11, "interleaved": 1 / 9, "2bw": 0.0})


@pytest.mark.parametrize("name", NAMES)
def test_arrays_give_what_their_elements_give(name: str) -> None:
    pipelines = [(pipeline, n) for _, pipeline, n in even_pipelines(name, 200)]
    fields = Pipeline.__dataclass_fields__
    together = Pipeline(**{f: numpy.array([getattr(pipeline, f) for pipeline, _ in pipelines]) for f in fields})
    n_batches = numpy.array([n for _, n in pipelines])
    schedule = find_schedule(name, n_chunks=3 if name == "interleaved" else 1)
    ranks = together.depth - 1
    for at_once, one_by_one in (
        (schedule.period_s(together), [schedule.period_s(pipeline) for pipeline, _ in pipelines]),
        (schedule.makespan_s(together, n_batches), [schedule.makespan_s(*of) for of in pipelines]),
        (schedule.bubble_fraction(together), [schedule.bubble_fraction(pipeline) for pipeline, _ in pipelines]),
        (
            schedule.peak_held(ranks, depth=together.depth, n_micro_batches=together.n_micro_batches),
            [schedule.peak_held(p.depth - 1, depth=p.depth, n_micro_batches=p.n_micro_batches) for p, _ in pipelines],
        ),
    ):
        assert at_once.shape == (200,)
        assert at_once.tolist() == one_by_one
