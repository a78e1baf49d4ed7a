"""The simulator against one that counts ticks, on stages that differ, and where it stands still."""

from __future__ import annotations

import random
import time

import pytest

from bo_tuner.errors import ConfigError
from bo_tuner.schedules import Action, Backward, DeadlockError, Forward, Update, find_schedule, simulate
from tests.schedules.pipelines import NAMES, orders_of, random_shapes


def tick_by_tick(
    orders: list[tuple[Action, ...]],
    forward: list[int],
    backward: list[int],
    message: list[int],
    update: list[int],
    all_reduce: list[int],
) -> list[list[int]]:
    """Starts by rank, found by asking every rank at every tick whether what its next action needs has arrived."""
    depth, last = len(orders), len(forward) - 1
    ended: dict[tuple[str, int, int], int] = {}  # kind, micro-batch and stage: when
    readable = [[0] for _ in orders]
    starts: list[list[int]] = [[] for _ in orders]
    free = [0] * depth
    now = 0

    def has_arrived(kind: str, k: int, stage: int, after: int) -> bool:
        return (kind, k, stage) in ended and ended[kind, k, stage] + after <= now

    while any(len(done) < len(order) for done, order in zip(starts, orders, strict=True)):
        moved = True
        while moved:  # passes of no length end in the tick in which they start
            moved = False
            for rank, order in enumerate(orders):
                if len(starts[rank]) == len(order) or free[rank] > now:
                    continue
                match order[len(starts[rank])]:
                    case Forward(k, chunk, version):
                        stage = chunk * depth + rank
                        if version >= len(readable[rank]) or readable[rank][version] > now:
                            continue
                        if stage > 0 and not has_arrived("F", k, stage - 1, message[stage - 1]):
                            continue
                        free[rank] = ended["F", k, stage] = now + forward[stage]
                    case Backward(k, chunk):
                        stage = chunk * depth + rank
                        if not has_arrived("F", k, stage, 0):
                            continue
                        if stage < last and not has_arrived("B", k, stage + 1, message[stage]):
                            continue
                        free[rank] = ended["B", k, stage] = now + backward[stage]
                    case Update():
                        free[rank] = now + update[rank]
                        readable[rank].append(max(free[rank], readable[rank][-1]) + all_reduce[rank])
                starts[rank].append(now)
                moved = True
        now += 1
    return starts


@pytest.mark.parametrize("name", NAMES)
def test_actions_start_when_a_clock_that_ticks_says(name: str) -> None:
    numbers = random.Random(name)
    for schedule, depth, m, n_batches in random_shapes(name, 25, max_depth=4):
        n_stages = depth * schedule.n_chunks

        def drawn(n: int, most: int) -> list[int]:
            return [numbers.randint(0, most) for _ in range(n)]

        forward, backward, message = drawn(n_stages, 5), drawn(n_stages, 7), drawn(n_stages - 1, 4)
        update, all_reduce = drawn(depth, 6), drawn(depth, 30)
        orders = orders_of(schedule, depth, m, n_batches)
        timeline = simulate(
            orders,
            forward_s=forward,
            backward_s=backward,
            message_s=message,
            update_s=update,
            all_reduce_s=all_reduce,
        )
        assert list(map(list, timeline.start_s)) == tick_by_tick(orders, forward, backward, message, update, all_reduce)


@pytest.mark.parametrize("name", NAMES)
def test_no_run_is_shorter_than_the_work_of_its_slowest_rank(name: str) -> None:
    numbers = random.Random(name)
    for schedule, depth, m, n_batches in random_shapes(name, 25):
        n_stages = depth * schedule.n_chunks
        forward_s = [numbers.random() for _ in range(n_stages)]
        backward_s = [2 * numbers.random() for _ in range(n_stages)]
        update_s = [numbers.random() for _ in range(depth)]
        timeline = simulate(
            orders_of(schedule, depth, m, n_batches), forward_s=forward_s, backward_s=backward_s, update_s=update_s
        )
        for rank, idle_fraction in enumerate(timeline.idle_fraction):
            work_s = n_batches * (m * sum(forward_s[rank::depth] + backward_s[rank::depth]) + update_s[rank])
            assert timeline.makespan_s >= work_s * (1 - 1e-12)
            assert idle_fraction == pytest.approx(1 - work_s / timeline.makespan_s, abs=1e-9)


def test_a_message_holds_up_its_receiver_and_not_its_sender() -> None:
    orders = orders_of(find_schedule("gpipe"), 2, 2)
    timeline = simulate(orders, forward_s=[1.0, 1.0], backward_s=[2.0, 2.0], message_s=[10.0])
    assert timeline.start_s == ((0.0, 1.0, 25.0, 27.0, 29.0), (11.0, 12.0, 13.0, 15.0, 17.0))
    assert timeline.end_s[0] == (1.0, 2.0, 27.0, 29.0, 29.0)
    assert timeline.makespan_s == 29.0
    assert timeline.idle_fraction == (1 - 6 / 29, 1 - 6 / 29)


