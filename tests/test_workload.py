from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bo_tuner.errors import ConfigError, ModelError
from bo_tuner.workload import UNKNOWN_LENGTH, ModelSpec, Workload, preset_names

README_PRESETS = [
    "bert-base-uncased",
    "bert-large-uncased",
    "bert-tiny",
    "deberta-v2-xxlarge",
    "distilbert-base-uncased",
    "gpt-1.3b",
    "gpt-2.2b",
    "gpt-3.8b",
    "gpt-355m",
    "gpt2",
    "gpt2-large",
    "gpt2-medium",
    "gpt2-xl",
]
SMALL = {"model_type": "bert", "hidden_size": 8, "max_position_embeddings": 64}


def spec(**architecture: Any) -> ModelSpec:
    return ModelSpec(name="mine", architecture={"model_type": "bert", **architecture})


def write(file: Path, content: Any) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return file


# -- finding a model -----------------------------------------------------------------------------------------------


def test_the_presets_are_those_that_the_readme_names() -> None:
    assert preset_names() == README_PRESETS


@pytest.mark.parametrize("name", README_PRESETS)
def test_every_preset_is_a_config_with_a_known_longest_sequence(name: str) -> None:
    found = ModelSpec.resolve(name)
    assert found.name == name
    assert found.architecture["model_type"] in ("bert", "distilbert", "deberta-v2", "gpt2")
    assert found.architecture["architectures"]
    assert found.longest_seq_len in (512, 1024)
    assert found.usual_seq_len == found.longest_seq_len


def test_a_folder_is_named_after_itself(tmp_path: Path) -> None:
    write(tmp_path / "my-bert" / "config.json", SMALL)
    for given in (tmp_path / "my-bert", str(tmp_path / "my-bert"), tmp_path / "my-bert" / "config.json"):
        assert ModelSpec.resolve(given) == ModelSpec(name="my-bert", architecture=SMALL)


def test_a_file_of_another_name_is_named_after_that(tmp_path: Path) -> None:
    file = write(tmp_path / "wide.v2.json", SMALL)
    assert ModelSpec.resolve(str(file)) == ModelSpec(name="wide.v2", architecture=SMALL)


def test_a_relative_folder_and_a_home_folder_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "my-bert" / "config.json", SMALL)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ModelSpec.resolve("~/my-bert").name == "my-bert"
    monkeypatch.chdir(tmp_path / "my-bert")
    assert ModelSpec.resolve(".").name == "my-bert"


def test_a_transformers_config_object_is_taken_with_all_its_values() -> None:
    from transformers import BertConfig

    config = BertConfig(hidden_size=48, num_attention_heads=4, max_position_embeddings=99)
    found = ModelSpec.resolve(config)
    assert found.name == "bert"
    assert found.longest_seq_len == 99
    assert found.architecture["model_type"] == "bert"
    assert found.architecture["hidden_size"] == 48
    assert json.loads(json.dumps(found.architecture)) == found.architecture


def test_a_transformers_config_object_is_named_after_where_it_came_from() -> None:
    from transformers import GPT2Config

    config = GPT2Config(n_positions=77)
    config.name_or_path = "someone/their-gpt"
    found = ModelSpec.resolve(config)
    assert (found.name, found.longest_seq_len) == ("their-gpt", 77)


def test_a_spec_that_is_one_already_is_taken_as_it_is() -> None:
    found = spec()
    assert ModelSpec.resolve(found) is found


# -- errors --------------------------------------------------------------------------------------------------------


def test_an_unknown_name_is_refused_with_the_nearest_and_all_presets() -> None:
    with pytest.raises(ModelError) as caught:
        ModelSpec.resolve("bert-tinny")
    assert str(caught.value) == (
        "model 'bert-tinny' is neither a preset nor a path (did you mean bert-tiny?); presets: "
        + ", ".join(README_PRESETS)
    )
    assert isinstance(caught.value, ConfigError)


def test_a_name_like_none_is_refused_without_a_guess() -> None:
    with pytest.raises(ModelError) as caught:
        ModelSpec.resolve("/nowhere/at/all")
    assert str(caught.value).startswith("model '/nowhere/at/all' is neither a preset nor a path; presets: ")


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        ModelSpec.resolve(tmp_path)
    assert str(caught.value) == f"folder {tmp_path} must hold a config.json, and does not"


def test_broken_json_is_refused_with_the_place(tmp_path: Path) -> None:
    file = write(tmp_path / "config.json", '{"model_type": "bert",')
    with pytest.raises(ModelError) as caught:
        ModelSpec.resolve(tmp_path)
    text = str(caught.value)
    assert text.startswith(f"{file} must be a Hugging Face config in JSON, and cannot be read: ")
    assert "line 1" in text
    assert "\n" not in text


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ModelError, match=r"must be a Hugging Face config in JSON, and cannot be read: "):
        ModelSpec.resolve(file)


@pytest.mark.parametrize("content", [{"hidden_size": 8}, [1, 2], "3"])
def test_json_that_is_no_models_config_is_refused(tmp_path: Path, content: Any) -> None:
    file = write(tmp_path / "config.json", content)
    with pytest.raises(ModelError) as caught:
        ModelSpec.resolve(file)
    assert str(caught.value) == f"{file} must be a Hugging Face config; it has no model_type"


