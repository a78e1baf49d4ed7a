"""`Budget`: how much a study may spend, as people write it: "20 trials", "15m", "2 gpu-h", or several at once."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from bo_tuner.errors import ConfigError
from bo_tuner.text import count, duration

__all__ = ["Budget", "Spent"]

_MOST = 1e12
"""Of any unit: far beyond all use, and well within what numbers hold."""
_MOST_DIGITS = 100
_UNITS_S = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_PART = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[a-z]+(?:[-\s]?h)?)", re.IGNORECASE)
_EXAMPLES = 'as in "20 trials", "15m", "2 gpu-h", or several with commas as in "20 trials, 1h"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What a study has used so far."""

    trials: int = 0
    """Distinct configs with a result; retries do not count."""
    seconds: float = 0.0
    """Time a process was driving the study, interrupted trials included; of one that runs nothing, what its trials would have taken."""
    device_seconds: float = 0.0
    """The same, times the ranks it held."""

    @property
    def n_devices(self) -> float:
        """Held at a time; 0 before any time was spent."""
        return self.device_seconds / self.seconds if self.seconds else 0.0

    def later(self, seconds: float) -> Spent:
        """What it will have used after `seconds` more on the same devices, when no trial ends meanwhile."""
        device_seconds = self.device_seconds + seconds * self.n_devices
        return replace(self, seconds=self.seconds + seconds, device_seconds=device_seconds)

    def to_dict(self) -> dict[str, float]:
        """As `show --json` prints it."""
        return {"trials": self.trials, "seconds": round(self.seconds, 3), "gpu_h": round(self.device_seconds / 3600, 6)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits on a whole study; the one reached first ends it. None means no such limit.

    A trial that runs when a limit of time is reached is interrupted.
    """

    trials: int | None = None
    """Distinct configs."""
    seconds: float | None = None
    """Wall time while the study is driven, or of trials that nobody ran what they would have taken."""
    device_hours: float | None = None
    """Hours times ranks (GPU-hours on a GPU machine)."""

    def __post_init__(self) -> None:
        limits = (self.trials, self.seconds, self.device_hours)
        if all(limit is None for limit in limits) or any(limit is not None and limit <= 0 for limit in limits):
            raise ConfigError(f"--budget must be more than nothing, {_EXAMPLES}; got {self}")
        if any(limit is not None and not limit <= _MOST for limit in limits):
            raise ConfigError(f"--budget must be at most {_MOST:.0f} of anything, seconds included")

    @classmethod
    def parse(cls, text: str | int | Budget) -> Budget:
        """Read a budget; a bare whole number means trials.

        Raises:
            ConfigError: The text is not a budget, or names one kind twice.
        """
        if isinstance(text, Budget):
            return text
        if isinstance(text, int) or (text.strip().isdecimal() and len(text.strip()) <= _MOST_DIGITS):
            return cls(trials=int(text))
        if len(text) > _MOST_DIGITS:
            raise ConfigError(f"--budget must be at most {_MOST_DIGITS} characters long; got {len(text)}")
        found: dict[str, float] = {}
        for part in _split(text):
            kind, amount = _read(part, text)
            if kind in found:
                raise ConfigError(f"--budget must limit {kind} once; got {text!r}")
            found[kind] = amount
        trials = found.get("trials")
        if trials is not None and trials != int(trials):
            raise ConfigError(f"--budget must be a whole number of trials; got {text!r}")
        return cls(
            trials=None if trials is None else int(trials),
            seconds=found.get("time"),
            device_hours=found.get("gpu-h"),
        )

    def is_used_up(self, spent: Spent) -> bool:
        """One of the limits is reached."""
        return (
            (self.trials is not None and spent.trials >= self.trials)
            or (self.seconds is not None and spent.seconds >= self.seconds)
            or (self.device_hours is not None and spent.device_seconds >= self.device_hours * 3600)
        )

    def used(self, spent: Spent) -> str:
        """What is used of what there is, for people: "13 of 20 trials, 48m00s of 1h00m"."""
        parts: list[str] = []
        if self.trials is not None:
            parts.append(f"{spent.trials} of {count(self.trials, 'trial')}")
        if self.seconds is not None:
            parts.append(f"{duration(spent.seconds)} of {duration(self.seconds)}")
        if self.device_hours is not None:
            parts.append(f"{spent.device_seconds / 3600:.2f} of {_plain(self.device_hours)} gpu-h")
        return ", ".join(parts)

    def fraction_used(self, spent: Spent) -> float:
        """Of the limit that is nearest to being reached, from 0 to 1."""
        limits = (
            (spent.trials, self.trials),
            (spent.seconds, self.seconds),
            (spent.device_seconds / 3600, self.device_hours),
        )
        return min(max(used / limit for used, limit in limits if limit is not None), 1.0)

    def seconds_left(self, spent: Spent) -> float | None:
        """Wall time that remains under both limits of time; None where neither is set."""
        limits: list[float] = []
        if self.seconds is not None:
            limits.append(self.seconds - spent.seconds)
        if self.device_hours is not None and spent.n_devices:
            limits.append((self.device_hours * 3600 - spent.device_seconds) / spent.n_devices)
        return min(limits, default=None)

    def left(self, spent: Spent) -> str:
        """What remains, for people: "7 trials, 12m00s left"."""
        parts: list[str] = []
        if self.trials is not None:
            parts.append(count(max(self.trials - spent.trials, 0), "trial"))
        if self.seconds is not None:
            parts.append(duration(max(self.seconds - spent.seconds, 0.0)))
        if self.device_hours is not None:
            parts.append(f"{max(self.device_hours - spent.device_seconds / 3600, 0.0):.2f} gpu-h")
        return ", ".join(parts) + " left"

    def __str__(self) -> str:
        parts: list[str] = []
        if self.trials is not None:
            parts.append(count(self.trials, "trial"))
        if self.seconds is not None:
            parts.append(f"{_plain(self.seconds)}s")
        if self.device_hours is not None:
            parts.append(f"{_plain(self.device_hours)} gpu-h")
        return ", ".join(parts)


def _plain(number: float) -> str:
    """As `parse` reads it: without an exponent."""
    return f"{number:.9f}".rstrip("0").rstrip(".")


def _split(text: str) -> list[str]:
    parts = [part.strip() for part in re.split(r",|\+|\bor\b|\band\b", text) if part.strip()]
    if not parts:
        raise ConfigError(f"--budget must say how much, {_EXAMPLES}; got {text!r}")
    return parts


def _read(part: str, whole: str) -> tuple[str, float]:
    """One limit as (kind, amount); "1h30m" is one limit of time."""
    seconds = 0.0
    matches = list(_PART.finditer(part))
    if not matches or "".join(match.group() for match in matches).replace(" ", "") != part.replace(" ", ""):
        raise ConfigError(f"--budget must read {_EXAMPLES}; got {whole!r}")
    for match in matches:
        number = float(match["number"])
        unit = re.sub(r"\s", "-", match["unit"].lower())
        if unit in ("trial", "trials") and len(matches) == 1:
            return ("trials", number)
        if unit in ("gpu-h", "gpuh", "device-h") and len(matches) == 1:
            return ("gpu-h", number)
        if unit not in _UNITS_S:
            raise ConfigError(f"--budget must read {_EXAMPLES}; got the unit {match['unit']!r} in {whole!r}")
        seconds += number * _UNITS_S[unit]
    return ("time", seconds)
