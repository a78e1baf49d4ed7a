"""`Opening`: a study is written down only for what trains, goes on only for the same, and says first what it will do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bo_tuner.budget import Budget
from bo_tuner.cluster import Cluster
from bo_tuner.config import TrainConfig
from bo_tuner.errors import ConfigError, ModelError, StudyMismatchError
from bo_tuner.models.software import DEEPSPEED
from bo_tuner.objectives import ignore_events
from bo_tuner.objectives.launch import ForkServer
from bo_tuner.objectives.memory import Baseline
from bo_tuner.objectives.training import DeepSpeedBackEnd
from bo_tuner.objectives.training.sources import model_spec, named
from bo_tuner.opening import Opening, introduction
from bo_tuner.outcome import Outcome, TrialLimits
from bo_tuner.profile import ModelProfile
from bo_tuner.space import BatchRule, SearchSpace
from bo_tuner.storage import Location, Manifest, StudyStore
from bo_tuner.workload import Workload
from tests.models.gpt import DEVICE

ROOMY = 4 * 2**30
SPACE = SearchSpace(max_micro_batch=2, max_grad_accum=2, pipeline_depths=(1, 2), recompute=(False, True))
CHAIN = """
def chain():
    return [nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 4)], nn.MSELoss()

def wider():
    return [nn.Linear(4, 9), nn.Linear(9, 9), nn.Linear(9, 4)], nn.MSELoss()
"""
FROZEN = """
class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.blocks[0].requires_grad_(False)

    def forward(self, inputs, labels):
        for block in self.blocks:
            inputs = block(inputs)
        return nn.functional.mse_loss(inputs, labels)

def frozen():
    return Frozen()
"""

Opened = Callable[..., Opening]


@pytest.fixture
def opened(own_file: Callable[[str], Path], cluster: Cluster, server: ForkServer, tmp_path: Path) -> Opened:
    """`opened(code, model="build", data="data")` is the opening of a study of functions in own.py, which holds `code` too."""

    def make(
        code: str = "",
        *,
        model: str = "build",
        data: str | None = "data",
        optimizer: str | None = None,
        space: SearchSpace = SPACE,
        on: Cluster = cluster,
        **options: Any,
    ) -> Opening:
        file = own_file(code)
        workload = Workload(
            model=model_spec(f"{file}:{model}" if model.isidentifier() else model),
            n_parameters=0,
            seq_len=1,
            data=None if data is None else named("--data", f"{file}:{data}", server.run_dir),
            optimizer="adamw" if optimizer is None else named("--optimizer", f"{file}:{optimizer}", server.run_dir),
        )
        usual: dict[str, Any] = {"balance": "time", "seq_len": None, "max_depth": None, "data_timeout_s": 30.0}
        return Opening(
            wanted=Manifest(workload=workload, cluster=on, space=space, seed=0),
            store=StudyStore(Location(folder=tmp_path / "studies"), "mine"),
            server=server,
            memory_bytes=ROOMY,
            baseline=Baseline(),
            **{**usual, **options},
        )

    return make


FORWARD = """
class Wrong(Net):
    def forward(self, inputs{more}):
        {does}

def model():
    return Wrong()
