"""Clocks, power and energy over the measured steps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bo_tuner.nvml import Device
from bo_tuner.objectives.memory import Conditions


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


def conditions(*devices: Device, seconds: float, n_samples: int) -> Conditions:
    """After samples that are spread evenly over `seconds`."""

    def clock() -> Iterator[float]:
        yield from (number * seconds / (n_samples - 1) for number in range(n_samples))

    times = clock()
    found = Conditions(devices, clock=lambda: next(times))
    for _ in range(n_samples):
        found.sample()
    return found


@pytest.mark.parametrize(("n_hot", "throttling"), [(0, ()), (1, ()), (3, ("hardware slowdown",))])
def test_a_reason_counts_from_a_tenth_of_the_samples_on(n_hot: int, throttling: tuple[str, ...]) -> None:
    device = Scripted(bits=[0] * 5 + [0x8] * n_hot)
    assert conditions(device, seconds=5, n_samples=20).throttling == throttling


def test_energy_is_counted_by_the_devices_where_they_do() -> None:
    one, two = Scripted(bits=[], power_w=99, joules=[5, 100, 205]), Scripted(bits=[], power_w=99, joules=[0, 50, 100])
    found = conditions(one, two, seconds=3, n_samples=3)
    assert found.energy_j == 300
    assert found.power_w == 198


def test_energy_follows_from_power_where_it_is_not_counted_or_the_time_is_too_short_for_the_counter() -> None:
    assert conditions(Scripted(bits=[], power_w=50), seconds=4, n_samples=5).energy_j == 200
    short = conditions(Scripted(bits=[], power_w=50, joules=[0, 0]), seconds=0.5, n_samples=2)
    assert short.energy_j == 25


def test_power_follows_from_energy_where_only_that_is_told() -> None:
    assert conditions(Scripted(bits=[], joules=[0, 30, 60]), seconds=3, n_samples=3).power_w == 20


def test_without_devices_there_is_nothing_to_say() -> None:
    found = conditions(seconds=1, n_samples=2)
    assert (found.power_w, found.energy_j, found.throttling) == (None, None, ())
