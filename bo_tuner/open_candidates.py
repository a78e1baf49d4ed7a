"""`OpenCandidates`: which configs are still worth a trial, given those that ran."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from bo_tuner.config import TrainConfig
from bo_tuner.goal import THROUGHPUT, Goal
from bo_tuner.models.choices import Problem
from bo_tuner.space import BatchRule, SearchSpace
from bo_tuner.step_limit import StepLimit
from bo_tuner.trial import TrialRecord, holds

__all__ = ["MemoryProof", "OpenCandidates", "memory_proofs"]


@dataclass(frozen=True, slots=True)
class MemoryProof:
    """A trial that ran out of memory: its layout cannot hold this micro-batch or a larger one."""

    trial: int
    micro_batch_size: int


def memory_proofs(records: Iterable[TrialRecord], *, limit_bytes: int) -> dict[TrainConfig, MemoryProof]:
    """The tightest proof per layout.

    A refusal of the device always holds. What our own limit or the kernel ended holds only while the limit is no higher
    than it was then.
    """
    proofs: dict[TrainConfig, MemoryProof] = {}
    for record in records:
        if not _is_proof(record, limit_bytes):
            continue
        known = proofs.get(record.config.layout)
        if known is None or record.config.micro_batch_size < known.micro_batch_size:
            proofs[record.config.layout] = MemoryProof(record.number, record.config.micro_batch_size)
    return proofs


def _is_proof(record: TrialRecord, limit_bytes: int) -> bool:
    """Memory ended the trial, or its confirmation, or its peak is over a limit that was lowered since."""
    if record.result is None:
        return False
    last = record.confirmation if record.confirmation and record.confirmation.outcome.is_memory else record.result
    if last.outcome.is_memory:
        return holds(last, limit_bytes)
    return record.has_run and (record.peak_memory_bytes or 0) > limit_bytes


class OpenCandidates:
    """The candidates of a study less those that ran, those proven not to fit, and those too slow to measure.

    At the edge of memory, between two neighbouring rungs of the ladder, every integer is a candidate too.
    """

    def __init__(
        self,
        candidates: Sequence[TrainConfig],
        *,
        space: SearchSpace,
        n_ranks: int,
        limit_bytes: int,
        longest_step_s: float,
        goal: Goal = THROUGHPUT,
        problem: Problem | None = None,
        retried: Collection[int] = (),
    ) -> None:
        """Start from the list that `space` gave.

        Args:
            candidates: All legal configs.
            space: Where they come from.
            n_ranks: World size.
            limit_bytes: Memory limit per rank of this run.
            longest_step_s: A config whose optimizer step would take longer than this is set aside. Not under a fixed global batch, where
                every config makes equally large steps. Infinite where nobody waits for a step.
            goal: What the study is after, for who chooses.
            problem: What the cost model expects steps to take; None where nothing can be expected.
            retried: Numbers of trials that are forgotten, so that their configs may run again.
        """
        self.goal = goal
        self._candidates = tuple(candidates)
        self._layouts = tuple(config.layout for config in self._candidates)
        self._families: dict[TrainConfig, list[TrainConfig]] = {}
        for config, layout in zip(self._candidates, self._layouts, strict=True):
            self._families.setdefault(layout, []).append(config)
        self._space = space
        self.n_ranks = n_ranks
        """World size."""
        self.limit_bytes = limit_bytes
        """Memory limit per rank of this run."""
        self._retried = frozenset(retried)
        is_fixed = space.batch_rule.kind == "fixed"
        self._step_limit = StepLimit(
            longest_s=math.inf if is_fixed else longest_step_s, n_ranks=n_ranks, problem=problem
        )

    @property
    def all(self) -> tuple[TrainConfig, ...]:
        """Every legal config of the ladder."""
        return self._candidates

    @property
    def batch_rule(self) -> BatchRule:
        """What the global batch may be."""
        return self._space.batch_rule

    def standing(self, records: Sequence[TrialRecord]) -> list[TrialRecord]:
        """The trials that still say something: all but those that a lower memory limit than today's ended, and those that are retried."""
        return [
            record
            for record in records
            if record.result is None or (record.number not in self._retried and holds(record.result, self.limit_bytes))
        ]

    def open(self, records: Sequence[TrialRecord]) -> list[TrainConfig]:
        """Those that may still run."""
        tried = {record.config for record in self.standing(records)}
        proofs = memory_proofs(records, limit_bytes=self.limit_bytes)
        edge = self._edge(records, proofs)
        is_measurable = self._step_limit.allows(records, [*self._candidates, *edge])

        def is_open(config: TrainConfig, layout: TrainConfig) -> bool:
            proof = proofs.get(layout)
            fits = proof is None or config.micro_batch_size < proof.micro_batch_size
            return fits and config not in tried and is_measurable(config)

        listed = [
            config for config, layout in zip(self._candidates, self._layouts, strict=True) if is_open(config, layout)
        ]
        return listed + [config for config in edge if is_open(config, config.layout)]

    def step_limit_s(self, config: TrainConfig) -> float | None:
        """Seconds that a step of `config` may take when it runs; None for any."""
        return self._step_limit.of(config)

    def _edge(self, records: Sequence[TrialRecord], proofs: dict[TrainConfig, MemoryProof]) -> list[TrainConfig]:
        found: list[TrainConfig] = []
        own_layouts = [(record, record.config.layout) for record in records] if proofs else []
        for layout, proof in proofs.items():
            ran = [
                record.config.micro_batch_size
                for record, own in own_layouts
                if own == layout and record.has_run and not _is_proof(record, self.limit_bytes)
            ]
            if ran and max(ran) < proof.micro_batch_size:
                family = self._families.get(layout, [])
                found += self._space.refined(family, fits=max(ran), fails=proof.micro_batch_size, n_ranks=self.n_ranks)
        return found
