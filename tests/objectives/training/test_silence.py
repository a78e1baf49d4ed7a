"""How long a rank may be silent follows the workload and what was seen; marks cost next to nothing."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from bo_tuner.cluster import Cluster
from bo_tuner.config import TrainConfig
from bo_tuner.objectives.training.pulse import Heart, Pulses
from bo_tuner.objectives.training.silence import Patience
from bo_tuner.workload import ModelSpec, Workload

CLUSTER = Cluster(device="cpu", n_ranks=2, device_name="a thought", memory_bytes=2**33)
SMALL = Workload(model=ModelSpec(name="toy", architecture={"model_type": "bert"}), n_parameters=10**6, seq_len=16)
LARGE = replace(SMALL, n_parameters=10**9, seq_len=512)
ONE, FOUR = TrainConfig(micro_batch_size=1), TrainConfig(micro_batch_size=4)


def patience(workload: Workload = SMALL, *, longest_wait_s: float = 0.0) -> Patience:
    return Patience(workload, CLUSTER, least_s=60.0, longest_wait_s=longest_wait_s)


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
