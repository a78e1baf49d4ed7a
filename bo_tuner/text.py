"""Numbers as people read and write them."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = [
    "count",
    "did_you_mean",
    "duration",
    "fraction_in",
    "gib",
    "json_text",
    "large",
    "percent",
    "rate",
    "seconds",
]


def count(number: int, noun: str) -> str:
    """ "1 trial", "2 trials"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def duration(seconds: float) -> str:
    """Seconds as "12s", "3m07s" or "2h05m"."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def gib(n_bytes: int) -> str:
    """Bytes as "1.25 GiB", or "310 MiB" below one GiB, "12 KiB" below one MiB."""
    if n_bytes < 2**20:
        return f"{n_bytes / 2**10:.0f} KiB"
    return f"{n_bytes / 2**30:.2f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.0f} MiB"


def large(number: int) -> str:
    """ "2.25 B", "109.5 M", or the number as it is below a tenth of a million."""
    if number >= 1_000_000_000:
        return f"{number / 1e9:.4g} B"
    return f"{number / 1e6:.1f} M" if number >= 100_000 else str(number)


def rate(samples_per_s: float) -> str:
    """Samples/s with four significant digits."""
    return f"{samples_per_s:.4g}/s" if samples_per_s < 1000 else f"{samples_per_s:.0f}/s"


def seconds(time_s: float) -> str:
    """A step's time with three significant digits, in ms below one second."""
    return f"{time_s * 1000:.3g} ms" if time_s < 0.9995 else f"{time_s:.3g} s"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ " (did you mean bert-tiny?)", or nothing when no known name is near."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""


def fraction_in(text: str) -> float | None:
    """0.92 of "0.92" and of "92%"; None unless it is a number."""
    try:
        return float(text.strip().removesuffix("%")) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        return None


def percent(hundredths: float) -> str:
    """Two figures, and whole numbers from 100 on: "1.5 %", "42 %", "130 %"."""
    return f"{hundredths:.2g} %" if abs(hundredths) < 99.5 else f"{hundredths:.0f} %"


def json_text(data: Any) -> str:
    """Data as JSON that every program reads: numbers that are none or infinite are null."""
    return json.dumps(_finite(data), indent=2, allow_nan=False)


def _finite(data: Any) -> Any:
    if isinstance(data, Mapping):
        return {name: _finite(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
