"""What every sampler keeps to, and the two that choose without learning."""

from __future__ import annotations

import functools

import optuna
import pytest

from bo_tuner.config import TrainConfig
from bo_tuner.errors import ConfigError
from bo_tuner.goal import Goal
from bo_tuner.outcome import Outcome, TrialResult
from bo_tuner.samplers import SAMPLERS, SpaceExhausted, make_sampler
from bo_tuner.space import SearchSpace
from bo_tuner.trial import TrialRecord
from tests.samplers.small_space import (
    LIMIT_BYTES,
    SMALL,
    Runs,
    always_fits,
    candidates_of,
    fits,
    go_on,
    names,
    never_fits,
    with_memory,
)

# -- the contract, for every sampler -------------------------------------------------------------------------------

SEEDLESS = ("bo", "grid", "doubling", "climb", "deepspeed")
"""They draw nothing."""
every_sampler = pytest.mark.parametrize("name", SAMPLERS)


def test_the_samplers_are_those_that_the_readme_and_help_name() -> None:
    assert set(SAMPLERS) >= {"tpe", "gp", "random", "grid", *SEEDLESS}


@every_sampler
@pytest.mark.parametrize("runs", [always_fits, with_memory, never_fits])
def test_only_open_candidates_are_proposed(name: str, runs: Runs) -> None:
    candidates = candidates_of(SMALL)
    sampler = make_sampler(name, candidates, seed=1)
    records: list[TrialRecord] = []
    for _ in range(12):
        is_open = candidates.open(records)
        if not is_open:
            break
        config = sampler.next_config(records)
        assert config in is_open
        records.append(TrialRecord(number=len(records), config=config, result=runs(config)))
    assert len(records) >= 2


@every_sampler
def test_a_space_where_all_fits_is_run_through_exactly_once(name: str) -> None:
    candidates = candidates_of(SMALL)
    records = go_on(make_sampler(name, candidates, seed=2), [], 1000, always_fits)
    assert len(records) == 32
    assert {record.config for record in records} == set(candidates.all)


@every_sampler
def test_nothing_proven_not_to_fit_is_proposed_and_all_that_fits_is(name: str) -> None:
    candidates = candidates_of(SMALL)
    records = go_on(make_sampler(name, candidates, seed=3), [], 1000, with_memory)
    least: dict[int, int] = {}
    """ZeRO stage -> smallest micro-batch that ran out of memory so far."""
    for record in records:
        config = record.config
        assert config.micro_batch_size < least.get(config.zero_stage, 10**9), config.name
        if not fits(config):
            least[config.zero_stage] = config.micro_batch_size
    ran = [record.config for record in records if fits(record.config)]
    assert len(ran) == len(set(ran))
    assert set(ran) == {config for config in candidates.all if fits(config)}


@every_sampler
def test_a_space_without_candidates_left_is_exhausted(name: str) -> None:
    candidates = candidates_of(SMALL)
    sampler = make_sampler(name, candidates, seed=4)
    records = go_on(make_sampler("grid", candidates, seed=4), [], 32, always_fits)
    assert len(records) == 32
    with pytest.raises(SpaceExhausted):
        sampler.next_config(records)


@every_sampler
def test_a_space_where_nothing_fits_ends_with_one_proof_a_layout_at_its_smallest(name: str) -> None:
    records = go_on(make_sampler(name, candidates_of(SMALL), seed=5), [], 1000, never_fits)
    smallest = {
        stage: min(record.config.micro_batch_size for record in records if record.config.zero_stage == stage)
        for stage in (0, 1)
    }
    assert smallest == {0: 1, 1: 1}
    assert len(records) <= 2 * 8


@every_sampler
def test_trials_that_still_run_and_those_that_failed_are_not_proposed_again(name: str) -> None:
    candidates = candidates_of(SMALL)
    unfinished = [TrialRecord(number=i, config=config) for i, config in enumerate(candidates.all[:10])]
    failed = [
        TrialRecord(number=10 + i, config=config, result=TrialResult(outcome=outcome))
        for i, (config, outcome) in enumerate(
            zip(candidates.all[10:12], (Outcome.FAILED, Outcome.TIMEOUT), strict=True)
        )
    ]
    started = [*unfinished, *failed]
    records = go_on(make_sampler(name, candidates, seed=6), started, 1000, always_fits)
    assert {record.config for record in records[12:]} == set(candidates.all[12:])
    assert len(records) == 32


@every_sampler
def test_one_candidate_is_enough(name: str) -> None:
    space = SearchSpace(zero_stages=(2,), max_micro_batch=1, max_grad_accum=1)
    records = go_on(make_sampler(name, candidates_of(space), seed=0), [], 5, always_fits)
    assert names(records) == ["z2_gas1_mbs1"]


@every_sampler
def test_the_same_seed_gives_the_same_sequence(name: str) -> None:
    first, second = (
        go_on(make_sampler(name, candidates_of(SMALL), seed=2**32 - 1), [], 16, with_memory) for _ in range(2)
    )
    assert len(first) == 16
    assert names(first) == names(second)


