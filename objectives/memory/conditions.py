"""`Conditions`: whether the GPUs were free to run at full speed while steps were measured, and what they drew."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence

from bo_tuner.nvml import Device

__all__ = ["Conditions"]

_HARMFUL = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""What makes a device slower than it is (NVML reference, nvmlClocksEventReasons). The software power cap (0x4) is not among
them: at full load a GPU runs against it for as long as it trains. Idle (0x1), set clocks (0x2, 0x100) and sync boost (0x10) say
how somebody uses the device."""
_LEAST_SHARE = 0.1
"""Of the samples that must show a reason: a change of clocks may look like a hardware slowdown for a moment (same reference)."""
_EVERY_S = 0.1
_LEAST_COUNTED_S = 1.0
"""The counter of energy moves every tenth of a second or so; over less than this the power that was read tells more."""


class Conditions:
    """Samples clocks, power and energy of `devices`; with no devices it says nothing. Sampling may raise `DriverError`."""

    def __init__(self, devices: Sequence[Device], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._devices = devices
        self._clock = clock
        self._moments: list[float] = []
        self._reasons: Counter[str] = Counter()
        self._powers_w: list[float] = []
        self._counters_j: list[float] = []

    def sample(self, *, is_last: bool = False) -> None:
        """Look once, if the last look is a tenth of a second ago, or this is the end of the measured steps."""
        now = self._clock()
        if not self._devices or (self._moments and now - self._moments[-1] < _EVERY_S and not is_last):
            return
        self._moments.append(now)
        bits = 0
        for device in self._devices:
            bits |= device.clock_reasons() or 0
        self._reasons.update(name for bit, name in _HARMFUL.items() if bits & bit)
        for values, told in (
            (self._powers_w, [device.power_w() for device in self._devices]),
            (self._counters_j, [device.energy_j() for device in self._devices]),
        ):
            known = [value for value in told if value is not None]
            if len(known) == len(self._devices):
                values.append(sum(known))

    @property
    def throttling(self) -> tuple[str, ...]:
        """Why clocks were held down, by name."""
        least = _LEAST_SHARE * len(self._moments)
        return tuple(name for name in _HARMFUL.values() if self._reasons[name] and self._reasons[name] >= least)

    @property
    def power_w(self) -> float | None:
        """Mean of all devices together; None where one of them does not tell."""
        if self._powers_w:
            return statistics.fmean(self._powers_w)
        counted = self._counted_j
        return counted / self._seconds if counted is not None and self._seconds else None

    @property
    def energy_j(self) -> float | None:
        """Of all devices together, from the first look to the last: counted by them, else from the power they drew."""
        counted = self._counted_j
        if self._powers_w and (counted is None or self._seconds < _LEAST_COUNTED_S):
            return statistics.fmean(self._powers_w) * self._seconds
        return counted

    @property
    def _seconds(self) -> float:
        return self._moments[-1] - self._moments[0] if self._moments else 0.0

    @property
    def _counted_j(self) -> float | None:
        """Between the first look and the last; None unless every look was answered."""
        counters = self._counters_j
        return counters[-1] - counters[0] if counters and len(counters) == len(self._moments) else None
