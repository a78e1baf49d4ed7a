"""`StudyStore` on SQLite and on PostgreSQL: what a study keeps, and what Optuna and its dashboard see of it."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import replace

import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState

from bo_tuner.cluster import Cluster
from bo_tuner.config import TrainConfig
from bo_tuner.errors import StoreError, StudyMismatchError
from bo_tuner.hardware import hardware_of
from bo_tuner.outcome import Outcome, TrialResult
from bo_tuner.space import distributions
from bo_tuner.storage import Location, Manifest, StudyStore, best_note, study_names
from bo_tuner.trial import TrialRecord, best_of
from tests.models.gpt import GPT

CONFIGS = [TrainConfig(zero_stage=1, micro_batch_size=size, extra=(("fused", True),)) for size in (1, 2, 4, 8)]
SPACE = distributions(CONFIGS)


@pytest.fixture
def store(location: Location, manifest: Manifest) -> StudyStore:
    store = StudyStore(location, "mine")
    store.create(manifest)
    return store


@pytest.fixture
def plain(store: StudyStore) -> Callable[[], list[FrozenTrial]]:
    """The trials as Optuna alone reads them from the database, without what the store's study has cached."""
    storage = store.location.open()
    return lambda: storage.get_all_trials(storage.get_study_id_from_name("mine"))


# -- what it is ----------------------------------------------------------------------------------------------------


def test_a_new_study_holds_its_manifest_and_no_trials(store: StudyStore, manifest: Manifest) -> None:
    assert store.manifest() == manifest
    assert store.records() == []
    assert store.study.direction is optuna.study.StudyDirection.MAXIMIZE
    assert store.spent().to_dict() == {"trials": 0, "seconds": 0.0, "gpu_h": 0.0}
    assert store.last_stop() == {}


def test_of_two_that_create_a_study_the_first_manifest_holds(store: StudyStore, manifest: Manifest) -> None:
    again = StudyStore(store.location, "mine")
    assert again.create(replace(manifest, seed=manifest.seed + 1)) == manifest
    with pytest.raises(StudyMismatchError, match="seq_len"):
        again.create(replace(manifest, workload=replace(manifest.workload, seq_len=manifest.workload.seq_len - 1)))
    assert store.manifest() == manifest


def test_a_study_that_runs_shows_its_budget_and_no_reason_to_have_stopped(store: StudyStore) -> None:
    store.note_stop("2 trials", "the budget is used up")
    with store.drive(n_ranks=2, budget="40 trials"):
        assert store.last_stop() == {"budget": "40 trials", "reason": ""}


def test_how_fast_the_machine_was_measured_to_be_is_kept_with_the_study(
    store: StudyStore, manifest: Manifest, storage_url: str, open_location: Callable[[str], Location]
) -> None:
    assert store.calibration() is None
    slow, fast = (hardware_of(Cluster.described(name), "fp16") for name in ("T4", "H100"))
    store.note_calibration(slow)
    store.note_calibration(fast)
    other = StudyStore.existing(open_location(storage_url), "mine")
    assert other.calibration() == fast
    assert other.create(manifest) == manifest, "it is never compared"


def test_what_a_model_costs_or_why_nobody_knows_is_kept_with_the_study(
    store: StudyStore, manifest: Manifest, storage_url: str, open_location: Callable[[str], Location]
) -> None:
    assert store.profile() is None
    store.note_profile("it cannot be traced")
    assert store.profile() == "it cannot be traced"
    store.note_profile(GPT)
    other = StudyStore.existing(open_location(storage_url), "mine")
    assert other.profile() == GPT
    assert other.create(manifest) == manifest, "it is never compared"


def test_a_config_that_ran_twice_counts_once(store: StudyStore) -> None:
    for _ in range(2):
        store.finish(store.begin(CONFIGS[0], SPACE), TrialResult(outcome=Outcome.GUARDED, limit_bytes=1))
    assert len(store.records()) == 2
    assert store.spent().trials == 1