"""


def forward(does: str, more: str = ", labels") -> str:
    return FORWARD.format(does=does, more=more)


WRONG_STEPS: Mapping[str, tuple[str, dict[str, str], list[str]]] = {
    "a loss per sample": (
        forward("return (self.layer(inputs) - labels).mean(1).repeat(3)"),
        {"model": "model"},
        ["the loss must be a scalar, and has shape (3,): take its mean"],
    ),
    "a loss without a gradient": (
        forward("return super().forward(inputs, labels).detach()"),
        {"model": "model"},
        ["a gradient must flow from the loss, and none does"],
    ),
    "a number for a loss": (
        forward("return super().forward(inputs, labels).item()"),
        {"model": "model"},
        ["forward must give a loss", "it gave float"],
    ),
    "logits for a loss": (
        forward("return {'logits': self.layer(inputs)}"),
        {"model": "model"},
        ["forward must give a loss", "it gave dict whose loss is NoneType"],
    ),
    "layers with a loss per sample": (
        "def model(): return [nn.Linear(4, 4), nn.Linear(4, 4)], nn.MSELoss(reduction='none')",
        {"model": "model"},
        ["the loss must be a scalar, and has shape (1, 4): take its mean"],
    ),
    "a batch that forward does not take": (
        forward("return self.layer(inputs).mean()", more=""),
        {"model": "model"},
        [
            "TypeError",
            "takes 2 positional arguments but 3 were given",
            "the first batch was (float32 [1, 4], float32 [1, 4])",
        ],
    ),
    "a batch of another shape": (
        "def narrow(): return [(torch.ones(3), torch.zeros(4))] * 9",
        {"data": "narrow"},
        ["RuntimeError", "shapes cannot be multiplied (1x3 and 4x4)", "the first batch was (float32 [1, 3], "],
    ),
    "data that fails on one rank": (
        "def shard(rank):\n    if rank: raise OSError('no shard 1')\n    return Samples()",
        {"data": "shard"},
        ["rank 1: the data function must not raise, and raises OSError: no shard 1"],
    ),
    "an optimizer of nothing": (
        "def sgd(parameters): pass",
        {"optimizer": "sgd"},
        [
            "the optimizer function own.py:sgd must take the parameters and return a torch optimizer; it returned nothing"
        ],
    ),
    "an optimizer that raises": (
        "def sgd(parameters): raise KeyError('nope')",
        {"optimizer": "sgd"},
        ["the optimizer function own.py:sgd must take the parameters, and raises KeyError: 'nope'"],
    ),
    "an optimizer without parameters": (
        "def sgd(): return torch.optim.SGD(Net().parameters(), lr=0.1)",
        {"optimizer": "sgd"},
        ["the optimizer function own.py:sgd must take the parameters, and raises TypeError: sgd() takes 0 positional"],
    ),
    "an optimizer that is none": (
        "def sgd(parameters): return Net()",
        {"optimizer": "sgd"},
        ["return a torch optimizer; it returned Net"],
    ),
    "a process that ends": (
        forward("import os; os._exit(3)"),
        {"model": "model"},
        ["ended with exit code 3 and said nothing"],
    ),
    "a forward that exits": (
        forward("raise SystemExit('bye')"),
        {"model": "model"},
        ["its code calls exit(bye) in train"],
    ),
}


@pytest.mark.parametrize(("code", "functions", "told"), WRONG_STEPS.values(), ids=WRONG_STEPS.keys())
def test_what_fails_in_a_step_is_told_in_one_line_and_nothing_is_written(
    opened: Opened, server: ForkServer, tmp_path: Path, code: str, functions: dict[str, str], told: list[str]
) -> None:
    with pytest.raises(ModelError) as caught:
        opened(code, **functions).open()
    line = str(caught.value)
    assert caught.value.exit_code == 2
    assert line.startswith(f"model own-{functions.get('model', 'build')} must train for one step, and does not: rank ")
    assert [words for words in told if words not in line] == [], line
    assert len(line.splitlines()) == 1
    assert [entry.name for entry in tmp_path.iterdir() if entry.name != "__pycache__"] == ["own.py"]
    assert list(server.run_dir.glob("trial-*")) == []


def test_more_stages_than_layers_are_refused_and_nothing_is_written(
    opened: Opened, cluster: Cluster, tmp_path: Path
) -> None:
    four = replace(cluster, n_ranks=4)
    space = replace(SPACE, pipeline_depths=(1, 2, 4))
    with pytest.raises(ConfigError) as caught:
        opened(model="layers", on=four, space=space, max_depth=4).open()
    assert str(caught.value) == "--max-depth must be at most the 2 layers of own-layers; got 4"
    assert caught.value.exit_code == 2
    assert not (tmp_path / "studies").exists()


def test_a_model_that_stays_whole_takes_any_depth(opened: Opened) -> None:
    manifest = opened(max_depth=2).open()
    assert manifest.space.pipeline_depths == (1,)
    assert manifest.space.recompute == (False,)


def test_a_chain_of_layers_is_searched_in_pipelines_and_with_recomputation(opened: Opened) -> None:
    manifest = opened(CHAIN, model="chain").open()
    names = {config.layout.name for config in manifest.space.candidates(manifest.cluster, DeepSpeedBackEnd())}
    whole = {f"z{stage}_gas1_mbs1" for stage in range(4)}
    piped = {f"z{stage}_pp2_gas{accum}_mbs1" for stage in (0, 1) for accum in (1, 2)}
    plain = whole | piped
    assert names == plain | {f"{name}_rc" for name in plain}
    workload = manifest.workload
    assert (workload.model.source, workload.model.name) == ("function", "own-chain")
    assert workload.n_parameters == (4 * 8 + 8) + (8 * 8 + 8) + (8 * 4 + 4)
    assert len(workload.structure.layer_costs) == 3
    assert workload.model.digest


def test_the_stored_manifest_is_the_one_that_is_opened_again(opened: Opened) -> None:
    first = opened(CHAIN, model="chain").open()
    again = opened(CHAIN, model="chain").open()
    assert again == first
    assert opened(CHAIN, model="chain").store.manifest() == first


def test_the_length_of_the_users_samples_is_kept_and_another_is_refused(opened: Opened) -> None:
    code = "def tokens(): return [(torch.arange(7), torch.zeros(4))] * 9\nclass Any(Net):\n    def forward(self, tokens, labels):\n"
    code += "        return super().forward(tokens[:, :4].float(), labels)\ndef model(): return Any()\n"
    assert opened(code, model="model", data="tokens").open().workload.seq_len == 7
    assert opened(code, model="model", data="tokens").open().workload.seq_len == 7
    with pytest.raises(StudyMismatchError, match="seq_len is 7, not 8"):
        opened(code, model="model", data="tokens", seq_len=8).open()


def test_a_study_of_a_users_code_is_refused_for_anything_else(opened: Opened) -> None:
    code = CHAIN + "def more(): return Samples()\ndef sgd(parameters): return torch.optim.SGD(parameters, lr=0.1)\n"
    opened(code, model="chain").open()
    changes: dict[str, dict[str, Any]] = {
        "model name is own-chain, not own-wider": {"model": "wider"},
        "data is ": {"data": "more"},
        "optimizer is adamw, not ": {"optimizer": "sgd"},
        "space recompute is [False, True], not [False]": {"space": replace(SPACE, recompute=(False,))},
        "space pipeline_depths is [1, 2], not [1]": {"space": replace(SPACE, pipeline_depths=(1,)), "max_depth": 1},
        "structure cost_unit is seconds, not parameters": {"balance": "parameters"},
    }
    for difference, change in changes.items():
        with pytest.raises(StudyMismatchError) as caught:
            opened(code, **{"model": "chain", **change}).open()
        line = str(caught.value)
        assert "study 'mine' exists for something else" in line
        assert difference in line
        assert line.endswith("or start another study with --study NAME")
        assert len(line.splitlines()) == 1


def test_a_function_that_makes_another_model_now_is_refused(opened: Opened) -> None:
    opened(CHAIN, model="chain").open()
    with pytest.raises(StudyMismatchError) as caught:
        opened(CHAIN.replace("8", "6"), model="chain").open()
    assert "was tuned with other code (the forward pass of a sample takes 168 FLOPs, not 256)" in str(caught.value)


def test_a_function_whose_model_computes_more_now_is_refused(opened: Opened, tmp_path: Path) -> None:
    depth = tmp_path / "depth"
    code = f"class Deep(Net):\n    def forward(self, inputs, labels):\n        for _ in range(int(open({str(depth)!r}).read())):\n"
    code += "            inputs = self.layer(inputs)\n        return nn.functional.mse_loss(inputs, labels)\ndef model(): return Deep()\n"
    depth.write_text("1", encoding="ascii")
    opened(code, model="model").open()
    depth.write_text("12", encoding="ascii")
    with pytest.raises(StudyMismatchError, match=r"the forward pass of a sample takes 384 FLOPs, not 32\)"):
        opened(code, model="model").open()


def test_another_version_is_told_in_a_line_and_the_study_goes_on(
    opened: Opened, capsys: pytest.CaptureFixture[str]
) -> None:
    opening = opened(model="bert-tiny", data=None)
    stored = opening.open()
    old = {**stored.to_dict(), "versions": {**stored.versions, "torch": "1.0"}}
    opening.store.study.set_user_attr("manifest", old)
    again = opened(model="bert-tiny", data=None)
    again.open()
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("torch 1.0 is now ")]
    assert len(lines) == 1


def test_a_preset_with_the_users_data_takes_the_length_of_its_samples(opened: Opened) -> None:
    code = """
