"""The user's own dimensions: as they are given, tried at the door, in DeepSpeed's config, and found again by other processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bo_tuner.cluster import Cluster
from bo_tuner.config import TrainConfig
from bo_tuner.dimension import Dimension
from bo_tuner.errors import ConfigError
from bo_tuner.objectives import ignore_events
from bo_tuner.objectives.launch import ForkServer
from bo_tuner.objectives.training import DeepSpeedBackEnd, TrainingObjective, deepspeed_config
from bo_tuner.objectives.training.deepspeed_keys import unknown_key
from bo_tuner.objectives.training.dimensions import dimensions_found, dimensions_of, dimensions_ready
from bo_tuner.outcome import Outcome, TrialLimits
from bo_tuner.space import SearchSpace
from bo_tuner.workload import ModelSpec, Workload

TOY = Workload(model=ModelSpec(name="toy", architecture={}), n_parameters=0, seq_len=1)
OVERLAP = "zero_optimization.overlap_comm"
CODE = """
from bo_tuner import Dimension


def scaled(config, value):
    zero = config["zero_optimization"]
    if "reduce_bucket_size" in zero:
        zero["reduce_bucket_size"] = int(zero["reduce_bucket_size"] * value)


def one():
    return Dimension(name="scale", values=(1.0, 0.5), change=scaled)


def several():
    return [one(), Dimension(name="overlap", values=(False, True), path="zero_optimization.overlap_comm")]


def none():
    return []


def fails():
    raise KeyError("nope")
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "own_dimensions.py"
    made.write_text(CODE, encoding="utf-8")
    return made


def test_one_is_written_in_a_line() -> None:
    given = ["overlap=false,true:zero_optimization.overlap_comm", "clip=0.5, 1:gradient_clipping", "as=bf16,fp32:data"]
    assert dimensions_of(given) == (
        Dimension(name="overlap", values=(False, True), path=OVERLAP),
        Dimension(name="clip", values=(0.5, 1.0), path="gradient_clipping"),
        Dimension(name="as", values=("bf16", "fp32"), path="data"),
    )