def test_another_process_reads_the_same(
    store: StudyStore, manifest: Manifest, storage_url: str, open_location: Callable[[str], Location]
) -> None:
    begun = store.begin(CONFIGS[0], SPACE)
    other = StudyStore.existing(open_location(storage_url), "mine")
    assert other.manifest() == manifest
    assert other.records() == [begun]


def test_a_study_that_is_not_there_has_no_manifest(location: Location) -> None:
    assert StudyStore(location, "mine").manifest() is None


def test_a_study_without_a_manifest_is_completed(location: Location, manifest: Manifest) -> None:
    optuna.create_study(study_name="mine", storage=location.open(), direction="maximize")
    store = StudyStore(location, "mine")
    assert store.manifest() is None
    store.create(manifest)
    assert store.manifest() == manifest
    assert study_names(location) == ["mine"]


def test_a_study_of_plain_optuna_is_refused(location: Location) -> None:
    study = optuna.create_study(study_name="theirs", storage=location.open(), direction="maximize")
    study.ask()
    with pytest.raises(StoreError, match="study 'theirs' was not made by bo_tuner; choose another name with --study"):
        StudyStore(location, "theirs").manifest()


def test_an_empty_study_that_minimizes_is_refused(location: Location, manifest: Manifest) -> None:
    optuna.create_study(study_name="theirs", storage=location.open(), direction="minimize")
    store = StudyStore(location, "theirs")
    with pytest.raises(StoreError, match="was not made by bo_tuner"):
        store.create(manifest)


def test_studies_are_listed_oldest_first(store: StudyStore, manifest: Manifest) -> None:
    StudyStore(store.location, "another").create(manifest)
    assert study_names(store.location) == ["mine", "another"]


def test_a_study_that_must_exist_is_found(store: StudyStore) -> None:
    assert StudyStore.existing(store.location, "mine").name == "mine"


def test_a_study_that_does_not_exist_is_told_with_the_nearest_and_all(store: StudyStore, manifest: Manifest) -> None:
    StudyStore(store.location, "another").create(manifest)
    with pytest.raises(StoreError) as caught:
        StudyStore.existing(store.location, "mime")
    assert str(caught.value) == (
        f"no study 'mime' in {store.location.shown_url} (did you mean mine?); studies there: mine, another"
    )


def test_an_empty_database_is_told_how_to_start(location: Location) -> None:
    with pytest.raises(StoreError, match="there is none yet: bo-tuner tune MODEL starts one"):
        StudyStore.existing(location, "mine")


# -- trials --------------------------------------------------------------------------------------------------------


def test_a_begun_trial_is_running_with_its_whole_config(
    store: StudyStore, plain: Callable[[], list[FrozenTrial]]
) -> None:
    record = store.begin(CONFIGS[2], SPACE)
    assert record == TrialRecord(number=0, config=CONFIGS[2])
    [trial] = plain()
    assert trial.state is TrialState.RUNNING
    assert trial.params == CONFIGS[2].params()
    assert trial.distributions == SPACE
    assert trial.user_attrs == {"name": CONFIGS[2].name}
    assert trial.datetime_start is not None


def test_a_begun_trial_appears_in_one_transaction(store: StudyStore) -> None:
    from sqlalchemy import event

    engine = store.location.open().engine
    n_writes = [0]  # of each transaction

    def on_statement(connection: object, cursor: object, statement: str, *rest: object) -> None:
        n_writes[-1] += statement.startswith(("INSERT", "UPDATE"))

    def on_commit(connection: object) -> None:
        n_writes.append(0)

    event.listen(engine, "before_cursor_execute", on_statement)
    event.listen(engine, "commit", on_commit)
    store.begin(CONFIGS[0], SPACE)
    event.remove(engine, "before_cursor_execute", on_statement)
    event.remove(engine, "commit", on_commit)
    assert n_writes[-1] == 0
    [together] = [n for n in n_writes if n > 0]
    assert together > len(SPACE)


def test_trials_are_numbered_from_zero_in_order(store: StudyStore) -> None:
    assert [store.begin(config, SPACE).number for config in CONFIGS] == [0, 1, 2, 3]
    assert [record.config for record in store.records()] == CONFIGS


