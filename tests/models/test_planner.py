"""The planner against brute force, and what must hold of any plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bo_tuner.config import TrainConfig
from bo_tuner.errors import ConfigError
from bo_tuner.models.choices import Choices
from bo_tuner.models.cost import TIME_PARTS, times_of
from bo_tuner.models.memory import MEMORY_PARTS, memory_of
from bo_tuner.models.planner import Plan, plan, timeline_of
from bo_tuner.models.software import DEEPSPEED
from tests.models.gpt import GPT, N_BLOCKS, ONLY_BLOCKS, problem

ROOMY = 10**12
BATCH = 48
GIVEN = problem(n_ranks=16, software=DEEPSPEED)
SCHEDULES = ("1f1b", "gpipe", "2bw")


def made(limit_bytes: int = ROOMY, **told: Any) -> Plan:
    return plan(GIVEN, global_batch=BATCH, limit_bytes=limit_bytes, schedules=SCHEDULES, **told)


def legal() -> list[TrainConfig]:
    """Every config by plain loops."""
    found: list[TrainConfig] = []
    for tensor in (1, 2):
        for depth in range(1, N_BLOCKS + 1):
            for schedule in SCHEDULES:
                for zero_stage in (0, 1, 2, 3):
                    for micro_batch in range(1, BATCH + 1):
                        for accumulation in range(1, BATCH + 1):
                            if 16 % (depth * tensor) or micro_batch * accumulation * 16 != BATCH * depth * tensor:
                                continue
                            if (depth == 1 and schedule != "1f1b") or (depth > 1 and zero_stage > 1):
                                continue
                            if schedule == "2bw" and (accumulation < depth or N_BLOCKS % depth):
                                continue
                            found += [
                                TrainConfig(
                                    zero_stage=zero_stage,
                                    micro_batch_size=micro_batch,
                                    grad_accum_steps=accumulation,
                                    pipeline_depth=depth,
                                    pipeline_schedule=schedule,
                                    tensor_parallel=tensor,
                                    recompute=recompute,
                                )
                                for recompute in (False, True)
                            ]
    return found


def test_a_plan_has_every_legal_config_once_with_the_memory_that_the_model_says() -> None:
    configs = legal()
    memory = memory_of(GIVEN, Choices.of(configs, 16)).total
    expected = {config.name: int(total) for config, total in zip(configs, memory, strict=True)}
    assert len(expected) == len(configs) > 150
    planned = made(tensor_degrees=(1, 2)).best()
    assert {one.config.name for one in planned} == expected.keys()
    for one in planned:
        assert one.total_bytes == pytest.approx(expected[one.config.name], abs=len(MEMORY_PARTS))
        assert one.samples_per_s == pytest.approx(BATCH / one.step_time_s)
        assert sum(one.times_s.values()) == pytest.approx(one.step_time_s)
        assert one.times_s.keys() == set(TIME_PARTS)


def test_what_fits_comes_first_by_rate_and_then_the_rest_by_memory() -> None:
    totals = sorted(one.total_bytes for one in made().best())
    limit_bytes = totals[len(totals) // 2]
    planned = made(limit_bytes).best()
    fitting = [one for one in planned if one.fits]
    rest = planned[len(fitting) :]
    assert fitting and rest and not any(one.fits for one in rest)
    assert all(one.total_bytes <= limit_bytes + len(MEMORY_PARTS) for one in fitting)
    assert [one.samples_per_s for one in fitting] == sorted((one.samples_per_s for one in fitting), reverse=True)
    assert [one.total_bytes for one in rest] == sorted(one.total_bytes for one in rest)


def test_the_best_is_the_best_of_the_closed_forms_where_no_pipeline_is_simulated() -> None:
    configs = [config for config in legal() if config.pipeline_depth == 1 and config.tensor_parallel == 1]
    rates = BATCH / times_of(GIVEN, Choices.of(configs, 16)).total
    best = next(one for one in made().best() if one.config.pipeline_depth == 1)
    assert best.config == configs[int(np.argmax(rates))]
    assert best.samples_per_s == pytest.approx(float(rates.max()))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_long_step_takes_as_long_as_all_of_its_micro_batches_simulated(schedule: str) -> None:
    found = plan(GIVEN, global_batch=800, limit_bytes=ROOMY, schedules=(schedule,), zero_stages=(0,), recompute=(True,))
    planned = [one for one in found.best(20) if one.config.grad_accum_steps > 3 * one.config.pipeline_depth > 3]
    assert len(planned) > 3
    for one in planned:
        beside = sum(one.times_s[part] for part in ("gradients", "optimizer", "fixed"))
        whole = timeline_of(GIVEN, one.config).makespan_s + beside
        assert one.step_time_s == pytest.approx(whole, rel=5e-3), one.config.name


def test_a_pipeline_that_never_drains_is_the_faster_the_longer_its_bubble_would_be() -> None:
    """(m + d - 1) / m on stages alike, whose messages take no time (arXiv 2006.09503, section 3.2)."""
    given = problem(ONLY_BLOCKS, n_ranks=4, hardware=instant())
    found = plan(given, global_batch=16, limit_bytes=ROOMY, zero_stages=(0,), schedules=("1f1b", "2bw"))
    for m in (4, 8, 16):
        flushed = found.find(f"z0_pp4_gas{m}_mbs{16 // m}")
        drained_never = found.find(f"z0_pp4_2bw_gas{m}_mbs{16 // m}")
        optimizer_s = flushed.times_s["optimizer"]
        ratio = (flushed.step_time_s - optimizer_s) / (drained_never.step_time_s - optimizer_s)
        assert ratio == pytest.approx((m + 3) / m, rel=1e-4)


def instant() -> Any:
    """Devices whose messages take no time."""
    link = replace(GIVEN.hardware.inside, bytes_per_s=1e30, latency_s=0.0)
    return replace(GIVEN.hardware, inside=link, between=link)


def test_more_memory_never_lowers_the_best_rate() -> None:
    rates: list[float] = []
    for limit_bytes in range(2 * 2**30, 40 * 2**30, 2**30):
        best = made(limit_bytes).best(1)[0]
        rates.append(best.samples_per_s if best.fits else 0.0)
    assert rates == sorted(rates)
    assert len(set(rates)) > 2


def test_a_layout_of_which_nothing_fits_is_told_with_the_least_that_it_needs() -> None:
    everything = made().best()
    least = {
        layout: min(one.total_bytes for one in everything if one.config.layout_name == layout)
        for layout in {one.config.layout_name for one in everything}
    }
    limit_bytes = sorted(least.values())[3] + len(MEMORY_PARTS)  # which are cut to whole bytes
    found = made(limit_bytes)
    fallen = [family for family in found.families if family.cause == "memory"]
    assert {family.layout.layout_name for family in fallen} == {
        layout for layout, needed in least.items() if needed > limit_bytes
    }
    needs = [least[family.layout.layout_name] for family in fallen]
    assert needs == sorted(needs)
    assert fallen[0].reason == (
        f"needs at least {needs[0] / 2**30:.2f} GiB a device, and {limit_bytes / 2**30:.2f} GiB may be used"
    )


def test_layouts_that_cannot_make_the_batch_say_why() -> None:
    found = plan(GIVEN, global_batch=4, limit_bytes=ROOMY, schedules=("1f1b", "2bw"))
    reasons = {family.layout.layout_name: (family.cause, family.reason) for family in found.families}
    assert reasons["z0"] == ("global batch", "4 samples a step do not divide by 16 replicas")
    assert reasons["z0_pp8_2bw"] == (
        "schedule",
        "2bw: depth must be at least 1, and n_micro_batches at least depth; a replica has 2 samples a step for 8 stages",
    )
    fewer = problem(replace(GPT, layers=GPT.layers[1:]), n_ranks=3)  # 16 blocks do not divide by 3
    odd = plan(fewer, global_batch=6, limit_bytes=ROOMY, schedules=("1f1b", "2bw"))
    assert [family.reason for family in odd.families if family.layout.layout_name == "z0_pp3_2bw"] == [
        "2bw wants as many blocks in every stage, and 16 do not divide by 3"
    ]


def test_a_batch_that_no_layout_can_make_is_refused() -> None:
    whole = problem(replace(GPT, layers=GPT.layers[:2]), n_ranks=16)  # one block: nothing to cut
    with pytest.raises(
        ConfigError, match=r"--global-batch must be a multiple of the data-parallel ranks .* got 3 for 16"
    ):
        plan(whole, global_batch=3, limit_bytes=ROOMY)


def test_names_find_their_configs() -> None:
    found = made()
    names = found.names()
    planned = found.best()
    assert names == [one.config.name for one in planned]
    assert found.find(names[7]) == planned[7]
    with pytest.raises(ConfigError, match=r"--timeline must name a config of this plan, as its table does; got 'z9'"):
        found.find("z9")


def test_the_best_pipeline_is_the_first_that_fits_and_has_stages() -> None:
    found = made()
    assert found.best_pipeline() == next(one for one in found.best() if one.config.pipeline_depth > 1)
    assert made(limit_bytes=1).best_pipeline() is None