def sentences(seq_len):
    assert seq_len == 512
    return [{"input_ids": torch.arange(9), "labels": torch.arange(9)}] * 9
"""
    opening = opened(code, model="bert-tiny", data="sentences")
    manifest = opening.open()
    assert (manifest.workload.model.name, manifest.workload.model.source) == ("bert-tiny", "config")
    assert (manifest.workload.seq_len, manifest.workload.data_seq_len) == (9, 512)
    assert opened(code, model="bert-tiny", data="sentences").open() == manifest


def test_model_and_machine_are_known_before_the_first_trial_and_kept_for_the_next_run(
    opened: Opened, capsys: pytest.CaptureFixture[str]
) -> None:
    opening = opened(CHAIN, model="chain")
    manifest = opening.open()
    problem = opening.problem(manifest)
    assert problem is not None
    assert (problem.n_ranks, problem.hardware.source, problem.software) == (2, "measured here", DEEPSPEED)
    assert [layer.n_parameters for layer in problem.profile.layers] == [4 * 8 + 8, 8 * 8 + 8, 8 * 4 + 4]
    assert problem.layer_costs == manifest.workload.structure.layer_costs
    assert "measuring how fast this machine is ..." in capsys.readouterr().err
    again = opened(CHAIN, model="chain")
    assert again.problem(again.open()) == problem, "two measurements are never the same"
    assert "measuring" not in capsys.readouterr().err


def test_a_study_that_keeps_neither_finds_both_out(
    opened: Opened, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    opening = opened(CHAIN, model="chain")
    manifest = opening.open()
    store = StudyStore(Location(folder=tmp_path / "studies"), "other")
    store.create(manifest)
    store.note_calibration(DEVICE)
    problem = replace(opening, store=store).problem(manifest)
    assert problem is not None
    assert (problem.profile, problem.hardware) == (opening.store.profile(), DEVICE)
    assert store.profile() == problem.profile
    assert capsys.readouterr().err.count("building own-chain once, to look at it ...") == 2


def test_a_model_that_breaks_while_it_is_traced_is_searched_without_expectation(
    opened: Opened, capsys: pytest.CaptureFixture[str]
) -> None:
    code = forward("import os; self.layer.weight.is_meta and os._exit(3); return super().forward(inputs, labels)")
    told = "no expectation: the process that traces own-model ended with exit code 3 and said nothing\n"
    for _ in range(2):
        opening = opened(code, model="model")
        assert opening.problem(opening.open()) is None
        assert capsys.readouterr().err.endswith(told)
        assert opening.store.calibration() is None, "nothing was measured for nothing"


def test_layers_that_cannot_be_traced_one_by_one_leave_no_expectation(
    opened: Opened, capsys: pytest.CaptureFixture[str]
) -> None:
    opening = opened(CHAIN, model="chain")
    manifest = opening.open()
    found = opening.store.profile()
    assert isinstance(found, ModelProfile)
    opening.store.note_profile(replace(found, layers=found.layers[:1], whole_because="layer 1 (Linear) looks back"))
    assert opening.problem(manifest) is None
    assert capsys.readouterr().err.endswith("no expectation: layer 1 (Linear) looks back\n")


def test_a_machine_that_cannot_be_measured_leaves_no_expectation(
    opened: Opened, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    opening = opened(model="bert-tiny", data=None, on=replace(cluster, n_ranks=252))
    assert opening.problem(opening.open()) is None
    assert capsys.readouterr().err.endswith("no expectation: one machine runs at most 250 ranks; got 252\n")


def told(opening: Opening) -> list[str]:
    manifest = opening.open()
    text = introduction(opening.store, manifest, Budget.parse(3), memory_bytes=opening.memory_bytes, n_candidates=5)
    return text.splitlines()


def test_the_introduction_of_a_chain_tells_its_size_data_and_pipelines(opened: Opened, tmp_path: Path) -> None:
    lines = told(opened(CHAIN, model="chain"))
    assert "model own-chain, 148 parameters, fp32, adamw" in lines
    assert f"data {tmp_path}/own.py:data" in lines
    assert "pipelines of up to 2 stages, 3 layers balanced by measured time" in lines
    assert not any(line.startswith(("no pipelines", "no recomputation")) for line in lines)


def test_the_introduction_says_what_layers_are_balanced_by(opened: Opened) -> None:
    lines = told(opened(CHAIN, model="chain", balance="parameters"))
    assert "pipelines of up to 2 stages, 3 layers balanced by parameters" in lines


def test_the_introduction_says_nothing_of_pipelines_where_none_are_wanted(opened: Opened) -> None:
    lines = told(opened(CHAIN, model="chain", space=replace(SPACE, pipeline_depths=(1,)), max_depth=1))
    assert not any("pipelines" in line for line in lines)


def test_the_introduction_of_a_model_in_part_frozen_says_why_it_stays_whole(opened: Opened) -> None:
    lines = told(opened(FROZEN, model="frozen"))
    assert "model own-frozen, 40 parameters, 20 of them trained, fp32, adamw" in lines
    assert any(line.startswith("no pipelines: some of its weights are frozen") for line in lines)
    assert not any(line.startswith("no recomputation") for line in lines)


def test_the_introduction_of_a_plain_module_says_why_nothing_is_split_or_recomputed(opened: Opened) -> None:
    lines = told(opened())
    assert (
        "no pipelines: Net is neither a list of layers nor of a family that can be split (Bert, DistilBert, GPT2)"
        in lines
    )
    assert "no recomputation: Net has no list of repeated layers to recompute one by one" in lines


def test_the_introduction_of_a_preset_tells_its_length_and_no_data(opened: Opened) -> None:
    opening = opened(model="bert-tiny", data=None)
    opening = replace(opening, wanted=replace(opening.wanted, workload=replace(opening.wanted.workload, seq_len=16)))
    lines = told(opening)
    assert "model bert-tiny, 4.4 M parameters, sequence length 16, fp32, adamw" in lines
    assert "pipelines of up to 2 stages, 4 layers balanced by measured time" in lines
    assert not any(line.startswith("data") for line in lines)


STREAMS = """
import time