def test_an_all_reduce_holds_up_the_first_pass_that_reads_its_weights_and_the_next_all_reduce() -> None:
    orders = [find_schedule("2bw").actions(0, depth=1, n_micro_batches=1, n_batches=4)]
    timeline = simulate(orders, forward_s=[1.0], backward_s=[1.0], update_s=[1.0], all_reduce_s=[10.0])
    # F0 B0 U0, and F1 B1 U1 on the same weights; F2 waits for U0's, which come at 13, and F3 for U1's, ten later.
    assert timeline.start_s == ((0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 13.0, 14.0, 15.0, 23.0, 24.0, 25.0),)
    assert timeline.weights_s == ((0.0, 13.0, 23.0, 33.0, 43.0),)
    assert timeline.makespan_s == 43.0


def test_standing_still_is_told_with_what_each_rank_waits_to_do() -> None:
    orders: list[tuple[Action, ...]] = [(Forward(0), Backward(0), Forward(1)), (Forward(1), Forward(0), Backward(0))]
    with pytest.raises(DeadlockError) as caught:
        simulate(orders, forward_s=[1.0, 1.0], backward_s=[1.0, 1.0])
    assert str(caught.value) == "the pipeline stands still: rank 0 waits to do B0, rank 1 waits to do F1"
    assert caught.value.waiting == {0: Backward(0), 1: Forward(1)}


@pytest.mark.parametrize(
    ("order", "waits"),
    [
        ((Forward(0), Backward(0), Forward(1, version=1), Backward(1), Update(0), Update(1)), Forward(1, version=1)),
        ((Forward(0), Backward(0), Update(1)), Update(1)),
        ((Backward(0), Forward(0)), Backward(0)),
    ],
)
def test_what_is_never_made_is_waited_for_in_vain(order: tuple[Action, ...], waits: Action) -> None:
    with pytest.raises(DeadlockError) as caught:
        simulate([order], forward_s=[1.0], backward_s=[1.0])
    assert caught.value.waiting == {0: waits}


@pytest.mark.parametrize("short_of", [1, 2])
def test_a_delay_of_one_update_asks_for_at_least_depth_less_one_micro_batches(short_of: int) -> None:
    """The order of `2bw` at too few: one short of depth it still runs, two short it reads weights still to be made."""
    depth, n_batches = 4, 4
    m = depth - short_of
    orders: list[tuple[Action, ...]] = []
    for rank in range(depth):
        order: list[Action] = [Forward(k, version=max(k // m - 1, 0)) for k in range(depth - 1 - rank)]
        for k in range(m * n_batches):
            ahead = k + depth - 1 - rank
            order += [Forward(ahead, version=max(ahead // m - 1, 0))] * (ahead < m * n_batches) + [Backward(k)]
            order += [Update(k // m)] * ((k + 1) % m == 0)
        orders.append(tuple(order))
    ones = [1.0] * depth
    if short_of == 1:
        assert simulate(orders, forward_s=ones, backward_s=ones).makespan_s > 0
    else:
        with pytest.raises(DeadlockError, match=r"rank 0 waits to do F4"):
            simulate(orders, forward_s=ones, backward_s=ones)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ({"forward_s": 2}, "forward_s must have length 4 for 2 ranks of 2 stages, got 2"),
        ({"backward_s": 5}, "backward_s must have length 4 for 2 ranks of 2 stages, got 5"),
        ({"message_s": 4}, "message_s must have length 3 for 2 ranks of 2 stages, got 4"),
        ({"update_s": 4}, "update_s must have length 2 for 2 ranks of 2 stages, got 4"),
        ({"all_reduce_s": 1}, "all_reduce_s must have length 2 for 2 ranks of 2 stages, got 1"),
    ],
)
def test_numbers_for_another_pipeline_are_refused(lengths: dict[str, int], message: str) -> None:
    orders = orders_of(find_schedule("interleaved", n_chunks=2), 2, 2)
    good = {"forward_s": 4, "backward_s": 4, "message_s": 3, "update_s": 2, "all_reduce_s": 2}
    with pytest.raises(ConfigError) as caught:
        simulate(orders, **{name: [1.0] * length for name, length in (good | lengths).items()})
    assert str(caught.value) == message


def test_sixteen_ranks_with_sixty_four_micro_batches_are_simulated_at_once() -> None:
    """Takes about 5 ms; a planner does it for each of its best candidates."""
    begun = time.process_time()
    simulate(orders_of(find_schedule("1f1b"), 16, 64), forward_s=[1.0] * 16, backward_s=[2.0] * 16)
    assert time.process_time() - begun < 0.3
