"""`Fork`: the study that another one was forked from, and what it begins with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bo_tuner.config import TrainConfig
from bo_tuner.trial import TrialRecord, ranked

__all__ = ["Fork"]

_N_FIRST = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """What a study takes from one of other code: configs to begin with, and nothing that was measured, since none of it need hold."""

    study: str
    """The one of old."""
    first: tuple[TrainConfig, ...]
    """Its best, as it stood when the new one began: they run first."""

    @classmethod
    def of(cls, study: str, records: Sequence[TrialRecord]) -> Fork:
        """From a study's trials."""
        return cls(study=study, first=tuple(record.config for record in ranked(records)[:_N_FIRST]))

    def to_dict(self) -> dict[str, Any]:
        """Plain data that JSON can hold."""
        return {"study": self.study, "first": [config.params() for config in self.first]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Fork:
        """The inverse of `to_dict`."""
        return cls(study=data["study"], first=tuple(TrainConfig.from_params(params) for params in data["first"]))

    def __str__(self) -> str:
        first = f": first its best, {', '.join(config.name for config in self.first)}" if self.first else ""
        return f"forked from study {self.study}{first}"