def ending():
    for _ in range(10):
        yield torch.ones(1, 4), torch.zeros(1, 4)

def hanging():
    yield from ending()
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("data", "outcome", "words"),
    [
        ("ending", Outcome.FAILED, "the data must go on for as long as training does, and ends after 10 micro-batches"),
        ("hanging", Outcome.TIMEOUT, "the data gave no micro-batch for 2 s (--data-timeout)"),
    ],
)
def test_data_that_ends_or_hangs_in_the_middle_ends_a_trial_with_the_reason(
    opened: Opened, tmp_path: Path, data: str, outcome: Outcome, words: str
) -> None:
    opening = opened(STREAMS, data=data, data_timeout_s=2.0)
    objective = opening.objective(opening.open().workload, log_dir=tmp_path)
    limits = TrialLimits(memory_bytes=ROOMY, max_steps=20, deadline_s=60.0)
    result = objective(TrainConfig(), limits=limits, on_event=ignore_events)
    assert result.outcome is outcome, result.reason
    assert words in result.reason


def test_a_batch_that_only_a_pipeline_would_meet_is_refused_for_a_model_that_cannot_be_split(opened: Opened) -> None:
    odd = replace(SPACE, batch_rule=BatchRule.of(global_batch=7))
    opening = opened(space=odd)
    with pytest.raises(
        ConfigError, match="--global-batch must be a multiple of the 2 data-parallel ranks; got 7: use 6"
    ):
        opening.open()
    assert opening.store.manifest() is None
    assert opened(CHAIN, model="chain", space=odd).open().space.pipeline_depths == (1, 2)
