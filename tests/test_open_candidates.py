from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from bo_tuner.cluster import Cluster
from bo_tuner.config import TrainConfig
from bo_tuner.open_candidates import OpenCandidates, memory_proofs
from bo_tuner.outcome import Measurement, Outcome, TrialResult
from bo_tuner.space import BatchRule, SearchSpace, lightest
from bo_tuner.trial import TrialRecord

N_RANKS = 2
LIMIT_BYTES = 1000
MEMORY = (Outcome.OOM, Outcome.GUARDED, Outcome.HOST_OOM)


class AnyBackEnd:
    """A back end that runs everything."""

    def legal(self, config: TrainConfig) -> bool:
        return True


def opened(
    space: SearchSpace | None = None, *, limit_bytes: int = LIMIT_BYTES, longest_step_s: float = math.inf
) -> OpenCandidates:
    space = space or SearchSpace(zero_stages=(0, 1), max_micro_batch=100, max_grad_accum=4)
    cluster = Cluster(device="cuda", n_ranks=N_RANKS, device_name="Tesla V100", memory_bytes=10**6)
    configs = space.candidates(cluster, AnyBackEnd())
    return OpenCandidates(configs, space=space, n_ranks=N_RANKS, limit_bytes=limit_bytes, longest_step_s=longest_step_s)


def config(stage: int, size: int, accum: int = 1) -> TrainConfig:
    return TrainConfig.from_params({"zero_stage": stage, "micro_batch_size": size, "grad_accum_steps": accum})


def ran(of: TrainConfig, samples_per_s: float = 10.0, *, number: int = 0, n_ranks: int = N_RANKS) -> TrialRecord:
    batch = of.global_batch(n_ranks)
    times = ((batch / samples_per_s,),)
    measurement = Measurement(
        global_batch=batch, seq_len=1, step_times_s=times, engine_times_s=times, peak_memory_bytes=(500,)
    )
    return TrialRecord(number=number, config=of, result=TrialResult(outcome=Outcome.COMPLETE, measurement=measurement))


def ended(of: TrainConfig, outcome: Outcome, *, limit_bytes: int | None = LIMIT_BYTES, number: int = 1) -> TrialRecord:
    return TrialRecord(number=number, config=of, result=TrialResult(outcome=outcome, limit_bytes=limit_bytes))


def gone(candidates: OpenCandidates, records: Sequence[TrialRecord]) -> set[TrainConfig]:
    return set(candidates.all) - set(candidates.open(records))


def added(candidates: OpenCandidates, records: Sequence[TrialRecord]) -> set[TrainConfig]:
    return set(candidates.open(records)) - set(candidates.all)


# -- what ran ------------------------------------------------------------------------------------------------------


def test_at_first_everything_is_open_in_the_order_of_the_space() -> None:
    candidates = opened()
    assert candidates.open([]) == list(candidates.all)


@pytest.mark.parametrize("outcome", [outcome for outcome in Outcome if outcome not in MEMORY])
def test_what_ran_is_no_longer_open_and_all_else_is(outcome: Outcome) -> None:
    assert gone(opened(), [ended(config(0, 8), outcome)]) == {config(0, 8)}


def test_what_runs_now_is_not_open() -> None:
    assert gone(opened(), [TrialRecord(number=0, config=config(1, 3, 2))]) == {config(1, 3, 2)}


def test_when_everything_ran_nothing_is_open() -> None:
    candidates = opened()
    assert candidates.open([ran(each) for each in candidates.all]) == []


def test_a_trial_that_is_retried_leaves_its_config_open_and_is_forgotten() -> None:
    records = [ended(config(0, 8), Outcome.FAILED, number=3), ended(config(0, 4), Outcome.FAILED, number=4)]
    space = SearchSpace(zero_stages=(0, 1), max_micro_batch=100, max_grad_accum=4)
    candidates = OpenCandidates(
        opened().all, space=space, n_ranks=N_RANKS, limit_bytes=LIMIT_BYTES, longest_step_s=math.inf, retried={3}
    )
    assert gone(candidates, records) == {config(0, 4)}
    assert candidates.standing(records) == records[1:]


# -- proofs of memory ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", MEMORY)
def test_out_of_memory_rules_out_the_same_layout_from_that_micro_batch_on_whatever_is_accumulated(
    outcome: Outcome,
) -> None:
    candidates = opened()
    proven = gone(candidates, [ended(config(0, 32, 2), outcome)])
    assert proven == {each for each in candidates.all if each.zero_stage == 0 and each.micro_batch_size >= 32}
    assert {each.grad_accum_steps for each in proven} == {1, 2, 4}


def test_a_smaller_proof_replaces_a_larger_one_in_either_order() -> None:
    candidates = opened()
    large, small = ended(config(0, 64), Outcome.OOM), ended(config(0, 16), Outcome.GUARDED, number=2)
    for records in ([large, small], [small, large]):
        proof = memory_proofs(records, limit_bytes=LIMIT_BYTES)[config(0, 1)]
        assert (proof.trial, proof.micro_batch_size) == (2, 16)
        assert min(each.micro_batch_size for each in gone(candidates, records)) == 16


