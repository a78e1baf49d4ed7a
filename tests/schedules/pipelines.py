"""Pipelines of every schedule, drawn at random, and what the simulator makes of them."""

from __future__ import annotations

import random
from collections.abc import Iterator

from bo_tuner.schedules import Action, Pipeline, Schedule, Timeline, find_schedule, simulate

NAMES = ("gpipe", "1f1b", "interleaved", "2bw")


def orders_of(schedule: Schedule, depth: int, n_micro_batches: int, n_batches: int = 1) -> list[tuple[Action, ...]]:
    return [
        schedule.actions(rank, depth=depth, n_micro_batches=n_micro_batches, n_batches=n_batches)
        for rank in range(depth)
    ]


def simulate_even(schedule: Schedule, pipeline: Pipeline, n_batches: int = 1) -> Timeline:
    depth, n_stages = pipeline.depth, pipeline.depth * schedule.n_chunks
    return simulate(
        orders_of(schedule, depth, pipeline.n_micro_batches, n_batches),
        forward_s=[pipeline.forward_s / schedule.n_chunks] * n_stages,
        backward_s=[pipeline.backward_s / schedule.n_chunks] * n_stages,
        message_s=[pipeline.message_s] * (n_stages - 1),
        update_s=[pipeline.update_s] * depth,
        all_reduce_s=[pipeline.all_reduce_s] * depth,
    )


def random_shapes(name: str, n_shapes: int, *, max_depth: int = 16) -> Iterator[tuple[Schedule, int, int, int]]:
    """Schedule, depth, micro-batches per update, updates: legal ones."""
    numbers = random.Random(f"{name} {n_shapes}")
    for _ in range(n_shapes):
        depth = numbers.randint(1, max_depth)
        n_micro_batches = {
            "gpipe": numbers.randint(1, 24),
            "1f1b": numbers.randint(1, 24),
            "interleaved": depth * numbers.randint(1, 4),
            "2bw": depth + numbers.randint(0, 12),
        }[name]
        n_chunks = numbers.randint(2, 4) if name == "interleaved" else 1
        yield find_schedule(name, n_chunks=n_chunks), depth, n_micro_batches, numbers.randint(1, 4)
