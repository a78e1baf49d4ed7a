"""Studies that other versions of bo_tuner wrote, and damaged ones: they are read, told by name, and never hide the others.

`fixtures/studies_0.1.0.sql` is what four commands of version 0.1.0 left: `tune bert-tiny` on two CPU ranks (`real`, and `interrupted` by a
kill), a simulation with a dimension of the user's, and a replay; without the figures for the dashboard.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from optuna.distributions import CategoricalDistribution, IntDistribution
from optuna.storages import RDBStorage
from typer.testing import CliRunner

from bo_tuner import tune
from bo_tuner.cli.main import app
from bo_tuner.config import TrainConfig
from bo_tuner.engine import StopReason
from bo_tuner.errors import StudyMismatchError, UnreadableStudyError
from bo_tuner.outcome import Measurement, Outcome, TrialResult
from bo_tuner.report import SilentProgress
from bo_tuner.space import distributions
from bo_tuner.storage import Location, Manifest, StudyStore

DUMP = Path(__file__).parent / "fixtures" / "studies_0.1.0.sql"
N_TRIALS = {"simulated": 4, "real": 3, "interrupted": 2, "replayed": 6}


@pytest.fixture
def old_url(tmp_path: Path) -> str:
    """A database of version 0.1.0 with four studies."""
    with sqlite3.connect(tmp_path / "old.db") as database:
        database.executescript(DUMP.read_text(encoding="utf-8"))
    database.close()
    return f"sqlite:///{tmp_path}/old.db"


@pytest.fixture
def old(old_url: str, open_location: Callable[[str], Location]) -> Location:
    return open_location(old_url)


@pytest.fixture
def database(old_url: str) -> Iterator[sqlite3.Connection]:
    """To damage it by hand."""
    connection = sqlite3.connect(old_url.removeprefix("sqlite:///"))
    yield connection
    connection.close()


@pytest.fixture
def run(old_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Run a command on the old database; its output."""
    monkeypatch.chdir(tmp_path)

    def command(*arguments: str) -> str:
        ended = CliRunner().invoke(app, [*arguments, "--storage", old_url])
        assert ended.exit_code == 0, ended.output
        return ended.stdout

    return command


# -- of a released version -----------------------------------------------------------------------------------------


def test_old_studies_are_listed_shown_and_exported(run: Callable[..., str]) -> None:
    listed: dict[str, Any] = json.loads(run("list", "--json"))
    assert {row["study"]: row["trials"] for row in listed["studies"]} == N_TRIALS
    for name, n_trials in N_TRIALS.items():
        shown: dict[str, Any] = json.loads(run("show", name, "--json"))
        assert len(shown["trials"]) == n_trials
        assert name in run("show", name)
    assert json.loads(run("export", "real"))["train_micro_batch_size_per_gpu"] >= 1
    assert json.loads(run("export", "simulated"))["zero_optimization"]["reduce_bucket_size"] in (200000000, 500000000)


