"""`Dimension`: its values and ranges, what it changes and what it may not, and the candidates it makes."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from bo_tuner.cluster import Cluster
from bo_tuner.config import TrainConfig
from bo_tuner.dimension import Dimension
from bo_tuner.errors import ConfigError
from bo_tuner.objectives.training import DeepSpeedBackEnd
from bo_tuner.space import BatchRule, SearchSpace, default_config, distributions
from bo_tuner.storage import Manifest
from bo_tuner.workload import ModelSpec, Workload

BUCKET = "zero_optimization.reduce_bucket_size"
SETTINGS: dict[str, Any] = {"train_batch_size": 8, "zero_optimization": {"stage": 1, "reduce_bucket_size": 4}}


def dimension(**given: Any) -> Dimension:
    usual: dict[str, Any] = {"name": "own", "path": BUCKET, **given}
    return Dimension(**usual)


@pytest.mark.parametrize(
    ("given", "values"),
    [
        ({"values": (True, False)}, (True, False)),
        ({"values": ("adam", "lamb")}, ("adam", "lamb")),
        ({"values": (1, 2.5)}, (1.0, 2.5)),
        ({"low": 1, "high": 4}, (1, 2, 3, 4)),
        ({"low": 1, "high": 8, "step": 3}, (1, 4, 7)),
        ({"low": 0.1, "high": 0.3, "step": 0.1}, (0.1, 0.2, 0.3)),
        ({"low": 0, "high": 1.0, "points": 3}, (0.0, 0.5, 1.0)),
        ({"low": 1, "high": 64, "points": 7, "log": True}, (1, 2, 4, 8, 16, 32, 64)),
        ({"low": 1e-4, "high": 1e-2, "points": 3, "log": True}, (1e-4, 1e-3, 1e-2)),
        ({"low": 1, "high": 3, "points": 9}, (1, 2, 3)),
    ],
)
def test_values_are_listed_or_those_of_a_grid(given: dict[str, Any], values: tuple[Any, ...]) -> None:
    found = dimension(**given).values
    assert found == values
    assert {type(value) for value in found} == {type(values[0])}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"values": ()}, "dimension own must have flags, numbers or words, all of one type, as its values; got ()"),
        ({"values": (1, "a")}, "all of one type, as its values; got (1, 'a')"),
        ({"values": (True, 2)}, "all of one type"),
        ({"values": (None,)}, "flags, numbers or words"),
        ({"values": (3, 3)}, "each value once"),
        ({"values": (float("nan"),)}, "at most 2**53"),
        ({"values": (2**53 + 1,)}, "at most 2**53"),
        ({"values": ("a/b",)}, "words of letters, digits and _ . + - as its values; got 'a/b'"),
        ({"values": (1,), "low": 1, "high": 2}, "either values, or low and high"),
        ({"low": 1}, "either values, or low and high"),
        ({"low": 2, "high": 1}, "low at most high; got 2 to 1"),
        ({"low": 0.5, "high": 1}, "either a step or a number of points"),
        ({"low": 1, "high": 9, "step": 2, "points": 3}, "either a step or a number of points"),
        ({"low": 1, "high": 9, "step": 0}, "a step over 0"),
        ({"low": 1, "high": 10**9}, "from 2 to 1000 values in its range; got 1000000000"),
        ({"low": 0, "high": 9, "points": 3, "log": True}, "a range over 0 to be log"),
        ({"values": (1,), "name": "zero_stage"}, "none of extra, grad_accum_steps"),
        ({"values": (1,), "name": "two words"}, "letters, digits and underscores"),
        ({"values": (1,), "path": "a..b"}, "a path as in zero_optimization.overlap_comm; got 'a..b'"),
        ({"values": (1,), "path": ""}, "by either path or change"),
        ({"values": (1,), "change": print}, "by either path or change"),
        ({"values": (1,), "path": "", "change": 3}, "a function as its change; got 3"),
    ],
)
def test_what_is_no_dimension_is_told_in_one_line(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        dimension(**given)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


# -- what it changes ---------------------------------------------------------------------------------------------------


def test_a_path_sets_its_key_and_makes_what_leads_to_it() -> None:
    changed = dimension(values=(7,)).applied(SETTINGS, 7)
    assert changed == {"train_batch_size": 8, "zero_optimization": {"stage": 1, "reduce_bucket_size": 7}}
    assert dimension(values=("cpu",), path="a.b.c").applied(SETTINGS, "cpu") == {**SETTINGS, "a": {"b": {"c": "cpu"}}}
    assert SETTINGS["zero_optimization"]["reduce_bucket_size"] == 4, "what is given stays"


def in_place(config: dict[str, Any], value: float) -> None:
    config["zero_optimization"]["reduce_bucket_size"] *= value


def returned(config: dict[str, Any], value: float) -> dict[str, Any]:
    zero = config["zero_optimization"]
    return {**config, "zero_optimization": {**zero, "reduce_bucket_size": zero["reduce_bucket_size"] * value}}


@pytest.mark.parametrize("change", [in_place, returned])
def test_a_function_changes_its_copy_or_returns_another(change: Any) -> None:
    changed = dimension(values=(2, 3), path="", change=change).applied(SETTINGS, 3)
    assert changed == {"train_batch_size": 8, "zero_optimization": {"stage": 1, "reduce_bucket_size": 12}}
    assert SETTINGS["zero_optimization"]["reduce_bucket_size"] == 4


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda config, value: config["nope"], "take the DeepSpeed config and 2, and raises KeyError: 'nope'"),
        (lambda config: None, "and raises TypeError: "),
        (lambda config, value: value, "return a DeepSpeed config or nothing; with 2 it gave 2"),
        (lambda config, value: {**config, "x": {1, 2}}, "that JSON can hold; with 2: TypeError: Object of type set"),
        (lambda config, value: {**config, "x": float("inf")}, "that JSON can hold; with 2: ValueError"),
        (
            lambda config, value: config["zero_optimization"].update(stage=value),
            "leave zero_optimization.stage of the DeepSpeed config as it is, which other dimensions and options decide; 2 makes it",
        ),
        (lambda config, value: {}, "leave train_batch_size of the DeepSpeed config as it is"),
        (lambda config, value: config.update(bf16={"enabled": True}), "leave bf16.enabled"),
    ],
)
def test_a_function_that_makes_no_such_config_is_told_with_the_dimension(change: Any, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        dimension(values=(2,), path="", change=change).applied(SETTINGS, 2)
    assert told in str(caught.value)
    assert str(caught.value).startswith("dimension own must ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", ["train_batch_size", "zero_optimization.stage", "zero_optimization"])
def test_a_path_leaves_alone_what_others_decide(path: str) -> None:
    with pytest.raises(ConfigError, match="which other dimensions and options decide"):
        dimension(values=(2,), path=path).applied(SETTINGS, 2)


def test_a_path_through_a_number_is_told() -> None:
    with pytest.raises(ConfigError, match=r"keys that hold others, and train_batch_size in train_batch_size.x is 8"):
        dimension(values=(2,), path="train_batch_size.x").applied(SETTINGS, 2)


# -- the space ---------------------------------------------------------------------------------------------------------

BOTH = (dimension(name="b", values=(3, 1, 2)), dimension(name="a", values=("x", "y"), path="a"))


def space(*dimensions: Dimension, **given: Any) -> SearchSpace:
    usual: dict[str, Any] = {"zero_stages": (0, 3), "batch_rule": BatchRule.of(global_batch=4), **given}
    return SearchSpace(**usual, dimensions=dimensions)


def test_candidates_are_the_product_and_the_default_has_first_values(cluster: Cluster) -> None:
    without = space().candidates(cluster, DeepSpeedBackEnd())
    found = space(*BOTH).candidates(cluster, DeepSpeedBackEnd())
    assert len(found) == len(set(found)) == 6 * len(without)
    assert {config.extra for config in found} == {(("a", a), ("b", b)) for a in "xy" for b in (1, 2, 3)}
    assert default_config(found) == TrainConfig(grad_accum_steps=2, extra=(("a", "x"), ("b", 3)))


def test_too_many_candidates_are_told_with_their_number(cluster: Cluster) -> None:
    many = tuple(dimension(name=f"own{index}", low=1, high=50, path=f"a.{index}") for index in range(3))
    with pytest.raises(ConfigError) as caught:
        space(*many).candidates(cluster, DeepSpeedBackEnd())
    n_configs = len(space().candidates(cluster, DeepSpeedBackEnd()))
    assert f"at most 100000, and {n_configs} configs with 125000 combinations" in str(caught.value)
    assert f"are {n_configs * 125000}: give fewer values" in str(caught.value)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"path": "other"}, "each dimension must have a name of its own; two have own"),
        ({"name": "other"}, f"each dimension must have a path of its own; two have {BUCKET}"),
        ({"name": "o" * 200, "path": "other"}, "together must be at most 160 characters"),
    ],
)
def test_dimensions_that_clash_are_told(other: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        space(dimension(values=(1,)), dimension(values=(1,), **other))


def test_optuna_sees_numbers_as_numbers_and_a_geometric_grid_as_one(cluster: Cluster) -> None:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    dimensions = (
        dimension(name="even", low=1, high=4, path="a"),
        dimension(name="ratio", values=(0.5, 0.75, 1.0), path="b"),
        dimension(name="octaves", low=10**6, high=10**9, points=4, log=True, path="c"),
        dimension(name="decades", low=1e-4, high=1e-2, points=3, log=True, path="d"),
        dimension(name="flag", values=(True, False), path="e"),
        dimension(name="word", values=("x", "w"), path="f"),
    )
    own = space(*dimensions, zero_stages=(0,)).candidates(cluster, DeepSpeedBackEnd())
    found = distributions(own)
    assert found["even"] == IntDistribution(1, 4)
    assert found["ratio"] == FloatDistribution(0.5, 1.0)
    assert found["octaves"] == IntDistribution(10**6, 10**9, log=True)
    assert found["decades"] == FloatDistribution(1e-4, 1e-2, log=True)
    assert found["flag"] == CategoricalDistribution((False, True))
    assert found["word"] == CategoricalDistribution(("w", "x"))
    assert found["zero_stage"] == IntDistribution(0, 0)


def test_integers_at_the_edge_of_memory_keep_the_values(cluster: Cluster) -> None:
    own = space(*BOTH, batch_rule=BatchRule(), zero_stages=(0,))
    extra = (("a", "y"), ("b", 2))
    family = [config for config in own.candidates(cluster, DeepSpeedBackEnd()) if config.extra == extra]
    rungs = sorted({config.micro_batch_size for config in family})
    low, high = next((low, high) for low, high in itertools.pairwise(rungs) if high - low > 2)
    between = own.refined(family, fits=low, fails=high, n_ranks=2)
    assert {config.micro_batch_size for config in between} == set(range(low + 1, high))
    assert {config.extra for config in between} == {extra}


# -- the manifest ------------------------------------------------------------------------------------------------------


def manifest(cluster: Cluster, *dimensions: Dimension) -> Manifest:
    workload = Workload(model=ModelSpec(name="toy", architecture={}), n_parameters=1, seq_len=1)
    return Manifest(workload=workload, cluster=cluster, space=space(*dimensions), seed=0)


def function(**given: Any) -> Dimension:
    return dimension(**{"name": "f", "values": (1,), "path": "", "source": "/own.py:f", "digest": "d1", **given})


def test_dimensions_survive_json(cluster: Cluster) -> None:
    written = manifest(cluster, *BOTH, function())
    read = Manifest.from_dict(json.loads(json.dumps(written.to_dict())))
    assert read.space == written.space
    with_function = manifest(cluster, *BOTH, function(change=in_place))
    assert with_function.to_dict() == written.to_dict()
    read.check_same(with_function, study_name="mine")


@pytest.mark.parametrize(
    ("dimensions", "told"),
    [
        ((), "space dimensions f is {"),
        ((function(values=(1, 2)),), "space dimensions f values is [1], not [1, 2]"),
        ((function(digest="d2"),), "space dimensions f digest is d1, not d2"),
        ((function(source="/other.py:f"),), "space dimensions f source is /own.py:f, not /other.py:f"),
        ((function(), BOTH[0]), "space dimensions b is None, not {"),
    ],
)
def test_a_study_goes_on_only_with_the_same_dimensions(
    cluster: Cluster, dimensions: tuple[Dimension, ...], told: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        manifest(cluster, function()).check_same(manifest(cluster, *dimensions), study_name="mine")
    assert told in str(caught.value)
