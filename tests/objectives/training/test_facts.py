"""`model_facts`: what is found out of a user's model and data, and one line that names whatever is wrong with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from bo_tuner.errors import ConfigError, LaunchError, ModelError
from bo_tuner.objectives.launch import ForkServer
from bo_tuner.objectives.training import ModelFacts, model_facts
from bo_tuner.objectives.training.sources import model_spec, named
from bo_tuner.workload import ModelSpec, Workload

OwnFile = Callable[[str], Path]

CONFIG = "dict(vocab_size=100, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32, "
BERT = f"""
from transformers import BertConfig, BertForMaskedLM

def bert():
    return BertForMaskedLM(BertConfig(**{CONFIG}max_position_embeddings=32)))

def frozen():
    model = bert()
    model.bert.embeddings.requires_grad_(False)
    return model

class Sentences(Samples):
    def __getitem__(self, index):
        tokens = torch.arange(24) + index
        return {{"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}}

def sentences():
    return Sentences()

def any_length(seq_len):
    return [{{"input_ids": torch.arange(seq_len), "labels": torch.arange(seq_len)}}] * 9

def own_length(seq_len=7):
    return [(torch.arange(seq_len), torch.zeros(4))] * 9

def too_long():
    return any_length(33)
"""


@pytest.fixture
def look(own_file: OwnFile, server: ForkServer) -> Callable[..., ModelFacts]:
    """`look(code, model="build", data="data")` is what is found of functions of own.py with `code` in it."""

    def look(code: str = "", model: str = "build", data: str | None = "data", **options: Any) -> ModelFacts:
        file = own_file(code)
        workload = Workload(
            model=model_spec(f"{file}:{model}"),
            n_parameters=0,
            seq_len=1,
            data=None if data is None else named("--data", f"{file}:{data}", server.run_dir),
        )
        return model_facts(workload, server, **options)

    return look


Look = Callable[..., ModelFacts]

WRONG_MODELS: Mapping[str, tuple[str, list[str]]] = {
    "raises": ("def model(): raise KeyError('nope')", ["must not raise, and raises KeyError: 'nope'"]),
    "exits": ("def model(): raise SystemExit(3)", ["must not raise, and raises SystemExit: 3"]),
    "returns nothing": ("def model(): pass", ["must return a module whose forward gives a loss", "returned nothing"]),
    "returns a number": ("def model(): return 3", ["or a pair (layers, loss)", "returned int"]),
    "returns a list without a loss": ("def model(): return [Net()]", ["returned list without a loss"]),
    "returns a chain without a loss": (
        "def model(): return nn.Sequential(Net())",
        ["returned Sequential without a loss"],
    ),
    "returns other things": ("def model(): return 1, 2", ["returned a tuple of int, int"]),
    "returns loss and layers": (
        "def model(): return nn.MSELoss(), [nn.Linear(4, 4)]",
        ["a pair (layers, loss)", "returned a tuple of MSELoss, list"],
    ),
    "returns no layers": ("def model(): return [], nn.MSELoss()", ["at least one layer", "it is empty"]),
    "returns layers that are none": ("def model(): return [3], nn.MSELoss()", ["layer 0 must be a module", "is int"]),
    "needs arguments": ("def model(size): return Net()", ["must take no arguments; it needs size"]),
    "is a class that needs arguments": (
        "class model(Net):\n    def __init__(self, size): super().__init__()",
        ["must take no arguments; it needs size"],
    ),
    "is no function": ("model = 3", ["own.py:model must be a function; it is int"]),
    "has no parameter": (
        "class Empty(nn.Module):\n    pass\ndef model(): return Empty()",
        ["Empty must have a parameter to train"],
    ),
    "has only frozen parameters": (
        "def model(): return Net().requires_grad_(False)",
        ["Net must have a parameter to train", "none that requires a gradient"],
    ),
    "holds a lock": (
        "import threading\ndef model():\n    net = Net()\n    net.lock = threading.Lock()\n    return net",
        ["model Net must be one that copy.deepcopy can copy", "cannot pickle '_thread.lock' object"],
    ),
    "cannot be copied": (
        "class One(Net):\n    def __deepcopy__(self, memo): raise RuntimeError('one of\\na kind')\ndef model(): return One()",
        ["model One must be one that copy.deepcopy can copy", "RuntimeError: one of a kind"],
    ),
    "cannot be pickled": (
        (
            "class Here(Net):\n    def __deepcopy__(self, memo): return self\n"
            "    def __reduce__(self): raise RuntimeError('stays here')\ndef model(): return Here()"
        ),
        ["must be something that pickles", "Here does not: RuntimeError: stays here"],
    ),
    "has a layer that refuses what comes to it": (
        "def model(): return [nn.Linear(4, 4), nn.Linear(5, 4)], nn.MSELoss()",
        ["layer 1 (Linear) must take float32 [1, 4]", "RuntimeError: mat1 and mat2 shapes"],
    ),
    "has a loss that refuses what comes to it": (
        "def model(): return [nn.Linear(4, 4)], nn.CrossEntropyLoss(torch.ones(7))",
        ["the loss must take float32 [1, 4] and float32 [1, 4]", "RuntimeError: "],
    ),
    "lies in a file that raises": (
        "model = build\nimport nothing_here",
        ["own.py must run", "No module named 'nothing_here'"],
    ),
    "lies in a file that exits": ("model = build\nraise SystemExit(4)", ["own.py must run", "SystemExit: 4"]),
}


def the_line(caught: pytest.ExceptionInfo[ConfigError]) -> str:
    """The one line of an error that tells of wrong use."""
    assert caught.value.exit_code == 2
    line = str(caught.value)
    assert len(line.splitlines()) == 1
    assert "Traceback" not in line
    return line


@pytest.mark.parametrize(("code", "told"), WRONG_MODELS.values(), ids=WRONG_MODELS.keys())
def test_a_wrong_model_is_named_in_one_line(look: Look, tmp_path: Path, code: str, told: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        look(code, model="model")
    line = the_line(caught)
    assert line.startswith(f"MODEL {tmp_path}/own.py:model: ")
    assert [words for words in told if words not in line] == [], line


WRONG_DATA: Mapping[str, tuple[str, list[str]]] = {
    "raises": ("def wrong(): raise KeyError('nope')", ["must not raise, and raises KeyError: 'nope'"]),
    "needs unknown arguments": (
        "def wrong(path, seed): return Samples()",
        ["must take only micro_batch_size, rank, world_size, seed; it needs path"],
    ),
    "returns nothing": (
        "def wrong(): pass",
        ["must return a Dataset, a DataLoader or an iterable", "returned nothing"],
    ),
    "returns a number": ("def wrong(): return 3", ["returned int"]),
    "returns several sets": ("def wrong(): return {'train': Samples(), 'test': Samples()}", ["returned dict"]),
    "is empty": ("def wrong(): return []", ["the data set must hold samples; it is empty"]),
    "is an empty loader": ("def wrong(): return iter([])", ["gives no micro-batch", "return a Dataset"]),
    "has a sample that raises": (
        "class Bad(Samples):\n    def __getitem__(self, index): raise ValueError('bad\\nsample')\ndef wrong(): return Bad()",
        ["must not raise, and raises ValueError: bad sample"],
    ),
    "has samples that make no batch": (
        "class Bad(Samples):\n    def __getitem__(self, index): return None\ndef wrong(): return Bad()",
        ["must not raise, and raises TypeError: default_collate"],
    ),
    "comes in batches of another size": (
        "def wrong(): return torch.utils.data.DataLoader(Samples(), batch_size=4)",
        ["the 1 sample asked for, and the first has 4", "micro_batch_size"],
    ),
    "ends after three micro-batches": (
        "def wrong():\n    for _ in range(3): yield torch.ones(1, 4), torch.zeros(1, 4)",
        ["must go on for as long as training does, and ends after 3 micro-batches of 1 sample", "return a Dataset"],
    ),
    "exits": (
        "def wrong():\n    yield torch.ones(1, 4), torch.zeros(1, 4)\n    raise SystemExit(3)",
        ["raises SystemExit: 3"],
    ),
    "hangs in the function": (
        "import time\ndef wrong(): time.sleep(60)",
        ["within 1 s (--data-timeout), and none did"],
    ),
    "hangs at the first": (
        "import time\ndef wrong():\n    time.sleep(60)\n    yield torch.ones(1, 4), torch.zeros(1, 4)",
        ["within 1 s (--data-timeout), and none did"],
    ),
    "hangs later": (
        "import time\ndef wrong():\n    yield torch.ones(1, 4), torch.zeros(1, 4)\n    time.sleep(60)",
        ["within 1 s (--data-timeout), and none did"],
    ),
}


@pytest.mark.parametrize(("code", "told"), WRONG_DATA.values(), ids=WRONG_DATA.keys())
def test_wrong_data_is_named_in_one_line(look: Look, tmp_path: Path, code: str, told: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        look(code, data="wrong", longest_wait_s=1.0)
    line = the_line(caught)
    assert line.startswith(f"--data {tmp_path}/own.py:wrong")
    assert [words for words in told if words not in line] == [], line


def test_data_that_is_no_pair_is_named_for_a_list_of_layers(look: Look, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        look("def wrong(): return [torch.ones(4)] * 9", model="layers", data="wrong")
    line = the_line(caught)
    assert (
        line
        == f"--data {tmp_path}/own.py:wrong: batches of a list of layers must be pairs (inputs, labels); got Tensor"
    )


def test_a_model_of_no_library_needs_data(look: Look, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        look(data=None)
    line = the_line(caught)
    assert line.startswith(f"MODEL {tmp_path}/own.py:build: Net is none of transformers' models")
    assert line.endswith("give --data")


@pytest.mark.parametrize(
    ("ending", "told"),
    [
        ("os._exit(7)", "ended with exit code 7 and said nothing"),
        ("os.kill(os.getpid(), 11)", "was ended by SIGSEGV"),
        (
            "print('my last', 'words', flush=True); os._exit(1)",
            "ended with exit code 1 and said nothing; it last printed: my last words",
        ),
    ],
)
def test_a_model_that_ends_its_process_is_told_with_its_own_last_words(
    look: Look, tmp_path: Path, ending: str, told: str
) -> None:
    with pytest.raises(LaunchError, match="last printed: words of another"):
        look("import os\ndef model():\n    print('words of another', flush=True)\n    os._exit(2)", model="model")
    with pytest.raises(LaunchError) as caught:
        look(f"import os\ndef model(): {ending}", model="model")
    assert str(caught.value) == f"MODEL {tmp_path}/own.py:model must be built, and the process that does it {told}"


def test_the_structure_of_layers_is_measured_in_seconds(look: Look) -> None:
    found = look(model="layers")
    assert found.n_parameters == 2 * (4 * 4 + 4)
    assert found.structure.n_trainable is None
    assert found.structure.cost_unit == "seconds"
    assert len(found.structure.layer_costs) == 2
    assert all(0 < seconds < 1 for seconds in found.structure.layer_costs)
    assert (found.structure.whole_because, found.structure.plain_because) == ("", "")
    assert (found.seq_len, found.architecture) == (1, {})


def test_layers_can_be_weighed_by_their_parameters(look: Look) -> None:
    code = (
        "def uneven(): return [nn.Linear(4, 8), lambda hidden: hidden * 2, nn.Linear(8, 4, bias=False)], nn.MSELoss()"
    )
    structure = look(code, model="uneven", balance="parameters").structure
    assert structure.cost_unit == "parameters"
    assert structure.layer_costs == (4 * 8 + 8, 0, 8 * 4)


def test_a_module_of_its_own_is_neither_split_nor_recomputed_and_the_reasons_name_it(look: Look) -> None:
    structure = look().structure
    assert (
        structure.whole_because
        == "Net is neither a list of layers nor of a family that can be split (Bert, DistilBert, GPT2)"
    )
    assert structure.plain_because == "Net has no list of repeated layers to recompute one by one"
    assert (structure.layer_costs, structure.cost_unit, structure.max_depth) == ((), "", 1)


def test_layers_that_pass_on_a_dict_stay_whole(look: Look) -> None:
    code = """
class Begin(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, inputs):
        return {"hidden": self.layer(inputs)}

class End(Begin):
    def forward(self, inputs):
        return self.layer(inputs["hidden"])

def dicts():
    return [Begin(), End()], nn.MSELoss()
"""
    structure = look(code, model="dicts").structure
    assert (
        structure.whole_because
        == "layer 0 (Begin) gives a dict, and only a tensor or a tuple of tensors passes from stage to stage"
    )
    assert structure.max_depth == 1
    assert structure.plain_because == ""


def test_a_transformers_model_from_code_is_known_with_its_architecture_and_needs_no_data(look: Look) -> None:
    found = look(BERT, model="bert", data=None)
    assert found.architecture["model_type"] == "bert"
    assert found.architecture["architectures"] == ["BertForMaskedLM"]
    assert found.seq_len == 32, "as many tokens as it has positions"
    assert len(found.structure.layer_costs) == 1 + 3 + 1, "embedding, blocks, head"
    tied = 100 * 16
    ends = (32 + 2) * 16 + 2 * 16 + (16 * 16 + 16 + 2 * 16 + 100)
    blocks = 3 * (4 * (16 * 16 + 16) + 2 * (16 * 32) + 32 + 16 + 4 * 16)
    assert found.n_parameters == tied + ends + blocks, "tied ones once"


def test_the_length_of_a_sample_is_that_of_the_users_data(look: Look) -> None:
    found = look(BERT, model="bert", data="sentences")
    assert (found.seq_len, found.data_seq_len) == (24, 32)


@pytest.mark.parametrize(("asked", "offered"), [(None, 32), (16, 16)])
def test_the_data_is_offered_the_length_asked_for_or_else_the_models_longest(
    look: Look, asked: int | None, offered: int
) -> None:
    found = look(BERT, model="bert", data="any_length", seq_len=asked)
    assert (found.seq_len, found.data_seq_len) == (offered, offered)


def test_data_for_a_model_of_unknown_length_decides_on_its_own(look: Look) -> None:
    found = look(BERT, data="own_length")
    assert (found.seq_len, found.data_seq_len) == (7, None)


def test_data_that_needs_a_length_where_none_is_known_asks_for_the_option(look: Look) -> None:
    with pytest.raises(ModelError) as caught:
        look(BERT, data="any_length")
    assert the_line(caught).endswith("it needs seq_len (with --seq-len it is given a seq_len)")


def test_samples_longer_than_the_model_has_positions_are_refused(look: Look, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        look(BERT, model="bert", data="too_long")
    line = the_line(caught)
    assert line.startswith(f"--data {tmp_path}/own.py:too_long: ")
    assert "at most the 32 positions of the model; got 33" in line


def test_a_length_beyond_the_positions_of_a_model_from_code_is_refused(look: Look) -> None:
    with pytest.raises(ModelError) as caught:
        look(BERT, model="bert", data=None, seq_len=33)
    assert the_line(caught).endswith("--seq-len must be at least 1 and at most the 32 positions of the model; got 33")


def test_frozen_weights_are_counted_apart_and_keep_the_model_whole(look: Look) -> None:
    found = look(BERT, model="frozen", data=None)
    embeddings = (100 + 32 + 2) * 16 + 2 * 16
    assert found.structure.n_trainable == found.n_parameters - embeddings
    assert found.structure.whole_because.startswith("some of its weights are frozen, ")
    assert found.structure.plain_because == ""
    assert found.structure.layer_costs == ()


def test_the_digest_is_the_same_for_the_same_parameters_alone(look: Look) -> None:
    code = """
def wider():
    net = Net()
    net.layer = nn.Linear(4, 4, bias=False)
    return net

def again():
    torch.manual_seed(7)
    return Net()
"""
    assert look(code).digest == look(code, model="again").digest != look(code, model="wider").digest
    assert len(look(code).digest) == 16


def test_a_preset_has_no_digest_and_keeps_its_length(facts: ModelFacts) -> None:
    assert (facts.digest, facts.architecture, facts.seq_len) == ("", {}, 16)
    assert facts.structure.cost_unit == "seconds"
    assert len(facts.structure.layer_costs) == 2 + 2


def test_versions_are_those_of_the_installed_packages(facts: ModelFacts) -> None:
    import platform
    from importlib import metadata

    assert facts.versions["python"] == platform.python_version()
    for package in ("torch", "deepspeed", "transformers"):
        assert facts.versions[package].partition("+")[0] == metadata.version(package).partition("+")[0]


def test_a_config_of_a_family_that_is_not_known_stays_whole(server: ForkServer) -> None:
    llama = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 100,
        "max_position_embeddings": 32,
    }
    spec = ModelSpec(name="llama", architecture=llama)
    structure = model_facts(Workload(model=spec, n_parameters=0, seq_len=8), server).structure
    assert structure.whole_because.startswith("LlamaForCausalLM is neither a list of layers nor of a family")
    assert structure.plain_because == ""
