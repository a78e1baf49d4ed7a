"""A study that is killed at any moment and started again is the study that was never killed."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from optuna.trial import TrialState

from bo_tuner.storage import Location, StudyStore

if TYPE_CHECKING:
    from tests.storage.conftest import SmallDisk

DRIVER = Path(__file__).with_name("crash_driver.py")
N_TRIALS = 16
N_KILLS = 20
N_SHORT = 5
"""Trials of the studies that are killed at one point only; the third is one that is tried twice."""
N_TRANSACTIONS = 14
"""More than a trial has that write."""
_LONGEST_RUN_S = 400.0


def start(folder: Path, journal: Path, *options: str | int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(folder, journal, *options), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def command(folder: Path, journal: Path, *options: str | int) -> list[str]:
    return [sys.executable, str(DRIVER), str(folder), str(journal), "--sampler", "tpe", *map(str, options)]


def run(folder: Path, journal: Path, *options: str | int) -> list[dict[str, Any]]:
    """One run to its end; returns what it said."""
    ended = start(folder, journal, *options)
    stdout, stderr = ended.communicate(timeout=_LONGEST_RUN_S)
    assert (ended.returncode, stderr) == (0, "")
    return [json.loads(line) for line in stdout.splitlines()]


def found_after_death(said: list[dict[str, Any]]) -> dict[str, Any]:
    """What the last run found, all runs before it having died as planned."""
    assert {facts["died"] for facts in said if "died" in facts} == {True}
    found: dict[str, Any] = [facts for facts in said if "done" in facts][-1]
    return found


def calls(journal: Path) -> list[str]:
    """Names of the configs that the objective was called with, in order."""
    return journal.read_text(encoding="ascii").splitlines() if journal.exists() else []


def trials(folder: Path) -> list[dict[str, Any]]:
    """All that the database says of every trial, but for dates."""
    location = Location(folder=folder)
    storage = location.open()
    found = storage.get_all_trials(storage.get_study_id_from_name("mine"))
    storage.engine.dispose()
    return [
        {
            "number": trial.number,
            "state": trial.state,
            "value": trial.value,
            "params": trial.params,
            "user_attrs": trial.user_attrs,
            "system_attrs": trial.system_attrs,
        }
        for trial in found
    ]


def names(found: list[dict[str, Any]]) -> list[str]:
    return [trial["user_attrs"]["name"] for trial in found]


@dataclass(frozen=True)
class Reference:
    """The study as it is when nobody kills it."""

    trials: list[dict[str, Any]]
    calls: list[str]
    trial_s: float

    def calls_of_first(self, n_trials: int) -> list[str]:
        wanted = set(names(self.trials[:n_trials]))
        return [name for name in self.calls if name in wanted]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder = tmp_path_factory.mktemp("reference") / "studies"
    journal = folder.parent / "journal"
    seconds: float = run(folder, journal, "--budget", N_TRIALS)[-1]["seconds"]
    return Reference(trials(folder), calls(journal), seconds / N_TRIALS)


def test_the_uninterrupted_study_has_every_kind_of_trial(reference: Reference) -> None:
    """Otherwise the tests below would show less than they say."""
    outcomes = [trial["user_attrs"]["outcome"] for trial in reference.trials]
    assert len(outcomes) == N_TRIALS
    assert set(outcomes) == {"complete", "oom", "failed"}
    assert "failed" in outcomes[:N_SHORT]
    assert len(reference.calls) == N_TRIALS + outcomes.count("failed")


def test_a_study_killed_at_twenty_random_moments_is_the_uninterrupted_one(tmp_path: Path, reference: Reference) -> None:
    folder, journal = tmp_path / "studies", tmp_path / "journal"
    moments = random.Random(20)
    spent = [0.0]
    n_hits: Counter[str] = Counter()
    calls_when_done: dict[str, int] = {}

    for _ in range(N_KILLS):
        with start(folder, journal, "--budget", N_TRIALS) as process:
            assert process.stdout is not None
            found = json.loads(process.stdout.readline())
            called = calls(journal)
            note_found(found, spent, n_hits, calls_when_done, called)
            assert json.loads(process.stdout.readline()) == {"driving": True}
            wait_for_calls(journal, len(called) + moments.choice((0, 0, 1, 2)))
            time.sleep(moments.uniform(0.0, 0.5 * reference.trial_s))
            process.kill()
        assert process.returncode == -signal.SIGKILL
    found, *_, ended = run(folder, journal, "--budget", N_TRIALS)
    note_found(found, spent, n_hits, calls_when_done, calls(journal)[: sum(calls_when_done.values())])
    assert ended["stopped"] == "BUDGET"

    stored = trials(folder)
    assert [trial["number"] for trial in stored] == list(range(N_TRIALS))
    assert len(set(names(stored))) == N_TRIALS
    assert all("result" in trial["user_attrs"] for trial in stored)
    assert all(trial["state"].is_finished() for trial in stored)
    assert stored == reference.trials
    launched = Counter(calls(journal))
    for name, n_usual in Counter(reference.calls).items():
        assert n_usual <= launched[name] <= n_usual + n_hits[name]
    assert set(launched) == set(names(stored))
    assert {name: launched[name] for name in calls_when_done} == calls_when_done
    assert spent == sorted(spent)
    assert spent[-1] > 0
    assert n_hits.total() > 0, "no kill hit a running trial: the moments are chosen badly"


def wait_for_calls(journal: Path, n_calls: int) -> None:
    """Wait until the objective was called `n_calls` times: at the second call of a run its first trial is done, however slow."""
    ends = time.monotonic() + _LONGEST_RUN_S
    while len(calls(journal)) < n_calls:
        assert time.monotonic() < ends
        time.sleep(0.001)


def note_found(
    found: dict[str, Any],
    spent: list[float],
    n_hits: Counter[str],
    calls_when_done: dict[str, int],
    called: list[str],
) -> None:
    """Take down what a run found before it went on: the state that the kill before it left."""
    spent.append(found["spent"])
    n_hits.update(found["running"])
    for name in found["done"]:
        calls_when_done.setdefault(name, called.count(name))


@pytest.mark.parametrize(
    ("death", "n_done", "n_running"),
    [
        pytest.param("after-begin:3", 2, 1, id="a trial was begun"),
        pytest.param("after-attempt:1", 2, 1, id="a try that taught nothing was kept"),
        pytest.param("after-result:3", 3, 0, id="a result was written"),
        pytest.param("after-outcome:3", 3, 0, id="some of what Optuna is told was written"),
        pytest.param("between-constraints:3", 3, 0, id="one form of the constraint was written"),
        pytest.param("before-tell:3", 3, 0, id="all but the state was written"),
        pytest.param("after-tell:3", 3, 0, id="Optuna was told"),
    ],
)
def test_nothing_is_lost_or_doubled_by_a_kill_after(
    death: str, n_done: int, n_running: int, tmp_path: Path, reference: Reference
) -> None:
    folder, journal = tmp_path / "studies", tmp_path / "journal"
    found = found_after_death(run(folder, journal, "--budget", N_SHORT, "--die-at", death))
    assert (len(found["done"]), len(found["running"])) == (n_done, n_running)
    assert trials(folder) == reference.trials[:N_SHORT]
    assert calls(journal) == reference.calls_of_first(N_SHORT)


def test_a_study_killed_in_every_transaction_of_a_trial_is_the_uninterrupted_one(
    tmp_path: Path, reference: Reference
) -> None:
    folder, journal = tmp_path / "studies", tmp_path / "journal"
    deaths = [f"in-transaction:{nth}" for nth in range(1, N_TRANSACTIONS + 1)]
    said = run(folder, journal, "--budget", N_TRIALS, "--die-at", *deaths)
    found_after_death(said)
    assert trials(folder) == reference.trials
    again = Counter(calls(journal)) - Counter(reference.calls)
    n_hits = sum(len(facts["running"]) for facts in said if "running" in facts)
    assert 0 < again.total() <= n_hits


def test_a_study_killed_before_its_manifest_was_written_is_completed(tmp_path: Path, reference: Reference) -> None:
    folder, journal = tmp_path / "studies", tmp_path / "journal"
    found = found_after_death(run(folder, journal, "--budget", N_SHORT, "--die-at", "after-study:1"))
    assert found["study"] == "half"
    location = Location(folder=folder)
    manifest = StudyStore(location, "mine").manifest()
    location.open().engine.dispose()
    assert manifest is not None
    assert manifest.workload.model.name == "toy"
    assert trials(folder) == reference.trials[:N_SHORT]


def test_a_larger_budget_on_a_finished_study_goes_on_with_it(tmp_path: Path, reference: Reference) -> None:
    folder, journal = tmp_path / "studies", tmp_path / "journal"
    run(folder, journal, "--budget", 2)
    assert trials(folder) == reference.trials[:2]
    run(folder, journal, "--budget", N_SHORT)
    assert trials(folder) == reference.trials[:N_SHORT]
    assert calls(journal) == reference.calls_of_first(N_SHORT)


def test_a_disk_that_fills_up_is_told_in_one_line_and_with_room_the_same_command_goes_on(
    small_disk: SmallDisk, tmp_path: Path, reference: Reference
) -> None:
    folder, journal = small_disk.path / "studies", tmp_path / "journal"
    same_command = command(folder, journal, "--budget", N_SHORT, "--fill-disk-at", 3)
    for n_calls in (3, 3):  # the second time it is full from the start
        full = small_disk.run(*same_command)
        assert full.returncode == 1
        assert full.stderr.startswith("StoreError: the storage sqlite:///")
        assert "full" in full.stderr
        assert "run the same command again" in full.stderr
        assert len(full.stderr.splitlines()) == 1
        assert len(calls(journal)) == n_calls
    small_disk.run("rm", str(folder / "ballast"))
    ended = small_disk.run(*same_command)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert json.loads(ended.stdout.splitlines()[0])["done"] == names(reference.trials[:2])

    copy = tmp_path / "copy"
    copy.mkdir()
    small_disk.run("cp", str(folder / "studies.db"), str(copy))
    stored = trials(copy)
    shutil.rmtree(copy)
    assert stored == reference.trials[:N_SHORT]
    assert all(trial["state"] is not TrialState.RUNNING for trial in stored)
    again = Counter(calls(journal)) - Counter(reference.calls_of_first(N_SHORT))
    assert again == Counter(names(reference.trials[2:3]))
