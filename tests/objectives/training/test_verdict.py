"""The rank that failed first is found whatever the order in which the signs come."""

from __future__ import annotations

import itertools
import signal
from typing import Any

import pytest

from bo_tuner.objectives.training.failures import RankFailure
from bo_tuner.objectives.training.verdict import Verdict
from bo_tuner.outcome import Outcome

LONG_AFTER = 1000.0


def message(at: float, reason: str, *, is_consequence: bool = False, outcome: str = "failed") -> dict[str, Any]:
    return {
        "at": at,
        "outcome": outcome,
        "reason": reason,
        "requested_bytes": None,
        "is_consequence": is_consequence,
    }


LOST_PEER = message(10.001, "Connection closed by peer", is_consequence=True)


def a_verdict(*, n_ranks: int = 2, n_oom_kills: int = 0) -> Verdict:
    return Verdict(n_ranks=n_ranks, n_oom_kills=lambda: n_oom_kills)


def decided(verdict: Verdict, now: float = LONG_AFTER) -> RankFailure:
    verdict.decide(min(now, 10.1))  # the watch looks all the time
    failure = verdict.decide(now)
    assert failure is not None
    return failure


def test_no_sign_is_no_failure() -> None:
    assert a_verdict().decide(LONG_AFTER) is None


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_a_rank_that_died_without_a_word_wins_over_its_peers_later_words(order: tuple[int, ...]) -> None:
    verdict = a_verdict()
    now = 10.0
    for sign in order:
        now += 0.02
        failure = verdict.decide(now)
        assert failure is None or failure.reason == "rank 1 was ended by SIGSEGV"
        match sign:
            case 0:
                verdict.told(0, LOST_PEER)
            case 1:
                verdict.exited(1, -signal.SIGSEGV, now=now)
            case 2:
                verdict.hung_up(1, now=now)
            case _:
                verdict.exited(0, 0, now=now)
    assert decided(verdict, now + 0.3).reason == "rank 1 was ended by SIGSEGV"


def test_a_death_that_is_noticed_seconds_after_its_consequence_is_waited_for() -> None:
    verdict = a_verdict()
    verdict.told(0, LOST_PEER)
    assert verdict.decide(14.0) is None
    verdict.exited(1, -signal.SIGKILL, now=14.0)
    assert decided(verdict, 14.3).reason == "rank 1 was ended by SIGKILL"


def test_a_consequence_decides_when_no_cause_is_ever_found() -> None:
    verdict = a_verdict()
    verdict.told(0, LOST_PEER)
    assert decided(verdict).reason == "rank 0: Connection closed by peer"


def test_of_two_causes_the_earlier_decides_also_when_it_is_heard_later() -> None:
    verdict = a_verdict(n_ranks=3)
    verdict.told(1, message(10.05, "later"))
    assert verdict.decide(10.1) is None
    verdict.told(0, message(10.02, "earlier", outcome="oom"))
    failure = decided(verdict, 10.4)
    assert (failure.outcome, failure.reason) == (Outcome.OOM, "rank 0: earlier")


def test_nothing_is_waited_for_when_all_ranks_have_spoken() -> None:
    verdict = a_verdict()
    verdict.told(1, message(10.05, "later"))
    verdict.told(0, message(10.02, "earlier"))
    failure = verdict.decide(10.06)
    assert failure is not None
    assert failure.reason == "rank 0: earlier"


def test_what_a_rank_said_before_it_ended_is_read_before_its_exit_counts() -> None:
    verdict = a_verdict()
    verdict.exited(1, 1, now=10.0)
    assert verdict.decide(10.0) is None
    verdict.told(1, message(9.9, "out of ideas"))
    assert decided(verdict, 10.4).reason == "rank 1: out of ideas"


def test_a_kill_is_the_kernels_where_it_counted_one() -> None:
    verdict = a_verdict(n_oom_kills=1)
    verdict.exited(0, -signal.SIGKILL, now=10.0)
    assert decided(verdict).outcome is Outcome.HOST_OOM