def test_an_old_study_is_gone_on_with(old_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = tune(
        "gpt2",
        simulate=True,
        cluster="2x2xV100-16GB",
        dimensions=["bucket=200000000,500000000:zero_optimization.reduce_bucket_size"],
        study="simulated",
        storage=old_url,
        budget="6 trials",
        min_gain=0,
        progress=SilentProgress(),
    )
    assert result.stop_reason is StopReason.BUDGET
    assert [record.number for record in result.trials] == list(range(6))


def test_an_interrupted_old_trial_is_run_again_and_told(old: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bo_tuner.storage.holder.LAPSES_AFTER_S", 0.1)
    store = StudyStore(old, "interrupted")
    done = store.records()[0].result
    assert done is not None
    with store.drive(n_ranks=2):
        [unfinished] = store.settle()
        store.finish(unfinished, done)
        manifest = store.manifest()
        assert manifest is not None
        store.begin(unfinished.config, distributions([unfinished.config]))
    assert [record.result for record in store.records()] == [done, done, None]


def test_old_rows_are_the_same_on_another_server(
    old: Location, location: Location, open_location: Callable[[str], Location]
) -> None:
    copy_rows(old.open(), location.open())
    for name in N_TRIALS:
        there, here = StudyStore(location, name), StudyStore(old, name)
        assert there.records() == here.records()
        assert there.manifest() == here.manifest()


def copy_rows(source: RDBStorage, target: RDBStorage) -> None:
    """All rows of Optuna's tables."""
    from optuna.storages._rdb.models import BaseModel

    with source.engine.connect() as read, target.engine.begin() as write:
        for table in BaseModel.metadata.sorted_tables:
            rows = [dict(row) for row in read.execute(table.select()).mappings()]
            if rows and table.name not in ("version_info", "alembic_version"):
                write.execute(table.insert(), rows)


# -- with fewer fields than today, or other choices ----------------------------------------------------------------


def test_a_trial_that_lacks_a_field_ran_with_its_default(old: Location, database: sqlite3.Connection) -> None:
    before = StudyStore(old, "real").records()
    database.execute("DELETE FROM trial_params WHERE param_name IN ('offload', 'pipeline_schedule', 'tensor_parallel')")
    database.commit()
    assert StudyStore(old, "real").records() == before


def test_a_result_that_lacks_all_fields_but_the_first_is_read() -> None:
    assert TrialResult.from_dict({"outcome": "oom"}) == TrialResult(outcome=Outcome.OOM)


@pytest.fixture
def store(location: Location, manifest: Manifest) -> StudyStore:
    store = StudyStore(location, "mine")
    store.create(manifest)
    return store


def test_new_fields_and_choices_are_begun_beside_trials_that_lack_them(store: StudyStore) -> None:
    config = TrainConfig(micro_batch_size=2, recompute=True)
    space = distributions([config])
    lacking = {name: distribution for name, distribution in space.items() if name != "tensor_parallel"}
    small = {**lacking, "offload": CategoricalDistribution(("optimizer", "none"))}
    storage = store.location.open()
    first = replace_params(config, small)
    storage.create_new_trial(store.id, template_trial=first)
    grown = {**space, "micro_batch_size": IntDistribution(1, 4096), "tensor_parallel": IntDistribution(1, 2)}
    records = [
        store.begin(wanted, grown) for wanted in (replace(config, offload="all"), replace(config, tensor_parallel=2))
    ]
    assert [record.config for record in store.records()] == [config, *(record.config for record in records)]
    choices = {trial.distributions["offload"] for trial in StudyStore(store.location, "mine").study.trials}
    assert choices == {CategoricalDistribution(("optimizer", "none", "all"))}


def replace_params(config: TrainConfig, space: dict[str, Any]) -> Any:
    """A running trial of a version that had only the fields of `space`."""
    from optuna.trial import TrialState, create_trial

    params = {name: value for name, value in config.params().items() if name in space}
    return create_trial(state=TrialState.RUNNING, params=params, distributions=space)


# -- with more fields than today, or damaged -----------------------------------------------------------------------


def change(database: sqlite3.Connection, study: str, key: str, change_text: Callable[[str], str], number: int) -> None:
    """Rewrite an attribute of a trial."""
    query = (
        "SELECT trial_user_attribute_id, value_json FROM trial_user_attributes JOIN trials USING (trial_id) "
        "JOIN studies USING (study_id) WHERE study_name = ? AND number = ? AND key = ?"
    )
    [(identity, text)] = database.execute(query, (study, number, key)).fetchall()
    database.execute(
        "UPDATE trial_user_attributes SET value_json = ? WHERE trial_user_attribute_id = ?",
        (change_text(text), identity),
    )
    database.commit()


def with_field(text: str) -> str:
    data: dict[str, Any] = json.loads(text)
    data["field_of_the_future"] = {"a": 1}
    data["measurement"]["another"] = 2.0
    return json.dumps(data)


def test_fields_of_a_newer_version_are_left_out(old: Location, database: sqlite3.Connection) -> None:
    before = StudyStore(old, "real").records()
    change(database, "real", "result", with_field, 1)
    assert StudyStore(old, "real").records() == before
    assert before[1].result is not None
    assert before[1].result.measurement is not None
    assert Measurement.from_dict({**before[1].result.measurement.to_dict(), "x": 1}) == before[1].result.measurement


def test_a_study_of_a_newer_version_is_shown_and_not_gone_on_with(manifest: Manifest) -> None:
    stored: dict[str, Any] = json.loads(json.dumps(manifest.to_dict()))
    stored["workload"]["curriculum"] = "long first"
    stored["shape"] = 1
    read = Manifest.from_dict(stored)
    assert read == manifest
    with pytest.raises(StudyMismatchError, match=r"a newer bo_tuner .*\(workload curriculum, shape\): upgrade"):
        read.check_same(manifest, study_name="mine")


@pytest.mark.parametrize(
    ("change_text", "told"),
    [
        (lambda text: text[: len(text) // 2], "Unterminated|Expecting|Invalid"),
        (lambda text: text.replace('"complete"', '"evaporated"'), "'evaporated' is not a valid Outcome"),
        (lambda text: "[1, 2]", "list"),
        (lambda text: text.replace('"global_batch"', '"batch"'), "global_batch"),
    ],
    ids=["truncated", "unknown outcome", "another type", "missing field"],
)
def test_a_trial_that_cannot_be_read_is_named_and_other_studies_are_still_listed(
    change_text: Callable[[str], str],
    told: str,
    old: Location,
    database: sqlite3.Connection,
    run: Callable[..., str],
) -> None:
    change(database, "real", "result", change_text, 1)
    with pytest.raises(UnreadableStudyError, match=told) as caught:
        StudyStore(old, "real").records()
    assert str(caught.value).startswith("study 'real': trial 1 cannot be read (")
    assert len(str(caught.value).splitlines()) == 1
    listed: dict[str, Any] = json.loads(run("list", "--json"))
    assert {row["study"]: row.get("trials") for row in listed["studies"]} == {**N_TRIALS, "real": None}
    [row] = [row for row in listed["studies"] if row["study"] == "real"]
    assert row["unreadable"] == str(caught.value)
    assert "unreadable: study 'real': trial 1" in run("list")


@pytest.mark.parametrize("text", ["{", '{"schema_version": 2}', '{"schema_version": 1}', "[]"])
def test_a_manifest_that_cannot_be_read_names_its_study_and_hides_no_other(
    text: str, old: Location, database: sqlite3.Connection, run: Callable[..., str]
) -> None:
    database.execute(
        "UPDATE study_user_attributes SET value_json = ? WHERE key = 'manifest' AND study_id = "
        "(SELECT study_id FROM studies WHERE study_name = 'real')",
        (text,),
    )
    database.commit()
    with pytest.raises(UnreadableStudyError, match="study 'real'"):
        StudyStore(old, "real").manifest()
    listed: dict[str, Any] = json.loads(run("list", "--json"))
    assert {row["study"]: row.get("trials") for row in listed["studies"]} == {**N_TRIALS, "real": None}


def test_a_calibration_in_another_form_is_made_again(old: Location) -> None:
    store = StudyStore(old, "real")
    assert store.calibration() is not None
    store.study.set_user_attr("calibration", {"matmul": 3})
    store.study.set_user_attr("profile", {"layers": 3})
    assert store.calibration() is None
    assert store.profile() is None
