"""How long a rank may be silent follows the workload and what was seen; marks cost next to nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bo_tuner.cluster import Cluster
from bo_tuner.config import TrainConfig
from bo_tuner.objectives.training.pulse import Heart, Pulses
from bo_tuner.objectives.training.silence import Patience, SignsOfLife
from bo_tuner.workload import ModelSpec, Workload

CLUSTER = Cluster(device="cpu", n_ranks=2, device_name="a thought", memory_bytes=2**33)
SMALL = Workload(model=ModelSpec(name="toy", architecture={"model_type": "bert"}), n_parameters=10**6, seq_len=16)
LARGE = replace(SMALL, n_parameters=10**9, seq_len=512)
ONE, FOUR = TrainConfig(micro_batch_size=1), TrainConfig(micro_batch_size=4)


def patience(workload: Workload = SMALL, *, least_s: float = 60.0, **settings: float) -> Patience:
    return Patience(workload, CLUSTER, least_s=least_s, **settings)


def test_a_small_model_is_given_the_least() -> None:
    assert patience().of_start() == pytest.approx(60.4)
    assert patience().of_training(ONE, longest_s=0.1, n_steps=3) == 60.0


def test_a_large_model_is_given_time_to_be_built_and_to_make_its_first_step() -> None:
    assert patience(LARGE).of_start() == pytest.approx(460.0)
    first = patience(LARGE).of_training(ONE, longest_s=0.0, n_steps=0)
    assert first == pytest.approx(8 * 1e9 * 512 / 5e9)
    assert patience(LARGE).of_training(FOUR, longest_s=0.0, n_steps=0) == pytest.approx(4 * first)


def test_after_the_first_step_the_trial_itself_says_what_is_long() -> None:
    assert patience(LARGE).of_training(ONE, longest_s=9.0, n_steps=1) == 90.0


def test_earlier_trials_teach_in_proportion_to_their_micro_batch() -> None:
    known = patience(LARGE)
    known.learn_start(50.0)
    known.learn_training(ONE, 20.0)
    assert known.of_start() == 500.0
    assert known.of_training(ONE, longest_s=0.0, n_steps=0) == 200.0
    assert known.of_training(FOUR, longest_s=0.0, n_steps=0) == 800.0


def test_data_may_take_what_it_was_given() -> None:
    assert patience(longest_wait_s=120.0).of_training(ONE, longest_s=0.0, n_steps=1) == 180.0


def test_the_user_may_say_how_long_the_first_step_may_take() -> None:
    told = patience(first_step_s=1800.0)
    assert told.of_start() == told.of_training(ONE, longest_s=0.0, n_steps=0) == told.of_work_s == 1800.0
    assert told.of_training(ONE, longest_s=0.0, n_steps=1) == 60.0
    assert told.more_time_s == 1800.0


RANK = """
import faulthandler, signal, subprocess, sys, time
faulthandler.register(signal.SIGUSR1, file=open(sys.argv[1], "wb"))

def run_rank():
    print("here", flush=True)
    if sys.argv[2] == "compiles":
        while True:
            pass
    if sys.argv[2] == "waits for its compiler":
        subprocess.run([sys.executable, "-c", "while True: pass"])
    time.sleep(3600)

run_rank()
"""


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Callable[[str], tuple[int, Path]]]:
    """`rank(what)` starts a process that stands in a file of torch's compiler and makes no marks; it tells the file of its stack."""
    file = tmp_path / "torch" / "_dynamo" / "convert_frame.py"
    file.parent.mkdir(parents=True)
    file.write_text(RANK, encoding="utf-8")
    started: list[subprocess.Popen[str]] = []

    def start(what: str) -> tuple[int, Path]:
        stack = tmp_path / "stack"
        command = [sys.executable, str(file), str(stack), what]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0))
        assert started[-1].stdout is not None
        assert started[-1].stdout.readline() == "here\n"
        return started[-1].pid, stack

    yield start
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize(
    ("what", "n_steps", "allowed"),
    [
        ("compiles", 0, {"longest_work_s": 6.0}),
        ("waits for its compiler", 0, {"longest_work_s": 6.0}),
        ("compiles", 1, {"first_step_s": 6.0}),
    ],
)
def test_a_rank_that_compiles_is_alive_until_that_takes_too_long_also_after_its_first_step(
    what: str, n_steps: int, allowed: dict[str, float], rank: Callable[[str], tuple[int, Path]]
) -> None:
    pid, stack = rank(what)
    began = time.monotonic()
    pulses = Pulses(n_ranks=1, now=began)
    life = SignsOfLife(pulses, patience(SMALL, least_s=1.5, **allowed), ONE, [pid], [stack])
    if n_steps:
        life.start_ended(began)
    found = None
    while found is None and time.monotonic() - began < 60.0:
        found = life.silence(time.monotonic(), n_steps=n_steps)
        time.sleep(0.05)
    assert found is not None
    when = " before its first step was done" if n_steps == 0 else ""
    assert found.startswith(f"rank 0 was at work and did not get on for 6 s{when} (--first-step-timeout)")
    assert 3.0 < life.more_time_s - allowed.get("first_step_s", 0.0) < 7.0
    pulses.close()


def test_a_rank_that_sleeps_within_a_compiler_is_not_alive(rank: Callable[[str], tuple[int, Path]]) -> None:
    pid, stack = rank("sleeps")
    began = time.monotonic()
    pulses = Pulses(n_ranks=1, now=began)
    life = SignsOfLife(pulses, patience(least_s=1.0), ONE, [pid], [stack])
    found = None
    while found is None and time.monotonic() - began < 30.0:
        found = life.silence(time.monotonic(), n_steps=1)
        time.sleep(0.05)
    assert found is not None
    assert found.startswith("rank 0 gave no sign of life for ")
    assert "it is in run_rank (torch/_dynamo/convert_frame.py:" in found
    pulses.close()


def test_marks_of_every_rank_are_seen_with_the_silence_before_them() -> None:
    pulses = Pulses(n_ranks=2, now=100.0)
    hearts = [Heart(pulses.file, rank) for rank in (0, 1)]
    hearts[1].beat()
    pulses.look(103.0)
    assert (pulses.silent_s(0, 103.0), pulses.silent_s(1, 103.0)) == (3.0, 0.0)
    assert list(hearts[0].beating(iter("ab"))) == ["a", "b"]
    pulses.look(104.0)
    assert pulses.silent_s(0, 104.0) == 0.0
    assert pulses.longest_s == 4.0
    pulses.forget(110.0)
    assert (pulses.longest_s, pulses.silent_s(1, 110.0)) == (0.0, 0.0)
    pulses.close()


def test_a_mark_costs_far_less_than_a_step() -> None:
    pulses = Pulses(n_ranks=1, now=0.0)
    heart = Heart(pulses.file, 0)
    best_s = min(_timed(heart) for _ in range(20))
    assert best_s < 20e-6
    pulses.close()


def _timed(heart: Heart) -> float:
    """Seconds of one mark, of a hundred."""
    began = time.perf_counter()
    for _ in range(100):
        heart.beat()
    return (time.perf_counter() - began) / 100
