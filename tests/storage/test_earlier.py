"""What earlier studies of a storage teach a new one of the noise of launches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from optuna.distributions import CategoricalDistribution

from bo_tuner.config import TrainConfig
from bo_tuner.launches import NoisePrior, prior_of
from bo_tuner.origin import Origin
from bo_tuner.outcome import TrialResult
from bo_tuner.storage import Location, Manifest, StudyStore, learned_noise
from bo_tuner.trial import launch_noise

CONFIG = TrainConfig()
SPACE = {name: CategoricalDistribution([value]) for name, value in CONFIG.params().items()}
CPU = prior_of("cpu")


@pytest.fixture
def location(tmp_path: Path) -> Location:
    return Location(folder=tmp_path)


def of(complete: TrialResult, log_step: float) -> TrialResult:
    assert complete.measurement is not None
    step_s = math.exp(log_step)
    times = ((step_s * 0.999, step_s, step_s * 1.001) * 3,) * 2
    return replace(complete, measurement=replace(complete.measurement, step_times_s=times, engine_times_s=times))


def study(
    location: Location, name: str, manifest: Manifest, runs: Sequence[TrialResult], *, n_repeats: int = 3
) -> StudyStore:
    """One trial, and further launches of its config."""
    store = StudyStore(location, name)
    store.create(manifest)
    record = store.begin(CONFIG, SPACE)
    store.finish(record, runs[0])
    for place, run in enumerate(runs[1:]):
        record = store.add_repeat(record, run) if place < n_repeats else store.confirm(record, run)
    return store


def alternating(complete: TrialResult, sd: float, n: int) -> list[TrialResult]:
    return [of(complete, sd if place % 2 else -sd) for place in range(n)]


def test_a_new_study_expects_the_noise_of_earlier_ones_on_the_same_devices(
    location: Location, manifest: Manifest, complete: TrialResult
) -> None:
    assert learned_noise(location, manifest.cluster) is None
    study(location, "quiet", manifest, alternating(complete, 0.005, 6))
    one = learned_noise(location, manifest.cluster)
    study(location, "quiet too", manifest, alternating(complete, 0.005, 6))
    two = learned_noise(location, manifest.cluster)
    assert one is not None and two is not None
    assert two.sd < one.sd < CPU.sd and two.spread < CPU.spread
    noise = study(location, "new", replace(manifest, noise=two), alternating(complete, 0.005, 1)).records()[0].noise
    assert noise is not None and noise.half_width == two.given([]).half_width < CPU.given([]).half_width


def test_other_devices_simulations_and_studies_that_cannot_be_read_teach_nothing(
    location: Location, manifest: Manifest, complete: TrialResult
) -> None:
    runs = alternating(complete, 0.005, 6)
    study(location, "elsewhere", replace(manifest, cluster=replace(manifest.cluster, device_name="another")), runs)
    study(location, "simulated", replace(manifest, origin=Origin(kind="simulation")), runs)
    study(location, "trial alone", manifest, runs[:2])
    broken = study(location, "broken", manifest, runs)
    location.open().set_study_user_attr(broken.id, "checks:0", {"repeats": [{"outcome": "no such"}]})
    location.open().create_new_study([], "of plain optuna")
    assert learned_noise(location, manifest.cluster) is None
    study(location, "readable", manifest, runs)
    assert learned_noise(location, manifest.cluster) is not None


def test_a_study_goes_on_with_what_it_began_with(location: Location, manifest: Manifest, complete: TrialResult) -> None:
    expected = NoisePrior(sd=0.01, spread=0.5)
    study(location, "mine", replace(manifest, noise=expected), alternating(complete, 0.01, 4))
    study(location, "later", manifest, alternating(complete, 0.3, 8))
    resumed = StudyStore(location, "mine")
    stored = resumed.manifest()
    assert stored is not None and stored.noise == expected
    assert resumed.records()[0].noise == launch_noise(resumed.records(), expected)