def test_a_function_in_a_file_gives_one_or_several(file: Path) -> None:
    (one,) = dimensions_of([f"{file}:one"])
    assert (one.name, one.values, one.source) == ("scale", (1.0, 0.5), f"{file}:one")
    scale, overlap = dimensions_of([f"{file}:several"])
    assert (scale.source, overlap.source) == (f"{file}:several", "")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("overlap=false,true", '--dimension must be NAME=VALUE,VALUE:PATH, as in "overlap=false,true:'),
        ("overlap", "got 'overlap'"),
        (3, "FILE.py:FUNCTION or a Dimension; got 3"),
        ("x=null:a", "dimension x must have flags, numbers or words"),
        ("no_such.py:one", "no_such.py must be a Python file, and there is none"),
        ("FILE:oen", "must define the function 'oen': it has scaled, one, several, none, fails; did you mean one?"),
        ("FILE:none", "must return a Dimension, or a list of them; it returned []"),
        ("FILE:fails", "the function must not raise, and raises KeyError: 'nope'"),
        ("FILE:scaled", "the function must take no arguments; it needs config, value"),
        (Dimension(name="x", values=(1,), source="own.py:f"), "--dimension must be"),
    ],
)
def test_what_is_no_dimension_is_told_in_one_line(file: Path, given: Any, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        dimensions_of([given.replace("FILE", str(file)) if isinstance(given, str) else given])
    assert told in str(caught.value)


# -- in DeepSpeed's config ---------------------------------------------------------------------------------------------


def test_values_of_a_config_change_deepspeeds_one_after_the_other() -> None:
    def doubled(config: dict[str, Any], value: int) -> None:
        config["gradient_clipping"] *= value

    dimensions = (
        Dimension(name="z_clip", values=(0.5, 1.5), path="gradient_clipping"),
        Dimension(name="a_times", values=(1, 2), change=doubled),
    )
    config = TrainConfig(zero_stage=1, extra=(("z_clip", 1.5), ("a_times", 2)))
    plain = deepspeed_config(replace(config, extra=()), TOY, n_ranks=2)
    assert deepspeed_config(config, TOY, n_ranks=2, dimensions=dimensions) == {**plain, "gradient_clipping": 3.0}
    assert DeepSpeedBackEnd(dimensions).legal(config)
    assert not DeepSpeedBackEnd(dimensions[:1]).legal(config)
    assert not DeepSpeedBackEnd().legal(config)


@pytest.mark.parametrize(
    "key", ["gradient_clipping", "fp16", "comms_logger", "flops_profiler", "activation_checkpointing"]
)
def test_deepspeeds_keys_are_known(key: str) -> None:
    assert unknown_key(key) == ""


def test_other_keys_are_told_with_what_was_meant() -> None:
    assert unknown_key("gradient_cliping") == "DeepSpeed knows no such key (did you mean gradient_clipping?)"
    assert (
        unknown_key("reduce_bucket_size") == "DeepSpeed reads it inside another: zero_optimization.reduce_bucket_size"
    )


def space(*dimensions: Dimension) -> SearchSpace:
    return SearchSpace(zero_stages=(0, 3), dimensions=dimensions)


def only_small(config: dict[str, Any], value: int) -> None:
    if value > 1 and config["zero_optimization"]["stage"] == 3:
        raise ValueError("no more than one\nin ZeRO 3")


@pytest.mark.parametrize(
    ("dimension", "told"),
    [
        (
            Dimension(name="own", values=(1, 2), change=only_small),
            "dimension own must take the DeepSpeed config and 2, and raises ValueError: no more than one in ZeRO 3",
        ),
        (
            Dimension(name="own", values=(1, 2), path="gradient_cliping"),
            "dimension own sets gradient_cliping, and DeepSpeed knows no such key (did you mean gradient_clipping?)",
        ),
        (
            Dimension(name="own", values=(1,), change=lambda config, value: config.update(overlap_comm=True)),
            "dimension own sets overlap_comm, and DeepSpeed reads it inside another: zero_optimization.overlap_comm",
        ),
    ],
)
def test_every_value_is_tried_in_every_zero_stage(tmp_path: Path, dimension: Dimension, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        dimensions_ready(space(dimension), TOY, folder=tmp_path)
    assert str(caught.value) == told


# -- found again -------------------------------------------------------------------------------------------------------


def through_json(own: SearchSpace) -> SearchSpace:
    return SearchSpace.from_dict(json.loads(json.dumps(own.to_dict())))


def found(own: SearchSpace, folder: Path, workload: Workload = TOY) -> tuple[Dimension, ...]:
    return dimensions_found(through_json(own), workload, folder=folder)


def test_a_function_from_python_is_found_in_the_studys_folder(tmp_path: Path) -> None:
    limit = 0.25
    given = Dimension(
        name="own", values=(1.0, 2.0), change=lambda config, value: config.update(gradient_clipping=value * limit)
    )
    own = replace(space(), dimensions=dimensions_ready(space(given), TOY, folder=tmp_path))
    assert (own.dimensions[0].source, [file.name for file in tmp_path.iterdir()]) == (
        "dimension-own",
        ["dimension-own.pkl"],
    )
    (again,) = found(own, tmp_path)
    assert again.applied({}, 2.0) == {"gradient_clipping": 0.5}
    (tmp_path / "dimension-own.pkl").unlink()
    with pytest.raises(
        ConfigError, match=r"dimension-own.pkl must hold the change of dimension own and cannot be read"
    ):
        found(own, tmp_path)


def test_a_function_in_a_file_is_found_there_while_it_does_the_same(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    def forget() -> None:
        """As a fresh process does."""
        for name in [name for name in sys.modules if name.startswith("user_own_dimensions")]:
            monkeypatch.delitem(sys.modules, name)

    own = replace(space(), dimensions=dimensions_ready(space(*dimensions_of([f"{file}:one"])), TOY, folder=tmp_path))
    assert list(tmp_path.glob("*.pkl")) == []
    settings = {"zero_optimization": {"stage": 3, "reduce_bucket_size": 100}}
    file.write_text(f"# moved down\n{CODE}", encoding="utf-8")
    forget()
    built = replace(TOY, n_parameters=10**9)  # as a study knows it once the model was built; it decides the buckets
    assert found(own, tmp_path, built)[0].applied(settings, 0.5)["zero_optimization"]["reduce_bucket_size"] == 50
    file.write_text(CODE.replace("* value)", "* value) // 2"), encoding="utf-8")
    forget()
    with pytest.raises(
        ConfigError, match=r"dimension scale must do what it did when the study began, and .*:one now does"
    ):
        found(own, tmp_path)
    file.write_text(CODE.replace('"scale"', '"other"'), encoding="utf-8")
    forget()
    with pytest.raises(ConfigError, match="must give dimension scale, as when the study began"):
        found(own, tmp_path)


# -- in a trial --------------------------------------------------------------------------------------------------------


def test_a_config_that_a_function_refuses_is_a_rejected_trial(
    workload: Workload, cluster: Cluster, server: ForkServer, tmp_path: Path
) -> None:
    objective = TrainingObjective(
        workload,
        cluster,
        server,
        log_dir=tmp_path,
        dimensions=[Dimension(name="own", values=(1, 2), change=only_small)],
    )
    run: Callable[..., Any] = objective
    config = TrainConfig(zero_stage=3, extra=(("own", 2),))
    result = run(config, limits=TrialLimits(memory_bytes=2**32), on_event=ignore_events)
    assert (result.outcome, result.limit_bytes) == (Outcome.REJECTED, 2**32)
    assert result.reason.endswith("raises ValueError: no more than one in ZeRO 3")