@pytest.mark.parametrize("name", [name for name in SAMPLERS if name not in SEEDLESS])
def test_another_seed_gives_another_sequence(name: str) -> None:
    found = {
        tuple(names(go_on(make_sampler(name, candidates_of(SMALL), seed=seed), [], 6, with_memory)))
        for seed in range(4)
    }
    assert len(found) > 1


@functools.cache
def uninterrupted(name: str) -> list[TrialRecord]:
    """Fifteen trials; a Gaussian process takes seconds for them."""
    return go_on(make_sampler(name, candidates_of(SMALL), seed=8), [], 15, with_memory)


@every_sampler
@pytest.mark.parametrize("n_before", [1, 6, 12])
def test_a_resumed_study_goes_on_as_if_never_interrupted(name: str, n_before: int) -> None:
    whole = uninterrupted(name)
    resumed = go_on(make_sampler(name, candidates_of(SMALL), seed=8), whole[:n_before], 15 - n_before, with_memory)
    assert len(whole) == 15
    assert names(resumed) == names(whole)


@every_sampler
@pytest.mark.parametrize("zero_stages", [(0, 1), (1,)])
def test_through_optunas_own_api_it_proposes_the_same_as_when_asked_directly(
    name: str, zero_stages: tuple[int, ...]
) -> None:
    space = SearchSpace(zero_stages=zero_stages, max_micro_batch=8, max_grad_accum=2)
    sampler = make_sampler(name, candidates_of(space), seed=9)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    for _ in range(12):
        # With one stage only, Optuna stores that field before it asks for the others.
        trial = study.ask(fixed_distributions=sampler.search_space)
        result = with_memory(TrainConfig.from_params(trial.params))
        trial.set_user_attr("result", result.to_dict())
        if result.samples_per_s is None:
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        else:
            study.tell(trial, result.samples_per_s)
    directly = go_on(make_sampler(name, candidates_of(space), seed=9), [], 12, with_memory)
    assert [TrainConfig.from_params(trial.params).name for trial in study.trials] == names(directly)


@every_sampler
def test_an_exhausted_space_ends_optunas_ask_too(name: str) -> None:
    space = SearchSpace(zero_stages=(2,), max_micro_batch=1, max_grad_accum=1)
    sampler = make_sampler(name, candidates_of(space), seed=0)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    study.tell(study.ask(fixed_distributions=sampler.search_space), 1.0)
    with pytest.raises(SpaceExhausted):
        study.ask(fixed_distributions=sampler.search_space)


@every_sampler
def test_a_field_that_is_not_in_the_space_is_refused(name: str) -> None:
    study = optuna.create_study(sampler=make_sampler(name, candidates_of(SMALL), seed=0))
    with pytest.raises(ValueError, match="'learning_rate' is not a field of this study's search space"):
        study.ask().suggest_float("learning_rate", 0.0, 1.0)


@every_sampler
@pytest.mark.parametrize("goal", ["latency", "energy", "throughput,memory"])
def test_every_sampler_goes_through_a_space_under_every_goal(name: str, goal: str) -> None:
    candidates = candidates_of(SearchSpace(zero_stages=(0, 1), max_micro_batch=3, max_grad_accum=1), Goal(name=goal))
    records = go_on(make_sampler(name, candidates, seed=5), [], 1000, with_memory)
    assert {record.config for record in records} == set(candidates.all)


@every_sampler
def test_what_a_lower_limit_ended_is_not_told_to_a_sampler(name: str) -> None:
    guarded = TrialResult(outcome=Outcome.GUARDED, limit_bytes=LIMIT_BYTES // 2)
    old = TrialRecord(number=0, config=candidates_of(SMALL).all[0], result=guarded)
    with_old, without = (make_sampler(name, candidates_of(SMALL), seed=3).next_config(known) for known in ([old], []))
    assert with_old == without


# -- the table -----------------------------------------------------------------------------------------------------


def test_an_unknown_sampler_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError) as caught:
        make_sampler("randon", candidates_of(SMALL), seed=0)
    assert str(caught.value) == (f"--sampler must be one of {', '.join(SAMPLERS)}; got 'randon' (did you mean random?)")


# -- baselines -----------------------------------------------------------------------------------------------------


def test_the_grid_goes_through_the_candidates_in_their_order() -> None:
    candidates = candidates_of(SMALL)
    records = go_on(make_sampler("grid", candidates, seed=0), [], 1000, always_fits)
    assert [record.config for record in records] == list(candidates.all)


def test_random_starts_anywhere() -> None:
    first = {make_sampler("random", candidates_of(SMALL), seed=seed).next_config([]).name for seed in range(200)}
    open_names = {config.name for config in candidates_of(SMALL).open([])}
    assert first == open_names
    assert len(open_names) == 24, "all but those whose first step would be large"
