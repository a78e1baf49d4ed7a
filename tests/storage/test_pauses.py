"""Time in which a process was stopped."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from bo_tuner.storage.pauses import Pauses

SLEEPER = """
import sys, time
from bo_tuner.storage.pauses import Pauses
pauses = Pauses(beat_s=0.05, least_s=1.0)
pauses.start()
print("beats", flush=True)
sys.stdin.readline()
print(pauses.seconds)
pauses.stop()
"""


def test_long_gaps_count_and_short_ones_do_not() -> None:
    now = [100.0]
    pauses = Pauses(clock=lambda: now[0], beat_s=1.0, least_s=10.0)
    for seconds, total in ((1.0, 0.0), (9.0, 0.0), (61.0, 60.0), (1.0, 60.0), (31.0, 90.0)):
        now[0] += seconds
        assert pauses.seconds == pytest.approx(total)


def test_the_time_of_a_stopped_process_is_known_as_soon_as_it_goes_on() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SLEEPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "beats\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(2.5)
        process.send_signal(signal.SIGCONT)
        paused_s = float(process.communicate("\n", timeout=60)[0])
    assert paused_s > 1.0