def test_each_layout_has_its_own_proof() -> None:
    records = [ended(config(0, 64), Outcome.OOM), ended(config(1, 32), Outcome.OOM, number=2)]
    proofs = memory_proofs(records, limit_bytes=LIMIT_BYTES)
    assert {layout.zero_stage: (proof.trial, proof.micro_batch_size) for layout, proof in proofs.items()} == {
        0: (1, 64),
        1: (2, 32),
    }


@pytest.mark.parametrize("outcome", [outcome for outcome in Outcome if outcome not in MEMORY])
def test_no_other_end_proves_anything(outcome: Outcome) -> None:
    records = [ended(config(0, 8), outcome), TrialRecord(number=2, config=config(1, 8))]
    assert memory_proofs(records, limit_bytes=LIMIT_BYTES) == {}


def test_a_refusal_of_the_device_holds_under_a_raised_limit() -> None:
    records = [ended(config(0, 32), Outcome.OOM)]
    assert gone(opened(limit_bytes=2 * LIMIT_BYTES), records) == gone(opened(), records)
    assert len(gone(opened(), records)) > 3


@pytest.mark.parametrize("outcome", [Outcome.GUARDED, Outcome.HOST_OOM])
def test_what_our_limit_or_the_kernel_ended_holds_only_up_to_that_limit(outcome: Outcome) -> None:
    records = [ended(config(0, 32), outcome)]
    for limit_bytes in (LIMIT_BYTES // 2, LIMIT_BYTES):
        assert len(gone(opened(limit_bytes=limit_bytes), records)) > 3
    assert gone(opened(limit_bytes=LIMIT_BYTES + 1), records) == set(), "it may run again"


def peaked(of: TrainConfig, peak_bytes: int) -> TrialRecord:
    record = ran(of)
    assert record.result is not None
    return replace(record, result=replace(record.result, peak_memory_bytes=peak_bytes))


def test_what_ran_with_more_than_a_limit_lowered_since_proves_that_it_does_not_fit() -> None:
    records = [peaked(config(0, 8), 900), peaked(config(0, 4), 700)]
    assert memory_proofs(records, limit_bytes=1000) == {}
    [(layout, proof)] = memory_proofs(records, limit_bytes=800).items()
    assert (layout, proof.micro_batch_size) == (config(0, 8).layout, 8)


@pytest.mark.parametrize("outcome", MEMORY)
def test_a_confirmation_that_ran_out_of_memory_is_a_proof_too(outcome: Outcome) -> None:
    confirmation = TrialResult(outcome=outcome, limit_bytes=LIMIT_BYTES)
    record = replace(ran(config(0, 8)), confirmations=(confirmation,))
    assert [proof.micro_batch_size for proof in memory_proofs([record], limit_bytes=LIMIT_BYTES).values()] == [8]
    assert all(open.micro_batch_size < 8 for open in opened().open([record]) if open.layout == config(0, 8).layout)


def test_a_raised_limit_leaves_the_proofs_that_still_hold() -> None:
    records = [
        ended(config(0, 32), Outcome.GUARDED),
        ended(config(0, 64), Outcome.OOM, number=2),
        ended(config(1, 16), Outcome.GUARDED, limit_bytes=2 * LIMIT_BYTES, number=3),
    ]
    proofs = memory_proofs(records, limit_bytes=2 * LIMIT_BYTES)
    assert {layout.zero_stage: proof.micro_batch_size for layout, proof in proofs.items()} == {0: 64, 1: 16}


def pipelined() -> OpenCandidates:
    """Depths 1, 2 and 4 on 4 ranks, recomputed and not."""
    space = SearchSpace(
        zero_stages=(0,), max_micro_batch=100, max_grad_accum=8, pipeline_depths=(1, 2, 4), recompute=(False, True)
    )
    cluster = Cluster(device="cuda", n_ranks=4, device_name="Tesla V100", memory_bytes=10**6)
    configs = space.candidates(cluster, AnyBackEnd())
    return OpenCandidates(configs, space=space, n_ranks=4, limit_bytes=LIMIT_BYTES, longest_step_s=math.inf)


@pytest.mark.parametrize(
    ("accum", "also"), [(1, {1}), (2, {2}), (4, {4, 8}), (8, {4, 8})], ids=["one", "two", "as deep", "more"]
)
def test_in_a_pipeline_a_proof_holds_for_as_many_micro_batches_in_flight(accum: int, also: set[int]) -> None:
    candidates = pipelined()
    failed = replace(config(0, 32, accum), pipeline_depth=4)
    proven = gone(candidates, [ended(failed, Outcome.OOM)])
    assert proven == {
        each
        for each in candidates.all
        if (each.pipeline_depth, each.recompute) == (4, False)
        and each.micro_batch_size >= 32
        and each.grad_accum_steps in also
    }
    assert failed in proven


def test_a_proof_without_recomputation_says_nothing_of_recomputed_layers_nor_the_other_way() -> None:
    candidates = pipelined()
    for again in (False, True):
        failed = replace(config(0, 16), recompute=again)
        proven = gone(candidates, [ended(failed, Outcome.OOM)])
        assert {(each.recompute, each.pipeline_depth) for each in proven} == {(again, 1)}


def test_the_edge_of_a_pipeline_has_the_accumulations_that_keep_as_many_in_flight() -> None:
    fits, fails = (replace(config(0, size, 8), pipeline_depth=4) for size in (64, 68))
    assert added(pipelined(), [ran(fits, n_ranks=4), ended(fails, Outcome.OOM)]) == {
        replace(config(0, size, accum), pipeline_depth=4) for size in (65, 66, 67) for accum in (4, 8)
    }


# -- too slow to measure -------------------------------------------------------------------------------------------


def test_steps_too_long_to_measure_at_the_best_rate_so_far_are_set_aside() -> None:
    candidates = opened(longest_step_s=2.0)
    records = [ran(config(0, 1), 5.0), ran(config(0, 2), 20.0, number=1)]
    left = candidates.open(records)
    assert set(left) == {
        each
        for each in candidates.all
        if each.global_batch(N_RANKS) <= 40 and each not in {record.config for record in records}
    }
    assert max(each.global_batch(N_RANKS) for each in left) == 40


def test_before_anything_was_measured_or_expected_a_study_begins_with_small_steps() -> None:
    candidates = opened(longest_step_s=10.0)
    left = candidates.open([ended(config(0, 1), Outcome.FAILED)])
    assert {each.global_batch(N_RANKS) for each in left} == {2, 4, 6, 8, 10, 12, 14, 16}
    assert max(each.global_batch(N_RANKS) for each in candidates.all) == 800


def test_where_nobody_waits_nothing_is_too_slow() -> None:
    candidates = opened(longest_step_s=math.inf)
    assert gone(candidates, [ran(config(0, 1), 1e-9)]) == {config(0, 1)}


def test_one_sample_a_rank_is_never_too_slow() -> None:
    candidates = opened(longest_step_s=1e-9)
    left = candidates.open([ran(lightest(candidates.all))])
    assert left == [config(0, 1)]


def test_under_a_fixed_batch_nothing_is_too_slow() -> None:
    space = SearchSpace(zero_stages=(0,), batch_rule=BatchRule.of(global_batch=64))
    candidates = opened(space, longest_step_s=1e-9)
    assert gone(candidates, [ran(config(0, 1, 32))]) == {config(0, 1, 32)}
    assert len(candidates.all) == 6


# -- the edge of memory --------------------------------------------------------------------------------------------


def test_between_the_largest_that_ran_and_the_rung_that_did_not_every_integer_opens() -> None:
    records = [ran(config(0, 64)), ended(config(0, 68), Outcome.OOM)]
    assert added(opened(), records) == {config(0, size, accum) for size in (65, 66, 67) for accum in (1, 2, 4)}


def test_integers_at_the_edge_stand_after_the_rungs() -> None:
    candidates = opened()
    left = candidates.open([ran(config(0, 64)), ended(config(0, 68), Outcome.OOM)])
    assert left[-9:] == sorted(left[-9:], key=lambda each: (each.micro_batch_size, each.grad_accum_steps))
    assert {each.micro_batch_size for each in left[-9:]} == {65, 66, 67}
    assert len(left) == len(set(left))


def test_no_integer_opens_while_a_rung_is_untried_between() -> None:
    assert added(opened(), [ran(config(0, 64)), ended(config(0, 73), Outcome.OOM)]) == set()


def test_no_integer_opens_before_the_layout_ran_at_all() -> None:
    records = [ran(config(1, 64)), ended(config(0, 68), Outcome.OOM)]
    assert added(opened(), records) == set()


def test_the_edge_closes_in_from_above_until_nothing_is_between() -> None:
    records = [ran(config(0, 64)), ended(config(0, 68), Outcome.OOM)]
    records.append(ended(config(0, 66, 2), Outcome.OOM, number=2))
    assert added(opened(), records) == {config(0, 65, accum) for accum in (1, 2, 4)}
    records.append(ended(config(0, 65), Outcome.OOM, number=3))
    assert added(opened(), records) == set()


def test_the_edge_closes_in_from_below_until_nothing_is_between() -> None:
    records = [ran(config(0, 64)), ended(config(0, 68), Outcome.OOM)]
    records.append(ran(config(0, 66), number=2))
    assert added(opened(), records) >= {config(0, 67, accum) for accum in (1, 2, 4)}
    assert config(0, 66) not in opened().open(records)


def test_the_edge_closes_only_where_memory_was_proven_not_under_a_limit_raised_since() -> None:
    records = [ran(config(0, 64)), ended(config(0, 68), Outcome.GUARDED)]
    assert added(opened(), records) != set()
    assert added(opened(limit_bytes=2 * LIMIT_BYTES), records) == set()


def test_under_a_fixed_batch_the_edge_has_no_integers() -> None:
    space = SearchSpace(zero_stages=(0,), batch_rule=BatchRule.of(global_batch=256))
    records = [ran(config(0, 64, 2)), ended(config(0, 128, 1), Outcome.OOM)]
    assert added(opened(space), records) == set()
    assert config(0, 32, 4) in opened(space).open(records)
