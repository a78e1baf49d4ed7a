"""`Manifest`: it survives JSON, and a study goes on only for what it was started for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from bo_tuner.errors import ConfigError, StoreError, StudyMismatchError
from bo_tuner.goal import THROUGHPUT, Goal
from bo_tuner.launches import NoisePrior
from bo_tuner.origin import REAL, Origin
from bo_tuner.space import BatchRule
from bo_tuner.storage import Manifest
from bo_tuner.workload import ModelSpec, ModelStructure, Workload


def through_json(manifest: Manifest) -> Manifest:
    return Manifest.from_dict(json.loads(json.dumps(manifest.to_dict())))


def test_a_manifest_survives_json(manifest: Manifest) -> None:
    read = through_json(manifest)
    assert read == manifest
    assert read.to_dict() == manifest.to_dict()


def test_a_batch_rule_survives_json(manifest: Manifest) -> None:
    fixed = replace(manifest, space=replace(manifest.space, batch_rule=BatchRule.of(global_batch=64)))
    assert through_json(fixed).space == fixed.space


def test_a_goal_survives_json_and_studies_of_old_looked_for_throughput(manifest: Manifest) -> None:
    cost = replace(manifest, goal=Goal.of("cost", price_per_gpu_hour=2.0, n_ranks=2))
    assert through_json(cost).goal == cost.goal
    old = {key: value for key, value in manifest.to_dict().items() if key != "goal"}
    assert Manifest.from_dict(old).goal == THROUGHPUT
    Manifest.from_dict(old).check_same(manifest, study_name="mine")


def test_the_environment_is_recorded_and_may_differ(manifest: Manifest) -> None:
    told = replace(manifest, environment={"NCCL_ALGO": "Ring"})
    assert through_json(told).environment == {"NCCL_ALGO": "Ring"}
    old = {key: value for key, value in told.to_dict().items() if key != "environment"}
    assert Manifest.from_dict(old).environment is None
    Manifest.from_dict(old).check_same(told, study_name="mine")


def test_what_launches_were_expected_to_differ_by_is_recorded_and_may_differ(manifest: Manifest) -> None:
    told = replace(manifest, noise=NoisePrior(sd=0.03, spread=0.6))
    assert through_json(told).noise == told.noise
    old = {key: value for key, value in told.to_dict().items() if key != "noise"}
    assert Manifest.from_dict(old).noise is None
    Manifest.from_dict(old).check_same(told, study_name="mine")


def test_a_manifest_carries_its_schema_version(manifest: Manifest) -> None:
    assert manifest.to_dict()["schema_version"] == 1


def test_a_study_goes_on_for_the_same(manifest: Manifest) -> None:
    through_json(manifest).check_same(manifest, study_name="mine")
    manifest.check_same(through_json(manifest), study_name="mine")


Change = Callable[[Manifest], Manifest]


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        pytest.param(
            lambda old: replace(old, workload=replace(old.workload, seq_len=64)),
            "seq_len is 32, not 64",
            id="sequence length",
        ),
        pytest.param(
            lambda old: replace(old, workload=replace(old.workload, precision="bf16")),
            "precision is fp32, not bf16",
            id="precision",
        ),
        pytest.param(
            lambda old: replace(old, workload=replace(old.workload, model=replace(old.workload.model, name="other"))),
            "model name is toy, not other",
            id="model",
        ),
        pytest.param(
            lambda old: replace(
                old,
                workload=replace(
                    old.workload, model=replace(old.workload.model, architecture={"model_type": "bert", "layers": [1]})
                ),
            ),
            "model architecture layers is [1, 2], not [1]",
            id="architecture",
        ),
        pytest.param(
            lambda old: replace(old, cluster=replace(old.cluster, n_ranks=4)),
            "cluster n_ranks is 2, not 4",
            id="ranks",
        ),
        pytest.param(
            lambda old: replace(old, cluster=replace(old.cluster, n_nodes=2)),
            "cluster n_nodes is 1, not 2",
            id="nodes",
        ),
        pytest.param(
            lambda old: replace(old, cluster=replace(old.cluster, device_name="H200")),
            "cluster device_name is made up, not H200",
            id="device",
        ),
        pytest.param(
            lambda old: replace(old, cluster=replace(old.cluster, memory_bytes=old.cluster.memory_bytes * 97 // 100)),
            "cluster memory_bytes is 8589934592, not 8332236554",
            id="memory",
        ),
        pytest.param(
            lambda old: replace(old, space=replace(old.space, zero_stages=(0, 1))),
            "space zero_stages is [0, 1, 3], not [0, 1]",
            id="space",
        ),
        pytest.param(
            lambda old: replace(old, space=replace(old.space, batch_rule=BatchRule.of(global_batch=32))),
            "space batch_rule kind is free, not fixed",
            id="batch rule",
        ),
        pytest.param(
            lambda old: replace(old, goal=Goal.of("cost", price_per_gpu_hour=2.0, n_ranks=2)),
            "(objective is throughput, not cost):",
            id="objective",
        ),
    ],
)
def test_a_study_for_something_else_is_refused_with_the_difference(
    change: Change, difference: str, manifest: Manifest
) -> None:
    with pytest.raises(StudyMismatchError) as caught:
        through_json(manifest).check_same(change(manifest), study_name="mine")
    text = str(caught.value)
    assert isinstance(caught.value, ConfigError)
    assert "study 'mine' exists for something else" in text
    assert difference in text
    assert "--study NAME" in text
    assert len(text.splitlines()) == 1


def test_of_many_differences_three_are_shown_and_the_name_first(manifest: Manifest) -> None:
    workload = manifest.workload
    model = replace(workload.model, name="other", architecture={"model_type": "gpt2", "layers": [], "hidden_size": 2})
    other = replace(manifest, workload=replace(workload, model=model, seq_len=1, precision="fp16"))
    with pytest.raises(StudyMismatchError) as caught:
        manifest.check_same(other, study_name="mine")
    shown = str(caught.value).partition("(")[2].partition("): ")[0]
    assert shown.startswith("model name is toy, not other; ")
    assert shown.endswith("; ...")
    assert shown.count(" is ") == 3


@pytest.mark.parametrize("percent", [99, 101])
def test_a_little_more_or_less_memory_is_the_same_machine(percent: int, manifest: Manifest) -> None:
    memory_bytes = manifest.cluster.memory_bytes * percent // 100
    other = replace(manifest, cluster=replace(manifest.cluster, memory_bytes=memory_bytes))
    manifest.check_same(other, study_name="mine")
    other.check_same(manifest, study_name="mine")


def test_versions_and_the_seed_may_differ(manifest: Manifest) -> None:
    manifest.check_same(replace(manifest, versions={"torch": "3.0"}, seed=99), study_name="mine")


OWN_CODE = Workload(
    model=ModelSpec(
        name="own", architecture={}, source="function", function="/home/me/own.py:build", digest="0123456789abcdef"
    ),
    n_parameters=40,
    seq_len=7,
    optimizer="optimizer-lambda",
    data="/home/me/own.py:data",
    data_seq_len=9,
    structure=ModelStructure(n_trainable=20, layer_costs=(0.5, 0.25), cost_unit="seconds", plain_because="no blocks"),
)


def test_a_manifest_of_a_users_code_survives_json(manifest: Manifest) -> None:
    space = replace(manifest.space, pipeline_depths=(1, 2), recompute=(False, True))
    own = replace(manifest, workload=OWN_CODE, space=space)
    assert through_json(own) == own
    assert through_json(own).workload.structure.layer_costs == (0.5, 0.25)
    through_json(own).check_same(own, study_name="mine")


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"data": "/home/me/own.py:other"}, "data is /home/me/own.py:data, not /home/me/own.py:other"),
        ({"data": None}, "data is /home/me/own.py:data, not None"),
        ({"data_seq_len": 8}, "data_seq_len is 9, not 8"),
        ({"optimizer": "adam"}, "optimizer is optimizer-lambda, not adam"),
        ({"model": replace(OWN_CODE.model, digest="f")}, "model digest is 0123456789abcdef, not f"),
        (
            {"model": replace(OWN_CODE.model, function="/tmp/own.py:build")},
            "model function is /home/me/own.py:build, not /tmp/own.py:build",
        ),
        (
            {"structure": replace(OWN_CODE.structure, layer_costs=(0.5,))},
            "structure layer_costs is [0.5, 0.25], not [0.5]",
        ),
    ],
)
def test_another_model_data_or_optimizer_of_the_users_is_refused(
    change: dict[str, Any], difference: str, manifest: Manifest
) -> None:
    mine = replace(manifest, workload=OWN_CODE)
    with pytest.raises(StudyMismatchError) as caught:
        mine.check_same(replace(mine, workload=replace(OWN_CODE, **change)), study_name="mine")
    assert f"({difference})" in str(caught.value)


def test_a_manifest_from_before_there_were_pipelines_and_own_code_is_read(manifest: Manifest) -> None:
    old: dict[str, Any] = json.loads(json.dumps(manifest.to_dict()))
    for name in ("structure", "data", "data_seq_len"):
        del old["workload"][name]
    for name in ("source", "function", "digest"):
        del old["workload"]["model"][name]
    del old["space"]["recompute"]
    assert Manifest.from_dict(old) == manifest


def test_a_study_from_before_clusters_had_nodes_goes_on(manifest: Manifest) -> None:
    old: dict[str, Any] = json.loads(json.dumps(manifest.to_dict()))
    del old["cluster"]["n_nodes"]
    del old["cluster"]["network_bytes_per_s"]
    Manifest.from_dict(old).check_same(manifest, study_name="mine")


SIMULATED = Origin(kind="simulation", settings={"seed": 3, "noise": 0.02})


def test_an_origin_survives_json_and_studies_of_old_are_real(manifest: Manifest) -> None:
    simulated = replace(manifest, origin=SIMULATED)
    assert through_json(simulated) == simulated
    old: dict[str, Any] = json.loads(json.dumps(manifest.to_dict()))
    del old["origin"]
    assert Manifest.from_dict(old).origin == REAL
    Manifest.from_dict(old).check_same(manifest, study_name="mine")


def test_a_study_goes_on_only_with_figures_of_the_same_origin_wherever_their_table_lies(manifest: Manifest) -> None:
    simulated = replace(manifest, origin=SIMULATED)
    simulated.check_same(replace(simulated, origin=replace(SIMULATED, source="elsewhere")), study_name="mine")
    for other, difference in (
        (manifest, "(origin kind is simulation, not training; origin noise is 0.02, not None; "),
        (
            replace(manifest, seed=0, origin=replace(SIMULATED, settings={"seed": 3, "noise": 0.1})),
            "(origin noise is 0.02, not 0.1)",
        ),
    ):
        changed = replace(other, workload=replace(other.workload, seq_len=64))
        with pytest.raises(StudyMismatchError) as caught:
            simulated.check_same(changed, study_name="mine")
        assert difference in str(caught.value)
        assert "seq_len" not in str(caught.value), "what follows from another origin is not told"


@pytest.mark.parametrize("version", [2, None, "1"])
def test_a_manifest_of_another_schema_is_refused(version: Any, manifest: Manifest) -> None:
    with pytest.raises(StoreError) as caught:
        Manifest.from_dict({**manifest.to_dict(), "schema_version": version, "field_of_the_future": 1})
    assert f"schema version {version}, and this bo_tuner reads 1" in str(caught.value)
    assert "upgrade bo_tuner, or start another study with --study" in str(caught.value)