def test_a_complete_trial_has_its_value_and_result(
    store: StudyStore, plain: Callable[[], list[FrozenTrial]], complete: TrialResult
) -> None:
    store.finish(store.begin(CONFIGS[0], SPACE), complete)
    [trial] = plain()
    assert trial.state is TrialState.COMPLETE
    assert trial.value == complete.samples_per_s == 40.0
    assert trial.user_attrs["outcome"] == "complete"
    assert trial.user_attrs["reason"] == ""
    assert trial.user_attrs["result"] == complete.to_dict() | {"measurement": trial.user_attrs["result"]["measurement"]}
    assert store.records() == [TrialRecord(number=0, config=CONFIGS[0], result=complete)]
    assert store.spent().trials == 1


def test_a_trial_out_of_memory_is_pruned_with_its_reason(
    store: StudyStore, plain: Callable[[], list[FrozenTrial]], out_of_memory: TrialResult
) -> None:
    store.finish(store.begin(CONFIGS[0], SPACE), out_of_memory)
    [trial] = plain()
    assert trial.state is TrialState.PRUNED
    assert trial.value is None
    assert trial.user_attrs["outcome"] == "oom"
    assert trial.user_attrs["reason"] == "rank 1 was refused 512 MiB"
    assert store.records()[0].result == out_of_memory


def test_both_forms_of_the_constraint_are_readable(
    store: StudyStore, plain: Callable[[], list[FrozenTrial]], complete: TrialResult, out_of_memory: TrialResult
) -> None:
    store.finish(store.begin(CONFIGS[0], SPACE), complete)
    store.finish(store.begin(CONFIGS[1], SPACE), out_of_memory)
    fits, does_not = plain()
    assert fits.system_attrs["constraints"] == [-0.5]
    assert does_not.system_attrs["constraints"] == [0.5]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=optuna.exceptions.ExperimentalWarning)
        assert fits.constraints["memory"] == -0.5
        assert does_not.constraints["memory"] == 0.5


@pytest.mark.parametrize(
    ("outcome", "state"),
    [
        (Outcome.PRUNED, TrialState.PRUNED),
        (Outcome.OOM, TrialState.PRUNED),
        (Outcome.GUARDED, TrialState.PRUNED),
        (Outcome.HOST_OOM, TrialState.PRUNED),
        (Outcome.REJECTED, TrialState.PRUNED),
        (Outcome.TIMEOUT, TrialState.FAIL),
        (Outcome.FAILED, TrialState.FAIL),
    ],
)
@pytest.mark.parametrize("storage_url", ["sqlite"], indirect=True)
def test_an_outcome_without_a_rate_has_a_state_and_no_value(
    outcome: Outcome, state: TrialState, store: StudyStore, plain: Callable[[], list[FrozenTrial]]
) -> None:
    store.finish(store.begin(CONFIGS[0], SPACE), TrialResult(outcome=outcome, reason="because"))
    [trial] = plain()
    assert trial.state is state
    assert trial.value is None
    assert (trial.system_attrs["constraints"][0] > 0) is outcome.is_memory


@pytest.mark.parametrize("storage_url", ["sqlite"], indirect=True)
def test_a_rate_of_a_trial_that_did_not_complete_is_no_value(
    store: StudyStore, plain: Callable[[], list[FrozenTrial]], complete: TrialResult
) -> None:
    store.finish(store.begin(CONFIGS[0], SPACE), replace(complete, outcome=Outcome.PRUNED, bound_samples_per_s=3.0))
    [trial] = plain()
    assert (trial.state, trial.value) == (TrialState.PRUNED, None)


