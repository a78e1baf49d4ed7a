"""Clocks, power and energy over the measured steps."""

from __future__ import annotations

import pytest

from bo_tuner.nvml import Device
from bo_tuner.objectives.memory import Conditions, ConditionsTold


class Scripted(Device):
    """A device that says what it is told to."""

    def __init__(self, *, bits: list[int], power_w: float | None = None, joules: list[float] | None = None) -> None:
        super().__init__(0, None)
        self._bits = iter(bits)
        self._power_w = power_w
        self._joules = iter(joules or [])

    def clock_reasons(self) -> int | None:
        return next(self._bits, 0)

    def power_w(self) -> float | None:
        return self._power_w

    def energy_j(self) -> float | None:
        return next(self._joules, None)


class Rising(Scripted):
    """Its reading of power is the mean of the last second, and it is busy from the second sample on, which come every fifth of one."""

    def __init__(self, *, idle_w: float, busy_w: float) -> None:
        super().__init__(bits=[])
        self._idle_w, self._busy_w, self._n = idle_w, busy_w, -1

    def power_w(self) -> float | None:
        self._n += 1
        share = min(max(self._n - 1, 0) / 5, 1.0)
        return share * self._busy_w + (1 - share) * self._idle_w


def told(*devices: Device, seconds: float, n_samples: int) -> ConditionsTold:
    """By samples that are spread evenly over `seconds`, and one before them that is of the warm-up."""
    times = iter([-1.0, *(number * seconds / (n_samples - 1) for number in range(n_samples))])
    conditions = Conditions(devices, clock=lambda: next(times))
    for _ in range(n_samples + 1):
        conditions.sample()
    return conditions.over(0, seconds)


@pytest.mark.parametrize(("n_hot", "throttling"), [(0, ()), (1, ()), (3, ("hardware slowdown",))])
def test_a_reason_counts_from_a_tenth_of_the_samples_on(n_hot: int, throttling: tuple[str, ...]) -> None:
    device = Scripted(bits=[0] * 5 + [0x8] * n_hot)
    assert told(device, seconds=5, n_samples=20).throttling == throttling


def test_what_was_seen_before_the_measured_steps_does_not_count() -> None:
    device = Scripted(bits=[0x40], power_w=50, joules=[-1000, 0, 90, 180])
    assert told(device, seconds=2, n_samples=3) == ConditionsTold(power_w=90, energy_j=180)


def test_energy_is_counted_by_the_devices_where_they_do() -> None:
    one = Scripted(bits=[], power_w=99, joules=[0, 5, 100, 205])
    two = Scripted(bits=[], power_w=99, joules=[0, 0, 50, 100])
    found = told(one, two, seconds=3, n_samples=3)
    assert found.energy_j == pytest.approx(300)
    assert found.power_w == 100, "the mean over the time, which the readings are not"


def test_energy_follows_from_power_where_it_is_not_counted() -> None:
    assert told(Scripted(bits=[], power_w=50), seconds=4, n_samples=5).energy_j == 200


def test_readings_of_power_that_tell_of_what_was_before_are_left_out() -> None:
    idle_before = Rising(idle_w=70, busy_w=300)
    assert told(idle_before, seconds=2, n_samples=11).energy_j == pytest.approx(600)


@pytest.mark.parametrize("joules", [None, [0.0, 0.0, 25.0]])
def test_of_less_than_a_second_nothing_is_said(joules: list[float] | None) -> None:
    found = told(Scripted(bits=[], power_w=50, joules=joules), seconds=0.5, n_samples=2)
    assert (found.power_w, found.energy_j) == (None, None)


def test_power_follows_from_energy_where_only_that_is_told() -> None:
    assert told(Scripted(bits=[], joules=[0, 0, 30, 60]), seconds=3, n_samples=3).power_w == 20


def test_one_device_that_does_not_tell_leaves_the_sum_unknown() -> None:
    found = told(Scripted(bits=[], power_w=50), Scripted(bits=[]), seconds=3, n_samples=3)
    assert (found.power_w, found.energy_j) == (None, None)


def test_without_devices_there_is_nothing_to_say() -> None:
    assert told(seconds=1, n_samples=2) == ConditionsTold()
