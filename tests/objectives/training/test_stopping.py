"""When a trial has measured enough."""

from __future__ import annotations

from bo_tuner.objectives.training.stopping import RankStep, StoppingRule
from bo_tuner.outcome import TrialLimits


def rule(*, max_steps: int = 7, n_ranks: int = 2) -> StoppingRule:
    return StoppingRule(TrialLimits(memory_bytes=1, max_steps=max_steps, warmup_steps=2), n_ranks=n_ranks)


def feed(stopping: StoppingRule, rank: int, *times_s: float) -> None:
    for total_s in times_s:
        stopping.add(rank, RankStep(total_s=total_s, engine_s=total_s))


def test_it_waits_for_the_slowest_rank() -> None:
    stopping = rule()
    feed(stopping, 0, *[0.1] * 9)
    assert not stopping.is_done
    feed(stopping, 1, *[0.1] * 6)
    assert stopping.n_finished == 6 and not stopping.is_done
    feed(stopping, 1, 0.1)
    assert stopping.is_done


def test_warmup_steps_and_steps_not_finished_everywhere_do_not_count() -> None:
    stopping = rule()
    feed(stopping, 0, 9.0, 8.0, 1.0, 2.0, 3.0)
    feed(stopping, 1, 9.0, 8.0, 1.5, 2.5)
    assert [[step.total_s for step in row] for row in stopping.measured()] == [[1.0, 2.0], [1.5, 2.5]]


def test_long_steps_end_after_three_measured_ones() -> None:
    stopping = rule()
    feed(stopping, 0, *[4.0] * 4)
    feed(stopping, 1, *[4.0] * 4)
    assert not stopping.is_done, "two measured steps are too few, however long"
    feed(stopping, 0, 4.0)
    feed(stopping, 1, 4.0)
    assert stopping.is_done


def test_a_limit_below_the_warmup_still_measures_one_step() -> None:
    stopping = rule(max_steps=1, n_ranks=1)
    feed(stopping, 0, 1.0, 1.0)
    assert not stopping.is_done
    feed(stopping, 0, 1.0)
    assert stopping.is_done
    assert len(stopping.measured()[0]) == 1