def test_an_attempt_is_kept_and_the_trial_goes_on(
    store: StudyStore, plain: Callable[[], list[FrozenTrial]], failed: TrialResult, complete: TrialResult
) -> None:
    record = store.begin(CONFIGS[0], SPACE)
    tried = store.add_attempt(record, failed)
    assert tried == replace(record, attempts=(failed,))
    assert store.records() == [tried]
    assert [trial.state for trial in plain()] == [TrialState.RUNNING]
    twice = store.add_attempt(tried, replace(failed, wall_s=1.0))
    store.finish(twice, complete)
    [ended] = store.records()
    assert ended.attempts == (failed, replace(failed, wall_s=1.0))
    assert ended.result == complete
    assert ended.wall_s == pytest.approx(0.25 + 1.0 + 1.5)
    assert store.spent().trials == 1


def test_repeats_and_a_confirmation_are_kept_for_a_trial_that_was_told(
    store: StudyStore, complete: TrialResult, storage_url: str, open_location: Callable[[str], Location]
) -> None:
    store.finish(store.begin(CONFIGS[0], SPACE), complete)
    [record] = store.records()
    again = replace(complete, wall_s=9.0)
    record = store.add_repeat(store.add_repeat(record, complete), again)
    store.confirm(record, again)
    [read] = StudyStore.existing(open_location(storage_url), "mine").records()
    assert (read.repeats, read.confirmation) == ((complete, again), again)
    assert read.is_confirmed


def test_optuna_names_the_same_best_with_the_same_figure_as_the_study(
    store: StudyStore, storage_url: str, complete: TrialResult, open_location: Callable[[str], Location]
) -> None:
    def at(share: float) -> TrialResult:
        assert complete.measurement is not None
        times = tuple(tuple(time_s / share for time_s in row) for row in complete.measurement.step_times_s)
        return replace(complete, measurement=replace(complete.measurement, step_times_s=times))

    for config, share in zip(CONFIGS, (1.0, 0.98, 0.9, 1.5), strict=False):
        store.finish(store.begin(config, SPACE), at(share))
    lucky, back, _, failed = store.records()[:4]
    store.confirm(failed, TrialResult(outcome=Outcome.FAILED, reason="on purpose"))
    store.confirm(lucky, at(0.95))
    read = StudyStore.existing(open_location(storage_url), "mine")
    best = best_of(read.records())
    assert best is not None and best.number == lucky.number
    optunas = read.study
    assert optunas.best_trial.number == best.number
    assert optunas.best_value == pytest.approx(best.standing_value)
    assert optunas.trials[back.number].value == pytest.approx(0.98 * (lucky.trial_samples_per_s or 0.0))
    for record, trial in zip(read.records(), optunas.trials, strict=True):
        assert trial.value == pytest.approx(record.goal.value(record)), "one figure for one config"


def test_a_confirmation_that_a_lower_limit_ended_is_forgotten_under_a_higher_one(
    store: StudyStore, complete: TrialResult
) -> None:
    store.finish(store.begin(CONFIGS[0], SPACE), complete)
    [record] = store.records()
    store.confirm(record, TrialResult(outcome=Outcome.GUARDED, limit_bytes=1000))
    store.note_memory_limit(1000)
    assert store.records()[0].is_confirmed is False
    assert best_of(store.records()) is None
    store.note_memory_limit(2**40)
    assert store.records()[0].confirmation is None
    assert best_of(store.records()) is not None


def test_settling_tells_results_and_returns_trials_without_one(
    store: StudyStore,
    plain: Callable[[], list[FrozenTrial]],
    complete: TrialResult,
    out_of_memory: TrialResult,
    failed: TrialResult,
) -> None:
    told = store.begin(CONFIGS[0], SPACE)
    store.finish(told, complete)
    written = [store.begin(config, SPACE) for config in CONFIGS[1:3]]
    storage = store.location.open()
    study_id = storage.get_study_id_from_name("mine")
    for record, result in zip(written, (out_of_memory, complete), strict=True):  # as a process that died then left it
        trial_id = storage.get_trial_id_from_study_id_trial_number(study_id, record.number)
        storage.set_trial_user_attr(trial_id, "result", result.to_dict())
    unfinished = store.add_attempt(store.begin(CONFIGS[3], SPACE), failed)
    assert store.settle() == [unfinished]
    states = [TrialState.COMPLETE, TrialState.PRUNED, TrialState.COMPLETE, TrialState.RUNNING]
    assert [trial.state for trial in plain()] == states
    assert [trial.value for trial in plain()] == [40.0, None, 40.0, None]
    assert plain()[1].system_attrs["constraints"] == [0.5]
    assert store.settle() == [unfinished]
    assert [record.result for record in store.records()] == [complete, out_of_memory, complete, None]


