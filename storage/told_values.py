"""Optuna's own values of trials that are over, brought to what the study tells of their configs.

Optuna takes no values after `tell`, and a confirmation comes later. So they are changed where they lie, in its tables: `study.best_trial` and the
dashboard then name the same config with the same figure as everything else. A trial that is not taken for the best, though its figure is
higher, or whose confirmation failed, gets a constraint over 0, which `best_trial` heeds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from bo_tuner.trial import TrialRecord, best_of

if TYPE_CHECKING:
    from optuna.storages import RDBStorage

__all__ = ["STANDING", "keep_told_values"]

STANDING = "constraints:standing"
"""Name of the constraint, as Optuna 5 reads it."""


def keep_told_values(storage: RDBStorage, study_id: int, records: Sequence[TrialRecord]) -> None:
    """Write what `records` tell, where Optuna has something else."""
    from optuna.storages._rdb.models import TrialModel, TrialSystemAttributeModel, TrialValueModel
    from optuna.trial import TrialState
    from sqlalchemy.orm import Session

    best = best_of(records)
    told = {record.number: record for record in records if record.samples_per_s is not None}
    with Session(storage.engine) as session, session.begin():
        trials = session.query(TrialModel).filter(TrialModel.study_id == study_id)
        for trial in trials.filter(TrialModel.state == TrialState.COMPLETE).all():
            record = told.get(cast("int", trial.number))
            values = record.goal.values(record) if record is not None else None
            if record is None or values is None:
                continue
            for place, value in enumerate(values):
                stored = TrialValueModel.find_by_trial_and_objective(trial, place, session)
                if stored is not None and stored.value != value:
                    stored.value = value
            stands = json.dumps(0.0 if _stands(record, best) else 1.0)
            kept = TrialSystemAttributeModel.find_by_trial_and_key(trial, STANDING, session)
            if kept is not None:
                kept.value_json = stands
            elif not _stands(record, best):
                session.add(TrialSystemAttributeModel(trial_id=trial.trial_id, key=STANDING, value_json=stands))


def _stands(record: TrialRecord, best: TrialRecord | None) -> bool:
    """Nothing speaks against Optuna's taking it for the best, if its value is."""
    score, most = record.goal.score(record), best.goal.score(best) if best is not None else None
    is_ahead = score is not None and most is not None and score >= most
    return record.standing is not None and (not is_ahead or (best is not None and record.number == best.number))
