"""Optuna distributions of a new trial, beside those of a study's earlier trials, which an older version may have begun."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from sqlalchemy.engine import Connection

    from bo_tuner.storage.patience import PatientStorage

__all__ = ["joined_distributions"]

_STORED = """
SELECT DISTINCT param_name, distribution_json FROM trial_params
WHERE trial_id IN (SELECT trial_id FROM trials WHERE study_id = :study_id)
"""
_REWRITE = """
UPDATE trial_params SET distribution_json = :distribution
WHERE param_name = :name AND trial_id IN (SELECT trial_id FROM trials WHERE study_id = :study_id)
"""


def joined_distributions(
    storage: PatientStorage, study_id: int, wanted: Mapping[str, BaseDistribution]
) -> dict[str, BaseDistribution]:
    """Distributions that hold what is wanted, and that Optuna takes in this study.

    Optuna wants the same choices in all trials of a study. It keeps the index of what was chosen, so choices are added behind those that
    earlier trials have, and the earlier trials get them too.
    """

    def join() -> dict[str, BaseDistribution]:
        with storage.engine.begin() as connection:
            study = _Study(connection, study_id)
            stored = study.distributions()
            return {name: study.joined(name, stored.get(name), distribution) for name, distribution in wanted.items()}

    joined: dict[str, BaseDistribution] = storage.repeated(join)
    return joined


@dataclass(frozen=True, slots=True)
class _Study:
    connection: Connection
    study_id: int

    def distributions(self) -> dict[str, BaseDistribution]:
        from optuna.distributions import json_to_distribution
        from sqlalchemy import text

        rows = self.connection.execute(text(_STORED), {"study_id": self.study_id})
        return {name: json_to_distribution(found) for name, found in rows}

    def joined(self, name: str, stored: BaseDistribution | None, wanted: BaseDistribution) -> BaseDistribution:
        from optuna.distributions import (
            CategoricalDistribution,
            FloatDistribution,
            IntDistribution,
            distribution_to_json,
        )
        from sqlalchemy import text

        if isinstance(stored, IntDistribution) and isinstance(wanted, IntDistribution):
            return IntDistribution(wanted.low, wanted.high, log=stored.log)
        if isinstance(stored, FloatDistribution) and isinstance(wanted, FloatDistribution):
            return FloatDistribution(wanted.low, wanted.high, log=stored.log)
        if not isinstance(stored, CategoricalDistribution) or not isinstance(wanted, CategoricalDistribution):
            return wanted
        added: list[Any] = [choice for choice in wanted.choices if choice not in stored.choices]
        if not added:
            return stored
        joined = CategoricalDistribution((*stored.choices, *added))
        self.connection.execute(
            text(_REWRITE), {"distribution": distribution_to_json(joined), "name": name, "study_id": self.study_id}
        )
        return joined