def test_a_trial_that_has_ended_takes_no_second_result(
    store: StudyStore, complete: TrialResult, out_of_memory: TrialResult
) -> None:
    record = store.begin(CONFIGS[0], SPACE)
    store.finish(record, complete)
    with pytest.raises(StoreError) as caught:
        store.finish(record, out_of_memory)
    assert len(str(caught.value).splitlines()) == 1
    assert store.records()[0].result == complete


def test_records_leave_out_trials_that_are_not_ours(store: StudyStore) -> None:
    store.begin(CONFIGS[0], SPACE)
    store.study.ask()
    assert [record.number for record in store.records()] == [0]


# -- driving -------------------------------------------------------------------------------------------------------


def test_spending_adds_up_over_drives_and_counts_devices(store: StudyStore) -> None:
    seen = [store.spent()]
    for n_ranks in (3, 1):
        started = time.monotonic()
        with store.drive(n_ranks=n_ranks):
            time.sleep(0.05)
            during = store.spent()
        longest = time.monotonic() - started
        after = store.spent()
        seconds = after.seconds - seen[-1].seconds
        assert 0.05 <= seconds <= longest
        assert during.seconds <= after.seconds
        assert after.device_seconds - seen[-1].device_seconds == pytest.approx(seconds * n_ranks)
        seen.append(after)
    time.sleep(0.05)
    assert store.spent() == seen[-1]


def test_spending_is_stored_with_every_trial(
    store: StudyStore, complete: TrialResult, storage_url: str, open_location: Callable[[str], Location]
) -> None:
    other = StudyStore(open_location(storage_url), "mine")
    with store.drive(n_ranks=2):
        record = store.begin(CONFIGS[0], SPACE)
        time.sleep(0.02)
        assert other.spent().seconds == 0.0
        store.finish(record, complete)
        seen = other.spent()
    assert seen.trials == 1
    assert seen.seconds >= 0.02
    assert seen.device_seconds == pytest.approx(2 * seen.seconds)


def test_spending_is_stored_when_a_drive_ends_in_an_error(store: StudyStore) -> None:
    with pytest.raises(KeyboardInterrupt), store.drive(n_ranks=1):
        time.sleep(0.02)
        raise KeyboardInterrupt
    assert store.spent().seconds >= 0.02


def test_why_a_study_stopped_is_kept(store: StudyStore) -> None:
    store.note_stop("3 trials", "the budget is used up")
    assert store.last_stop() == {"budget": "3 trials", "reason": "the budget is used up"}


# -- for people ----------------------------------------------------------------------------------------------------


def test_the_note_for_the_dashboard_names_our_best(
    store: StudyStore, complete: TrialResult, out_of_memory: TrialResult
) -> None:
    from optuna_dashboard import get_note

    store.finish(store.begin(CONFIGS[0], SPACE), out_of_memory)
    store.write_note()
    assert get_note(store.study) == "bo_tuner: no trial has completed yet."
    store.finish(store.begin(CONFIGS[1], SPACE), complete)
    store.write_note()
    note = get_note(store.study)
    assert note == best_note(store.records())
    assert note.startswith(f"### Best: `{CONFIGS[1].name}` (trial 1)")
    assert "**40/s** samples, peak memory 512 MiB a rank. 2 trials, 1 ended by memory" in note


def test_a_long_note_survives(store: StudyStore, complete: TrialResult) -> None:
    from optuna_dashboard import get_note

    long = replace(CONFIGS[0], extra=(("flag", "x" * 3000),))
    store.finish(store.begin(long, distributions([long])), complete)
    store.write_note()
    assert "x" * 3000 in get_note(store.study)
