"""When each action of a pipeline runs, from who waits for whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bo_tuner.errors import BoTunerError, ConfigError
from bo_tuner.schedules.actions import Action, Backward, Forward, Update

__all__ = ["DeadlockError", "Timeline", "simulate"]


class DeadlockError(BoTunerError):
    """Ranks wait for one another, or for what nobody does."""

    def __init__(self, waiting: Mapping[int, Action]) -> None:
        self.waiting = dict(waiting)
        """By rank, the action that cannot start."""
        super().__init__(
            "the pipeline stands still: "
            + ", ".join(f"rank {rank} waits to do {what}" for rank, what in waiting.items())
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What each rank did when. All times in seconds since the run began."""

    orders: tuple[tuple[Action, ...], ...]
    """By rank, as given."""
    start_s: tuple[tuple[float, ...], ...]
    """By rank, of each of its actions."""
    end_s: tuple[tuple[float, ...], ...]
    weights_s: tuple[tuple[float, ...], ...]
    """By rank and version, when the weights could be read; those of version 0 at once."""

    @property
    def makespan_s(self) -> float:
        """Until the last action has ended and the last weights can be read."""
        return max(times[-1] for times in (*self.end_s, *self.weights_s) if times)

    @property
    def idle_fraction(self) -> tuple[float, ...]:
        """By rank, the share of the makespan in which it neither computed nor updated."""
        makespan_s = self.makespan_s
        return tuple(
            1 - sum(end - start for start, end in zip(starts, ends, strict=True)) / makespan_s
            for starts, ends in zip(self.start_s, self.end_s, strict=True)
        )

    @property
    def peak_held(self) -> tuple[int, ...]:
        """By rank, the most forward passes, each of a micro-batch through one chunk, kept for their backward pass."""
        peaks: list[int] = []
        for order in self.orders:
            held = peak = 0
            for action in order:
                held += isinstance(action, Forward) - isinstance(action, Backward)
                peak = max(peak, held)
            peaks.append(peak)
        return tuple(peaks)

    @property
    def versions(self) -> dict[tuple[int, int], int]:
        """By micro-batch and stage, the version of the weights that both passes read."""
        depth = len(self.orders)
        return {
            (action.micro_batch, action.chunk * depth + rank): action.version
            for rank, order in enumerate(self.orders)
            for action in order
            if isinstance(action, Forward)
        }


def simulate(
    orders: Sequence[Sequence[Action]],
    *,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    message_s: Sequence[float] | None = None,
    update_s: Sequence[float] | None = None,
    all_reduce_s: Sequence[float] | None = None,
) -> Timeline:
    """Run every rank's actions in their order, each as early as it can start.

    A rank does one action at a time. What overlaps:

    - A message takes its time, and no one else's: its sender goes on at once, messages do not slow each other, and only
      the receiver waits, in the pass that needs it. Stage s + 1's forward pass waits for stage s's, and stage s's
      backward pass for stage s + 1's.
    - An update holds its rank for `update_s`. Its all-reduce then runs beside the rank's next passes, after the one
      before it; only a forward pass that reads the new version waits for it.

    Costs time and memory in proportion to the number of actions.

    Args:
        orders: By rank.
        forward_s: By stage; stage s is chunk s // depth of rank s % depth.
        backward_s: By stage.
        message_s: By boundary: of s, one way between stages s and s + 1. None: no time.
        update_s: By rank. None: no time.
        all_reduce_s: By rank. None: no time.

    Raises:
        ConfigError: The numbers of stages, boundaries or ranks do not match.
        DeadlockError: Some action can never start.
    """
    depth, n_stages = len(orders), len(forward_s)
    message_s = [0.0] * (n_stages - 1) if message_s is None else message_s
    update_s = [0.0] * depth if update_s is None else update_s
    all_reduce_s = [0.0] * depth if all_reduce_s is None else all_reduce_s
    n_chunks = 1 + max((a.chunk for order in orders for a in order if not isinstance(a, Update)), default=0)
    for name, values, wanted in (
        ("forward_s", forward_s, depth * n_chunks),
        ("backward_s", backward_s, n_stages),
        ("message_s", message_s, n_stages - 1),
        ("update_s", update_s, depth),
        ("all_reduce_s", all_reduce_s, depth),
    ):
        if len(values) != wanted:
            raise ConfigError(
                f"{name} must have length {wanted} for {depth} ranks of {n_chunks} stages, got {len(values)}"
            )

    last = n_stages - 1
    inputs: list[dict[int, float]] = [{} for _ in range(n_stages)]  # when a micro-batch's activations are at a stage
    gradients: list[dict[int, float]] = [{} for _ in range(n_stages)]
    starts: list[list[float]] = [[] for _ in range(depth)]
    ends: list[list[float]] = [[] for _ in range(depth)]
    weights: list[list[float]] = [[0.0] for _ in range(depth)]
    now = [0.0] * depth

    # A rank's progress is news to its two neighbours alone, so every action causes at most two visits in vain.
    to_visit = list(range(depth))
    while to_visit:
        rank = to_visit.pop()
        order, rank_ends, rank_weights, clock = orders[rank], ends[rank], weights[rank], now[rank]
        begun = position = len(rank_ends)
        while position < len(order):
            action = order[position]
            if isinstance(action, Forward):
                stage = action.chunk * depth + rank
                arrival = inputs[stage].get(action.micro_batch) if stage else 0.0
                if arrival is None or action.version >= len(rank_weights):
                    break
                start = max(clock, arrival, rank_weights[action.version])
                clock = start + forward_s[stage]
                if stage < last:
                    inputs[stage + 1][action.micro_batch] = clock + message_s[stage]
                else:
                    gradients[stage][action.micro_batch] = clock
            elif isinstance(action, Backward):
                stage = action.chunk * depth + rank
                arrival = gradients[stage].get(action.micro_batch)
                if arrival is None:
                    break
                start = max(clock, arrival)
                clock = start + backward_s[stage]
                if stage:
                    gradients[stage - 1][action.micro_batch] = clock + message_s[stage - 1]
            else:
                if action.batch != len(rank_weights) - 1:
                    break
                start = clock
                clock = start + update_s[rank]
                rank_weights.append(max(clock, rank_weights[-1]) + all_reduce_s[rank])
            starts[rank].append(start)
            rank_ends.append(clock)
            position += 1
        if position > begun:
            now[rank] = clock
            to_visit += ((rank - 1) % depth, (rank + 1) % depth)

    waiting = {rank: order[len(ends[rank])] for rank, order in enumerate(orders) if len(ends[rank]) < len(order)}
    if waiting:
        raise DeadlockError(waiting)
    return Timeline(
        orders=tuple(tuple(order) for order in orders),
        start_s=tuple(map(tuple, starts)),
        end_s=tuple(map(tuple, ends)),
        weights_s=tuple(map(tuple, weights)),
    )
