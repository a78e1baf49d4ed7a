"""`Conditions`: whether the GPUs were free to run at full speed while steps were measured, and what they drew."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from bo_tuner.nvml import Device

__all__ = ["Conditions", "ConditionsTold"]

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
_AVERAGED_S = 1.0
"""From Ampere on a reading of power is the mean of so long (NVML reference, nvmlDeviceGetPowerUsage): younger ones tell of what was before.
The counter of energy moves every tenth of a second or so, and needs as long to tell much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionsTold:
    """What the devices told over a time, all of them together."""

    power_w: float | None = None
    """Mean; None where one of them does not tell, or the time was too short to know."""
    energy_j: float | None = None
    """Counted by them, else from the power they drew; None where neither is told, or the time was too short to know."""
    throttling: tuple[str, ...] = ()
    """Why clocks were held down, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    at: float
    bits: int
    power_w: float | None
    counter_j: float | None


class Conditions:
    """Samples clocks, power and energy of `devices`; with no devices it says nothing. Sampling may raise `DriverError`."""

    def __init__(self, devices: Sequence[Device], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._devices = devices
        self._clock = clock
        self._samples: list[_Sample] = []

    def sample(self, *, is_last: bool = False) -> None:
        """Look once, if the last look is a tenth of a second ago, or this is the end of the measured steps."""
        now = self._clock()
        if not self._devices or (self._samples and now - self._samples[-1].at < _EVERY_S and not is_last):
            return
        bits = 0
        for device in self._devices:
            bits |= device.clock_reasons() or 0
        power_w = _sum(device.power_w() for device in self._devices)
        counter_j = _sum(device.energy_j() for device in self._devices)
        self._samples.append(_Sample(at=now, bits=bits, power_w=power_w, counter_j=counter_j))

    def over(self, since: float, until: float) -> ConditionsTold:
        """What was told between two moments of the clock: of the samples in between, that there are any."""
        samples = [sample for sample in self._samples if since <= sample.at <= until]
        if not samples:
            return ConditionsTold()
        counted_w = _counted_w(samples[0], samples[-1])
        rate_w = counted_w if counted_w is not None else _drawn_w(samples, since + _AVERAGED_S)
        seen = Counter(name for sample in samples for bit, name in _HARMFUL.items() if sample.bits & bit)
        return ConditionsTold(
            power_w=rate_w,
            energy_j=rate_w * (until - since) if rate_w is not None else None,
            throttling=tuple(name for name in _HARMFUL.values() if seen[name] >= max(_LEAST_SHARE * len(samples), 1)),
        )


def _sum(values: Iterable[float | None]) -> float | None:
    """None when one of them is."""
    told = list(values)
    known = [value for value in told if value is not None]
    return sum(known) if len(known) == len(told) else None


def _counted_w(first: _Sample, last: _Sample) -> float | None:
    """Mean power by the counters of energy."""
    if first.counter_j is None or last.counter_j is None or last.at - first.at < _AVERAGED_S:
        return None
    return (last.counter_j - first.counter_j) / (last.at - first.at)


def _drawn_w(samples: Sequence[_Sample], since: float) -> float | None:
    """Mean power by the readings of it, those before `since` left out."""
    powers = [sample.power_w for sample in samples if sample.power_w is not None and sample.at >= since]
    return statistics.fmean(powers) if powers else None
