"""Host memory is read above the baseline, and the guard says when it is too much."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from bo_tuner.errors import ConfigError
from bo_tuner.objectives.memory import HostProbe, MemoryGuard, MemoryReading

MIB = 2**20

PEAK = """
from bo_tuner.objectives.memory import OwnPeak
first = b"x" * (100 * 2**20)
own = OwnPeak()
second = b"x" * (200 * 2**20)
del second
print(own.read(), own.baseline_bytes)
"""


def test_a_peak_that_is_over_is_still_known_and_what_was_there_before_does_not_count() -> None:
    told = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True).stdout
    peak, baseline = map(int, told.split())
    assert baseline > 100 * MIB
    assert peak == pytest.approx(200 * MIB, abs=8 * MIB)


SHORT_PEAK = """
from bo_tuner.objectives.memory import OwnPeak
first = b"x" * (100 * 2**20)
own = OwnPeak()
second = b"x" * (200 * 2**20)
del second
print(own.baseline_bytes, flush=True)
input()
"""


def test_the_probe_sees_a_peak_that_was_over_before_it_looked() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SHORT_PEAK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as rank:
        assert rank.stdin is not None and rank.stdout is not None
        baseline = int(rank.stdout.readline())
        reading = HostProbe({0: rank.pid}, {0: baseline})()
        rank.stdin.write("\n")
    assert reading is not None
    assert reading.used_bytes == pytest.approx(200 * MIB, abs=8 * MIB)


def test_the_probe_names_the_rank_that_holds_most_above_its_baseline() -> None:
    reading = HostProbe({0: os.getpid(), 1: os.getpid()}, {0: 10 * MIB, 1: 0})()
    assert reading is not None
    assert reading.rank == 1
    assert reading.used_bytes > 10 * MIB


def test_the_probe_reads_nothing_before_a_baseline_is_known_or_after_the_process_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    assert HostProbe({0: os.getpid()}, {})() is None
    assert HostProbe({0: ended.pid}, {0: 0})() is None


def scripted(*used: int) -> MemoryGuard:
    readings = iter(MemoryReading(rank=0, used_bytes=value) for value in used)
    return MemoryGuard(lambda: next(readings, None), limit_bytes=100)


def test_the_guard_lets_pass_what_is_at_the_limit_and_reports_what_is_over() -> None:
    guard = scripted(99, 100, 101)
    assert guard.breach() is None
    assert guard.breach() is None
    breach = guard.breach()
    assert breach is not None and breach.used_bytes == 101


def test_the_guard_keeps_the_highest_reading() -> None:
    guard = scripted(30, 80, 50)
    for _ in range(4):
        guard.breach()
    assert guard.peak_bytes == 80


def test_a_limit_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="limit_bytes must be positive, got 0"):
        MemoryGuard(lambda: None, limit_bytes=0)
