"""`Schedule`: in which order the ranks of a pipeline work, and what that costs in closed form on stages alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, TypeAlias

from bo_tuner.errors import ConfigError
from bo_tuner.schedules.actions import Action, Backward, Forward

__all__ = ["EvenPipeline", "Numbers", "Schedule", "one_by_one", "one_by_one_s", "positive_part"]

Numbers: TypeAlias = Any
"""A number or a numpy array of them: the closed forms are plain arithmetic and work element by element."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvenPipeline:
    """A pipeline whose ranks take equally long, or many at once as arrays."""

    depth: Numbers
    """Ranks."""
    n_micro_batches: Numbers
    """Per update."""
    forward_s: Numbers
    """Of one micro-batch on one rank, all its chunks together."""
    backward_s: Numbers
    message_s: Numbers = 0.0
    """From the end of a pass to the start of the next stage's, one way; the same in both directions."""
    update_s: Numbers = 0.0
    """Optimizer step, during which the rank does nothing else."""
    all_reduce_s: Numbers = 0.0
    """From then until the new weights can be read; the rank works on meanwhile."""

    @property
    def work_s(self) -> Numbers:
        """Both passes of one micro-batch on one rank."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule(ABC):
    """One order of work. Stateless: every method is a pure function of its arguments.

    The closed forms `period_s`, `makespan_s`, `bubble_fraction` and `peak_held` share the clock of `simulate`, which
    takes stages that differ too.
    """

    name: ClassVar[str]
    """As users write it."""
    rule: ClassVar[str] = "depth and n_micro_batches must be at least 1"
    """What depth and micro-batches must be like."""
    n_weight_versions: ClassVar[int] = 1
    """Versions of the weights that a rank has to keep."""
    n_chunks: int = 1
    """Stages per rank: rank r holds stages r, r + depth, r + 2 depth, ..."""

    def __post_init__(self) -> None:
        if self.n_chunks != 1:
            raise ConfigError(f"n_chunks must be 1 with {self.name}, got {self.n_chunks}; only interleaved has more")

    def is_legal(self, *, depth: Numbers, n_micro_batches: Numbers) -> Numbers:
        """Whether `rule` holds, or of arrays where; both are at least 1."""
        return (depth >= 1) & (n_micro_batches >= 1)

    def check(self, *, depth: int, n_micro_batches: int) -> None:
        """Refuse what the schedule cannot run.

        Raises:
            ConfigError: `rule` does not hold.
        """
        if depth < 1 or not self.is_legal(depth=depth, n_micro_batches=n_micro_batches):
            raise ConfigError(f"{self.name}: {self.rule}; got depth {depth} and n_micro_batches {n_micro_batches}")

    def actions(self, rank: int, *, depth: int, n_micro_batches: int, n_batches: int = 1) -> tuple[Action, ...]:
        """What a rank does, in order.

        Args:
            rank: From 0, which holds the model's first stage, to depth - 1.
            depth: Ranks of the pipeline.
            n_micro_batches: Per update.
            n_batches: Updates.

        Raises:
            ConfigError: The schedule cannot run such a pipeline, or there is no such rank.
        """
        self.check(depth=depth, n_micro_batches=n_micro_batches)
        if n_batches < 1:
            raise ConfigError(f"n_batches must be at least 1, got {n_batches}")
        if not 0 <= rank < depth:
            raise ConfigError(f"rank must be from 0 to depth - 1, {depth - 1}; got {rank}")
        return tuple(self._order(rank, depth, n_micro_batches, n_batches))

    @abstractmethod
    def _order(self, rank: int, depth: int, n_micro_batches: int, n_batches: int) -> Iterator[Action]:
        """`actions`, of arguments known to be good."""

    @abstractmethod
    def peak_held(self, rank: Numbers, *, depth: Numbers, n_micro_batches: Numbers) -> Numbers:
        """Most forward passes, each of a micro-batch through one chunk, that a rank keeps for their backward pass."""

    @abstractmethod
    def period_s(self, pipeline: EvenPipeline) -> Numbers:
        """Seconds from update to update, the mean of a long run; exact unless the schedule says otherwise."""

    def makespan_s(self, pipeline: EvenPipeline, n_batches: Numbers) -> Numbers:
        """Seconds from the first action until the last weights can be read.

        With a flush that is one period after another: rank 0 begins each batch and is the last to end it, so what the
        other ranks do between two batches is never waited for.
        """
        return n_batches * self.period_s(pipeline)

    def bubble_fraction(self, pipeline: EvenPipeline) -> Numbers:
        """Share of wall time in which a rank neither computes nor updates, in a long run.

        SC21 (Megatron-LM, arXiv 2104.04473, section 2.2) divides by ideal time instead: what is
        (p - 1) / m there is (p - 1) / (m + p - 1) here.
        """
        busy_s = pipeline.n_micro_batches * pipeline.work_s + pipeline.update_s
        return 1 - busy_s / self.period_s(pipeline)


def one_by_one(forwards: Sequence[Forward], backwards: Sequence[Backward], n_warm_up: int) -> Iterator[Action]:
    """First `n_warm_up` forward passes, then one and one backward pass in turn, then the backward passes left over."""
    n_pairs = max(len(forwards) - n_warm_up, 0)
    yield from forwards[: len(forwards) - n_pairs]
    yield from chain.from_iterable(zip(forwards[len(forwards) - n_pairs :], backwards, strict=False))
    yield from backwards[n_pairs:]


def one_by_one_s(pipeline: EvenPipeline, n_micro_batches: Numbers) -> Numbers:
    """Seconds that so many micro-batches take `one_by_one`, after depth - 1 - rank forward passes, without an update.

    Any longest chain of waiting runs through n_micro_batches + depth - 1 passes of each kind. It may turn from a
    backward pass to the forward pass that follows on the same rank, r, which leads depth - r micro-batches further, and
    from a forward pass to the backward pass that follows, which leads depth - r - 1 back. So with j turns of the first
    kind and j + 1 of the second it passes n_micro_batches + depth - 2 - j boundaries downwards and as many upwards; and
    as no stretch between two turns is longer than depth - 1, j is at least (n_micro_batches - 1) / depth.
    """
    depth = pipeline.depth
    n_turns = (n_micro_batches + depth - 2) // depth
    n_hops = n_micro_batches + depth - 2 - n_turns
    return (n_micro_batches + depth - 1) * pipeline.work_s + 2 * n_hops * pipeline.message_s


def positive_part(number: Numbers) -> Numbers:
    """max(number, 0), also of arrays."""
    return number * (number > 0)