@pytest.mark.parametrize(
    ("given", "told"),
    [(3, "int"), (None, "NoneType"), ({"model_type": "bert"}, "dict"), (Path, "the class Path: make one")],
)
def test_what_is_no_model_at_all_is_refused_by_its_type(given: Any, told: str) -> None:
    with pytest.raises(ModelError) as caught:
        ModelSpec.resolve(given)
    assert str(caught.value) == (
        "a model must be a preset's name, a path to a Hugging Face config, FILE.py:FUNCTION, a transformers config or a "
        f"torch module; got {told}"
    )


@pytest.mark.parametrize(
    "given", ["", "x" * 5000, "~nobody-has-this-name/model", "a\0b"], ids=["empty", "too long", "no such home", "null"]
)
def test_a_text_that_cannot_be_a_path_is_refused_like_any_unknown_name(given: str) -> None:
    with pytest.raises(ModelError, match="is neither a preset nor a path"):
        ModelSpec.resolve(given)


# -- sequence length -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field", ["max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx"]
)
def test_the_longest_sequence_is_read_under_any_of_its_names(field: str) -> None:
    assert spec(**{field: 100}).longest_seq_len == 100


@pytest.mark.parametrize(
    ("architecture", "usual"),
    [
        ({"n_positions": 512}, 512),
        ({"n_positions": 2048}, 2048),
        ({"n_positions": 32768}, 2048),
        ({}, 2048),
        ({"n_positions": -1}, 2048),
        ({"n_positions": None}, 2048),
    ],
)
def test_the_usual_sequence_is_the_longest_and_at_most_2048(architecture: dict[str, Any], usual: int) -> None:
    assert spec(**architecture).usual_seq_len == usual
    assert spec(**architecture).made_up_seq_len("cuda") == usual
    assert spec(**architecture).made_up_seq_len("cpu") == min(usual, 128)


@pytest.mark.parametrize("seq_len", [1, 511, 512])
def test_a_sequence_up_to_the_models_positions_is_taken(seq_len: int) -> None:
    model = ModelSpec.resolve("bert-tiny")
    assert Workload(model=model, n_parameters=1, seq_len=seq_len).seq_len == seq_len


@pytest.mark.parametrize("seq_len", [0, -1, 513])
def test_a_sequence_beyond_the_models_positions_is_refused_with_their_number(seq_len: int) -> None:
    with pytest.raises(ConfigError) as caught:
        Workload(model=ModelSpec.resolve("bert-tiny"), n_parameters=1, seq_len=seq_len)
    assert (
        str(caught.value) == f"--seq-len must be at least 1 and at most the 512 positions of bert-tiny; got {seq_len}"
    )


def test_a_model_without_positions_takes_any_length_from_one() -> None:
    assert Workload(model=spec(), n_parameters=1, seq_len=10**6).seq_len == 10**6
    with pytest.raises(ConfigError) as caught:
        Workload(model=spec(), n_parameters=1, seq_len=0)
    assert str(caught.value) == "--seq-len must be at least 1; got 0"


# -- workload ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"precision": "fp8"}, "--precision must be one of fp32, bf16, fp16; got 'fp8'"),
    ],
)
def test_an_unknown_choice_is_refused_with_those_there_are(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Workload(model=spec(), n_parameters=1, seq_len=8, **values)
    assert str(caught.value) == text


def test_the_label_names_model_sequence_and_precision_and_an_unusual_optimizer() -> None:
    usual = Workload(model=spec(), n_parameters=1, seq_len=128)
    unusual = Workload(model=spec(), n_parameters=1, seq_len=128, precision="bf16", optimizer="adam")
    assert usual.label == "mine_seq128_fp32"
    assert unusual.label == "mine_seq128_bf16_adam"


def test_a_workload_reads_back_from_json_as_the_same() -> None:
    workload = Workload(
        model=ModelSpec.resolve("gpt2"), n_parameters=124_439_808, seq_len=64, precision="fp16", optimizer="adam"
    )
    assert Workload.from_dict(json.loads(json.dumps(workload.to_dict()))) == workload


def test_the_label_leaves_out_a_length_that_is_not_known_yet_and_names_the_users_data() -> None:
    unknown = Workload(model=spec(), n_parameters=0, seq_len=UNKNOWN_LENGTH)
    own = Workload(
        model=spec(), n_parameters=0, seq_len=8, data="/home/me/own.py:samples", optimizer="optimizer-lambda"
    )
    assert unknown.label == "mine_fp32"
    assert own.label == "mine_samples_fp32_optimizer-lambda"


@pytest.mark.parametrize(
    ("quantization", "remark"),
    [
        (
            {"bits": 4, "quant_method": "awq"},
            "the config's quantization (awq) is ignored: all weights are trained, in full precision",
        ),
        ({"bits": 4}, "the config's quantization is ignored: all weights are trained, in full precision"),
        (None, ""),
    ],
)
def test_a_quantization_that_is_left_aside_is_told(quantization: dict[str, Any] | None, remark: str) -> None:
    assert spec(model_type="qwen2", quantization_config=quantization).remark == remark
