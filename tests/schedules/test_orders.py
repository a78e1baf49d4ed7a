"""What each rank does, in which order, on which weights, and what it keeps meanwhile."""

from __future__ import annotations

import math

import numpy
import pytest

from bo_tuner.errors import ConfigError
from bo_tuner.schedules import SCHEDULES, Action, Backward, Forward, Update, find_schedule, simulate
from tests.schedules.pipelines import NAMES, orders_of, random_shapes


def spelled(order: tuple[Action, ...]) -> str:
    return " ".join(map(str, order))


def most_live_versions(order: tuple[Action, ...]) -> int:
    """Versions there at once: each from the update that makes it to the last pass that reads it, the newest anyway."""
    read: dict[int, int] = {}
    last_use: dict[int, int] = {}
    for place, action in enumerate(order):
        if isinstance(action, Forward):
            read[action.micro_batch] = action.version
        elif isinstance(action, Backward):
            last_use[read[action.micro_batch]] = place
    born = {0: -1} | {action.batch + 1: place for place, action in enumerate(order) if isinstance(action, Update)}
    return max(
        sum(born[v] <= place < max(last_use.get(v, -1), born.get(v + 1, len(order))) for v in born)
        for place in range(len(order))
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_pass_runs_once_in_every_chunk_and_every_update_once(name: str) -> None:
    for schedule, depth, m, n_batches in random_shapes(name, 40):
        passes = {(k, chunk) for k in range(m * n_batches) for chunk in range(schedule.n_chunks)}
        for order in orders_of(schedule, depth, m, n_batches):
            forwards = [(a.micro_batch, a.chunk) for a in order if isinstance(a, Forward)]
            backwards = [(a.micro_batch, a.chunk) for a in order if isinstance(a, Backward)]
            assert set(forwards) == set(backwards) == passes
            assert len(forwards) == len(backwards) == len(passes)
            assert [a.batch for a in order if isinstance(a, Update)] == list(range(n_batches))


@pytest.mark.parametrize("name", NAMES)
def test_a_backward_pass_comes_after_its_forward_pass_and_an_update_right_after_its_batch(name: str) -> None:
    for schedule, depth, m, n_batches in random_shapes(name, 40):
        for order in orders_of(schedule, depth, m, n_batches):
            place = {action: number for number, action in enumerate(order)}
            for action, number in place.items():
                if isinstance(action, Forward):
                    assert number < place[Backward(action.micro_batch, action.chunk)]
            for batch in range(n_batches):
                ends = [p for a, p in place.items() if isinstance(a, Backward) and a.micro_batch // m == batch]
                assert place[Update(batch)] == max(ends) + 1


@pytest.mark.parametrize("name", NAMES)
def test_ranks_never_wait_for_each_other_in_a_circle(name: str) -> None:
    for schedule, depth, m, n_batches in random_shapes(name, 40):
        ones = [1.0] * (depth * schedule.n_chunks)
        timeline = simulate(orders_of(schedule, depth, m, n_batches), forward_s=ones, backward_s=ones)
        assert all(map(len, timeline.end_s))


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_reads_the_newest_weights_with_a_flush_and_those_one_update_older_without(name: str) -> None:
    for schedule, depth, m, n_batches in random_shapes(name, 40):
        ones = [1.0] * (depth * schedule.n_chunks)
        versions = simulate(orders_of(schedule, depth, m, n_batches), forward_s=ones, backward_s=ones).versions
        assert versions == {
            (k, stage): max(math.floor(k / m) - 1, 0) if name == "2bw" else k // m
            for k in range(m * n_batches)
            for stage in range(depth * schedule.n_chunks)
        }


def test_2bw_at_two_micro_batches_and_four_updates_reads_0_0_0_0_1_1_2_2() -> None:
    order = find_schedule("2bw").actions(0, depth=2, n_micro_batches=2, n_batches=4)
    assert [action.version for action in order if isinstance(action, Forward)] == [0, 0, 0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("name", NAMES)
def test_no_more_versions_of_the_weights_live_than_the_schedule_says(name: str) -> None:
    most = 0
    for schedule, depth, m, n_batches in random_shapes(name, 40):
        for order in orders_of(schedule, depth, m, n_batches):
            most = max(most, most_live_versions(order))
            assert most_live_versions(order) <= schedule.n_weight_versions
    assert most == SCHEDULES[name].n_weight_versions == (2 if name == "2bw" else 1)


@pytest.mark.parametrize("name", NAMES)
def test_most_passes_held_are_what_the_closed_form_says(name: str) -> None:
    for schedule, depth, m, n_batches in random_shapes(name, 40):
        ones = [1.0] * (depth * schedule.n_chunks)
        simulated = simulate(orders_of(schedule, depth, m, n_batches), forward_s=ones, backward_s=ones).peak_held
        assert list(simulated) == [schedule.peak_held(rank, depth=depth, n_micro_batches=m) for rank in range(depth)]
        known = {
            "gpipe": [m] * depth,
            "1f1b": [min(m, depth - rank) for rank in range(depth)],
            "2bw": [depth - rank for rank in range(depth)],
        }
        assert list(simulated) == known.get(name, list(simulated))


def test_interleaving_holds_more_than_1f1b_by_its_longer_warm_up() -> None:
    """Korthikanti et al., arXiv 2205.05198, section 4.2.3: 1 + (p - 1) / (p v) times what 1F1B keeps on rank 0."""
    depth, n_chunks = 8, 4
    chunks_held = find_schedule("interleaved", n_chunks=n_chunks).peak_held(0, depth=depth, n_micro_batches=64)
    whole_held = find_schedule("1f1b").peak_held(0, depth=depth, n_micro_batches=64)
    assert chunks_held / n_chunks / whole_held == 1 + (depth - 1) / (depth * n_chunks)


def test_1f1b_is_the_order_of_deepspeeds_pipeline() -> None:
    """Of DeepSpeed 0.19.6, whose `TrainSchedule` gives rank 0 of 4 this order at 8 micro-batches."""
    order = find_schedule("1f1b").actions(0, depth=4, n_micro_batches=8)
    assert "".join(type(action).__name__[0] for action in order) == "FFFFBFBFBFBFBBBB" + "U"


@pytest.mark.parametrize(
    ("name", "rank", "depth", "n_micro_batches", "n_batches", "expected"),
    [
        ("gpipe", 0, 2, 3, 2, "F0 F1 F2 B0 B1 B2 U0 F3 F4 F5 B3 B4 B5 U1"),
        ("1f1b", 0, 3, 3, 2, "F0 F1 F2 B0 B1 B2 U0 F3 F4 F5 B3 B4 B5 U1"),
        ("1f1b", 1, 3, 3, 1, "F0 F1 B0 F2 B1 B2 U0"),
        ("1f1b", 2, 3, 3, 1, "F0 B0 F1 B1 F2 B2 U0"),
        ("1f1b", 0, 8, 2, 1, "F0 F1 B0 B1 U0"),
        ("2bw", 0, 2, 2, 3, "F0 F1 B0 F2 B1 U0 F3 B2 F4 B3 U1 F5 B4 B5 U2"),
        ("2bw", 1, 2, 2, 3, "F0 B0 F1 B1 U0 F2 B2 F3 B3 U1 F4 B4 F5 B5 U2"),
        ("interleaved", 1, 2, 4, 1, "F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 F3 B1 F2.1 B2.1 F3.1 B3.1 B2 B3 U0"),
    ],
)
def test_known_orders(name: str, rank: int, depth: int, n_micro_batches: int, n_batches: int, expected: str) -> None:
    schedule = find_schedule(name, n_chunks=2 if name == "interleaved" else 1)
    order = schedule.actions(rank, depth=depth, n_micro_batches=n_micro_batches, n_batches=n_batches)
    assert spelled(order) == expected


@pytest.mark.parametrize(
    ("name", "depth", "n_micro_batches", "rule"),
    [
        ("gpipe", 0, 4, "depth and n_micro_batches must be at least 1"),
        ("1f1b", 2, 0, "depth and n_micro_batches must be at least 1"),
        ("2bw", 4, 3, "depth must be at least 1, and n_micro_batches at least depth"),
        ("2bw", 0, 3, "depth must be at least 1, and n_micro_batches at least depth"),
        ("interleaved", 4, 6, "depth and n_micro_batches must be at least 1, and depth must divide n_micro_batches"),
        ("interleaved", 0, 6, "depth and n_micro_batches must be at least 1, and depth must divide n_micro_batches"),
    ],
)
def test_a_pipeline_that_a_schedule_cannot_run_is_refused(
    name: str, depth: int, n_micro_batches: int, rule: str
) -> None:
    schedule = find_schedule(name, n_chunks=2 if name == "interleaved" else 1)
    for refuse in (
        lambda: schedule.check(depth=depth, n_micro_batches=n_micro_batches),
        lambda: schedule.actions(0, depth=depth, n_micro_batches=n_micro_batches),
    ):
        with pytest.raises(ConfigError) as caught:
            refuse()
        assert str(caught.value) == f"{name}: {rule}; got depth {depth} and n_micro_batches {n_micro_batches}"


def test_of_arrays_it_is_said_where_a_schedule_can_run() -> None:
    depth, n_micro_batches = numpy.array([1, 4, 4, 4, 3]), numpy.array([1, 3, 4, 6, 6])
    legal = {
        name: SCHEDULES[name](n_chunks=2 if name == "interleaved" else 1)
        .is_legal(depth=depth, n_micro_batches=n_micro_batches)
        .tolist()
        for name in NAMES
    }
    assert legal == {
        "gpipe": [True] * 5,
        "1f1b": [True] * 5,
        "interleaved": [True, False, True, False, True],
        "2bw": [True, False, True, True, True],
    }


@pytest.mark.parametrize(
    ("rank", "n_batches", "message"),
    [
        (4, 1, "rank must be from 0 to depth - 1, 3; got 4"),
        (-1, 1, "rank must be from 0 to depth - 1, 3; got -1"),
        (0, 0, "n_batches must be at least 1, got 0"),
    ],
)
def test_a_rank_or_a_run_that_cannot_be_is_refused(rank: int, n_batches: int, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_schedule("1f1b").actions(rank, depth=4, n_micro_batches=4, n_batches=n_batches)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("name", "n_chunks", "message"),
    [
        (
            "1f1",
            1,
            "pipeline_schedule must be one of 1f1b, gpipe, 2bw, interleaved; got '1f1' (did you mean 1f1b?)",
        ),
        ("1f1b", 2, "n_chunks must be 1 with 1f1b, got 2; only interleaved has more"),
        ("interleaved", 1, "n_chunks must be at least 2 with interleaved, got 1; with one it is 1f1b"),
    ],
)
def test_a_schedule_that_is_not_there_is_refused(name: str, n_chunks: int, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_schedule(name, n_chunks=n_chunks)
    assert str(caught.value) == message
