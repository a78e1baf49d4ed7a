"""`Schedule`: in which order the ranks of a pipeline work, and what that costs in closed form."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, TypeAlias

from bo_tuner.errors import ConfigError
from bo_tuner.schedules.actions import Action, Backward, Forward

__all__ = ["Numbers", "Pipeline", "Schedule", "one_by_one", "one_by_one_exchange_s", "positive_part"]

Numbers: TypeAlias = Any
"""A number or a numpy array of them: the closed forms are plain arithmetic and work element by element."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """A pipeline as the closed forms see it, or many at once as arrays. Its ranks may take differently long."""

    depth: Numbers
    """Ranks."""
    n_micro_batches: Numbers
    """Per update."""
    forward_s: Numbers
    """Of one micro-batch on the rank that takes longest, all its chunks together."""
    work_s: Numbers
    """Both passes of it there."""
    passage_s: Numbers
    """Both passes of one micro-batch on all ranks, one after the other."""
    message_s: Numbers = 0.0
    """From the end of a pass to the start of the next stage's, one way; the same in both directions."""
    update_s: Numbers = 0.0
    """Optimizer step, during which the rank does nothing else."""
    all_reduce_s: Numbers = 0.0
    """From then until the new weights can be read; the rank works on meanwhile."""

    @classmethod
    def even(
        cls, *, depth: Numbers, n_micro_batches: Numbers, forward_s: Numbers, backward_s: Numbers, **others: Numbers
    ) -> Pipeline:
        """One whose ranks all take equally long, on which the closed forms are exact.

        Args:
            depth: Ranks.
            n_micro_batches: Per update.
            forward_s: Of one micro-batch on one rank.
            backward_s: Likewise.
            **others: The other fields.
        """
        work_s = forward_s + backward_s
        return cls(
            depth=depth,
            n_micro_batches=n_micro_batches,
            forward_s=forward_s,
            work_s=work_s,
            passage_s=depth * work_s,
            **others,
        )

    @property
    def backward_s(self) -> Numbers:
        """On the rank that takes longest."""
        return self.work_s - self.forward_s

    def at(self, chosen: Any) -> Pipeline:
        """Of many those that are flagged."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return Pipeline(**{name: value[chosen] if hasattr(value, "shape") else value for name, value in values.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule(ABC):
    """One order of work. Stateless: every method is a pure function of its arguments.

    A schedule is one file: what it can do stands in its class variables, and what it costs in its closed forms, which share
    the clock of `simulate`. The cost model, the memory model, the search space and the planner ask for nothing else.
    """

    name: ClassVar[str]
    """As users write it."""
    rule: ClassVar[str] = "depth and n_micro_batches must be at least 1"
    """What depth and micro-batches must be like."""
    n_weight_versions: ClassVar[int] = 1
    """Versions of the weights that a rank has to keep."""
    zero_stages: ClassVar[frozenset[int]] = frozenset({0, 1})
    """ZeRO stages that go with a pipeline of it; 2 and 3 move gradients or weights in every micro-batch."""
    back_ends: ClassVar[frozenset[str]] = frozenset()
    """Names of the back ends that run it. What none runs can be planned, not tuned."""
    changes_training: ClassVar[str] = ""
    """How its updates differ from those of a training without a pipeline; empty where they do not. Users must allow it."""
    drains: ClassVar[bool] = True
    """The pipeline is empty at every update."""
    needs_even_blocks: ClassVar[bool] = False
    """Every stage must hold equally many of the model's blocks."""
    has_chunks: ClassVar[bool] = False
    """Ranks hold several stages each; configs, which have no number of them, cannot have it yet."""
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
    def bubble_s(self, pipeline: Pipeline) -> Numbers:
        """Seconds per update in which the rank that takes longest waits for others' passes, where messages take no time."""

    @abstractmethod
    def exchange_s(self, pipeline: Pipeline) -> Numbers:
        """Seconds per update that messages add to it."""

    def exposed_s(self, pipeline: Pipeline) -> Numbers:
        """Seconds per update in which ranks wait for an all-reduce."""
        return pipeline.all_reduce_s

    def period_s(self, pipeline: Pipeline) -> Numbers:
        """Seconds from update to update, the mean of a long run; exact on stages alike unless the schedule says otherwise."""
        waits_s = self.bubble_s(pipeline) + self.exchange_s(pipeline) + self.exposed_s(pipeline)
        return pipeline.n_micro_batches * pipeline.work_s + waits_s + pipeline.update_s

    def makespan_s(self, pipeline: Pipeline, n_batches: Numbers) -> Numbers:
        """Seconds from the first action until the last weights can be read.

        With a flush that is one period after another: rank 0 begins each batch and is the last to end it, so what the
        other ranks do between two batches is never waited for.
        """
        return n_batches * self.period_s(pipeline)

    def bubble_fraction(self, pipeline: Pipeline) -> Numbers:
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


def one_by_one_exchange_s(pipeline: Pipeline, n_micro_batches: Numbers) -> Numbers:
    """Seconds that messages add to so many micro-batches `one_by_one`, after depth - 1 - rank forward passes.

    Any longest chain of waiting runs through n_micro_batches + depth - 1 passes of each kind. It may turn from a
    backward pass to the forward pass that follows on the same rank, r, which leads depth - r micro-batches further, and
    from a forward pass to the backward pass that follows, which leads depth - r - 1 back. So with j turns of the first
    kind and j + 1 of the second it passes n_micro_batches + depth - 2 - j boundaries downwards and as many upwards; and
    as no stretch between two turns is longer than depth - 1, j is at least (n_micro_batches - 1) / depth.
    """
    depth = pipeline.depth
    n_turns = (n_micro_batches + depth - 2) // depth
    return 2 * (n_micro_batches + depth - 2 - n_turns) * pipeline.message_s


def positive_part(number: Numbers) -> Numbers:
    """max(number, 0), also of arrays."""
    return number * (number > 0)
