"""Trials that take the tuner with them, and trials that the budget ends."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

from bo_tuner.budget import Budget
from bo_tuner.config import TrainConfig
from bo_tuner.engine import StopReason
from bo_tuner.objectives import EventSink
from bo_tuner.outcome import Outcome, TrialLimits, TrialResult
from tests.engine.bench import TINY, Analytic, Bench, Told

# -- killed --------------------------------------------------------------------------------------------------------


class Deadly(Analytic):
    """Kills its process at runs of one config: at its trial, or where it is to be confirmed."""

    def __init__(self, name: str, *, when_confirmed: bool = False) -> None:
        super().__init__()
        self._name = name
        self._when_confirmed = when_confirmed

    def __call__(self, config: TrainConfig, *, limits: TrialLimits, on_event: EventSink) -> TrialResult:
        if config.name == self._name and (limits.longest_of > 0) == self._when_confirmed:
            os._exit(9)
        return super().__call__(config, limits=limits, on_event=on_event)


def dies(run: Callable[[], object]) -> bool:
    """A process that runs it does not live to tell."""
    child = os.fork()
    if child == 0:
        try:
            run()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.mark.parametrize("when_confirmed", [False, True])
def test_a_config_that_kills_the_tuner_twice_is_set_aside(bench: Bench, when_confirmed: bool) -> None:
    objective, told = Deadly("z0_gas1_mbs3", when_confirmed=when_confirmed), Told()

    def run() -> StopReason:
        return bench.run(objective, "10 trials", space=TINY, confirms=True, progress=told)

    assert dies(run) and dies(run)
    assert run() is StopReason.EXHAUSTED
    deadly = next(record for record in bench.records if record.config.name == "z0_gas1_mbs3")
    end = deadly.confirmation if when_confirmed else deadly.result
    assert end is not None and end.outcome is Outcome.FAILED
    assert end.reason == "set aside: this process was killed, or the machine went down, 2 times while it ran"
    assert not deadly.attempts
    shown = told.again if when_confirmed else told.over
    assert any(record.config == deadly.config for record, _ in shown), "it is said"
    assert [record.confirmation is not None for record in bench.records if record.config.micro_batch_size == 2] == [
        True
    ], "the next one is the best"


def test_a_trial_that_is_interrupted_in_order_does_not_count_as_deadly(bench: Bench) -> None:
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            bench.run(Analytic(interrupts_at=1), "1 trial", space=TINY)
    bench.run(Analytic(), "1 trial", space=TINY)
    assert bench.outcomes == [Outcome.COMPLETE]


# -- ended by the budget -------------------------------------------------------------------------------------------


class Long(Analytic):
    """Every run would take 100 s, and is ended when less is left for it."""

    counts = True
    """Whether the time of the next run is the study's, or one in which its process was stopped."""

    def __call__(self, config: TrainConfig, *, limits: TrialLimits, on_event: EventSink) -> TrialResult:
        result = super().__call__(config, limits=limits, on_event=on_event)
        if limits.left_s is not None and limits.left_s < 100:
            time.sleep(limits.left_s if self.counts else 0.0)
            self.counts = True
            return TrialResult(outcome=Outcome.TIMEOUT, reason="the budget is used up", wall_s=limits.left_s)
        return result


def test_a_trial_that_the_budget_ends_runs_again_under_a_larger_one(bench: Bench) -> None:
    first = Long()
    assert bench.run(first, "0.5s", space=TINY, is_timed=True) is StopReason.BUDGET
    assert len(first.calls) == 1, "it is not tried again"
    (left_s,) = [limits.left_s for limits in first.limits]
    assert left_s is not None and 0 < left_s <= 0.5
    assert bench.outcomes == [None]
    second = Long()
    bench.run(second, "1 trial", space=TINY)
    assert second.calls == first.calls
    assert bench.outcomes == [Outcome.COMPLETE]


def test_an_interrupted_trial_waits_for_a_budget_that_has_room(bench: Bench) -> None:
    with pytest.raises(KeyboardInterrupt):
        bench.run(Analytic(interrupts_at=2), "3 trials", space=TINY, is_timed=True)
    objective = Analytic()
    assert bench.run(objective, Budget(seconds=1e-6), space=TINY, is_timed=True) is StopReason.BUDGET
    assert objective.calls == []
    assert bench.outcomes == [Outcome.COMPLETE, None]


def test_no_trial_begins_in_less_time_than_the_shortest_took(bench: Bench) -> None:
    objective = Analytic()
    bench.run(objective, Budget(seconds=1.0), space=TINY, is_timed=True)
    assert len(objective.calls) == 1, "it says that it took a second"


def test_a_trial_that_ran_out_of_time_while_the_tuner_was_stopped_runs_again(bench: Bench) -> None:
    objective = Long()
    objective.counts = False
    assert bench.run(objective, "0.5s", space=TINY, is_timed=True) is StopReason.BUDGET
    assert len(objective.calls) == 2
