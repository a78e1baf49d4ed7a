"""`RuleSampler`: a search written as if its trials ran at once; and the rate that a rule is told of a trial."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Iterable, Sequence
from typing import TypeVar

from bo_tuner.config import TrainConfig
from bo_tuner.samplers.base import CandidateSampler
from bo_tuner.samplers.heuristics.layouts import plainness
from bo_tuner.trial import TrialRecord

__all__ = ["Rule", "RuleSampler", "rates_of"]

Found = TypeVar("Found")
Rule = Generator[TrainConfig, float | None, Found]
"""Yields the config it wants to run, and is sent its samples/s; None where it did not run, for whatever reason."""


def rates_of(records: Iterable[TrialRecord]) -> dict[TrainConfig, float | None]:
    """Samples/s of every config that was tried: as measured, or the bound of one that was ended for being slow; None where steps
    did not run."""
    return {record.config: _rate(record) for record in records}


def _rate(record: TrialRecord) -> float | None:
    if record.result is None or not record.has_run:
        return None
    return record.samples_per_s or record.bound_samples_per_s or 0.0


class RuleSampler(CandidateSampler):
    """Base of searches whose next step follows from how the ones before ended.

    For every choice the rule starts anew and is told what ran already, so that it needs no memory of its own. What it asks for and may
    not have, since a smaller micro-batch proved that it does not fit or its step is too long to wait for, did not run. Once
    the rule has nothing more to ask for, the other candidates follow, the plainest first.
    """

    @abstractmethod
    def rule(self) -> Rule[None]:
        """The search from its first trial on; it may ask for a config again, and gets the same answer."""

    def choose(self, records: Sequence[TrialRecord], candidates: Sequence[TrainConfig]) -> TrainConfig:
        """The first config that the rule asks for and that is still open."""
        rates, is_open = rates_of(records), set(candidates)
        rule = self.rule()
        try:
            config = next(rule)
            while config not in is_open:
                config = rule.send(rates.get(config))
        except StopIteration:
            return min(candidates, key=plainness)
        return config
