"""What earlier studies of a storage showed of the devices that a new one is to run on."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from bo_tuner.cluster import Cluster
from bo_tuner.errors import UnreadableStudyError
from bo_tuner.launches import Launch, NoisePrior, prior_of
from bo_tuner.origin import Origin
from bo_tuner.outcome import TrialResult
from bo_tuner.storage.location import Location, storage_answers
from bo_tuner.storage.stored_study import MANIFEST_KEY
from bo_tuner.storage.stored_trials import CHECKS_KEY
from bo_tuner.stored import must_be_readable
from bo_tuner.trial import launches_of

__all__ = ["learned_noise"]


def learned_noise(location: Location, cluster: Cluster) -> NoisePrior | None:
    """What launches on devices of this name are expected to differ by, as configs that ran again in earlier studies tell; None where none did.

    Repeats and confirmations count, and trials do not: those that were confirmed were chosen for their rate. A study that cannot be read
    tells nothing.

    Raises:
        StoreError: The storage does not answer.
    """
    kept: dict[int, dict[str, str]] = {}
    for study_id, key, value in _rows(location):
        kept.setdefault(study_id, {})[key] = value
    configs: list[list[Launch]] = []
    for attributes in kept.values():
        with contextlib.suppress(UnreadableStudyError), must_be_readable("an earlier study"):
            read = {key: json.loads(value) for key, value in attributes.items()}
            if _is_of(read.pop(MANIFEST_KEY), cluster):
                configs += [_launches(checks) for checks in read.values()]
    again = [launches for launches in configs if len(launches) > 1]
    return prior_of(cluster.device).after(again) if again else None


def _rows(location: Location) -> list[tuple[int, str, str]]:
    if not location.holds_anything:
        return []
    from sqlalchemy import text

    storage = location.open()
    query = "SELECT study_id, key, value_json FROM study_user_attributes WHERE key = :manifest OR key LIKE :checks ORDER BY study_id"
    with storage_answers(location.shown_url), storage.engine.connect() as connection:
        found = connection.execute(text(query), {"manifest": MANIFEST_KEY, "checks": f"{CHECKS_KEY}%"})
        return [(study_id, key, value) for study_id, key, value in found]


def _is_of(manifest: Mapping[str, Any], cluster: Cluster) -> bool:
    ran_on = manifest["cluster"]
    is_real = Origin.from_dict(manifest.get("origin", {})).is_real
    return is_real and (ran_on["device"], ran_on["device_name"]) == (cluster.device, cluster.device_name)


def _launches(checks: Mapping[str, Any]) -> list[Launch]:
    runs = [*checks.get("repeats", []), *checks.get("confirmations", [])]
    return launches_of(TrialResult.from_dict(run) for run in runs)
