"""A model travels without its weights: what arrives in real ranks, and what becomes of the caller's own."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from bo_tuner.objectives.training.job.errors import JobError
from bo_tuner.objectives.training.job.hugging_face import build_structure, model_class
from bo_tuner.objectives.training.job.structure import digest, initialiser, place, structure_of, without_weights
from bo_tuner.objectives.training.sources import write_object
from bo_tuner.workload import ModelSpec, preset_names

if TYPE_CHECKING:
    from tests.objectives.training.job.conftest import Ranks

Strong = Callable[..., nn.Module]
CPU = torch.device("cpu")
TIED = {
    "BertForMaskedLM": ["bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"],
    "GPT2LMHeadModel": ["lm_head.weight", "transformer.wte.weight"],
}


# -- in real ranks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero_stage", [0, 3])
@pytest.mark.parametrize("name", TIED)
def test_ranks_get_the_callers_parameters_ties_and_buffers_and_none_of_its_weights(
    name: str, zero_stage: int, ranks: Ranks, strong: Strong
) -> None:
    model = strong(name)
    assert model.config.use_cache is True  # type: ignore[union-attr]  # a transformers config
    model.register_buffer("kept", torch.arange(5.0) / 7)
    model.register_buffer("passing", torch.tensor([3, 1, 2]), persistent=False)
    structure = structure_of(model)
    assert all(parameter.is_meta for parameter in structure.parameters())
    found = ranks.train(structure, zero_stage=zero_stage, micro_batch_size=4)
    for report in found:
        assert report["shapes"] == {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        assert TIED[name] in report["ties"]
        assert report["ties"] == shared(model)
        check_equal(report["buffers"], dict(model.named_buffers()))
        assert report["persistent"] == sorted(name for name, _ in model.named_buffers() if name in model.state_dict())
        assert "kept" in report["persistent"] and "passing" not in report["persistent"]
        assert report["use_cache"] is False
        assert len(report["losses"]) == 2 and all(0 < loss < 20 for loss in report["losses"])
        check_equal(report["before"], found[0]["before"])
        one, other = (report["after"][tied] for tied in TIED[name])
        assert torch.equal(one, other)
        assert not torch.equal(one, report["before"][TIED[name][0]])
        assert not torch.allclose(one, dict(model.named_parameters(remove_duplicate=False))[TIED[name][0]])


def test_a_recurrent_model_with_a_bare_parameter_and_running_statistics_arrives_whole(ranks: Ranks) -> None:
    model = Recurrent()
    model.norm.get_buffer("running_mean").add_(3.0)
    caller = snapshot(model)
    for zero_stage in (0, 3):
        for report in ranks.train(structure_of(model), data="vectors", n_steps=1, zero_stage=zero_stage):
            assert report["shapes"] == {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
            check_equal(report["buffers"], dict(model.named_buffers()))
            assert torch.isfinite(torch.tensor(report["losses"])).all()
            moved = [name for name in report["after"] if not torch.equal(report["after"][name], report["before"][name])]
            assert set(moved) >= {"lstm.weight_ih_l0", "lstm.weight_hh_l0", "scale"}
    check_untouched(model, caller)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_the_users_optimizer_updates_what_is_not_frozen_and_nothing_else(
    zero_stage: int, ranks: Ranks, strong: Strong
) -> None:
    model = strong("GPT2LMHeadModel")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".h.1." in name or "ln_f" in name)
    trained = sorted(name for name, parameter in model.named_parameters() if parameter.requires_grad)
    n_trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    for report in ranks.train(model, zero_stage=zero_stage):
        assert report["optimizers"][-1] == "CountingSgd"
        assert report["n_optimized"] == n_trained
        assert report["trainable"] == trained
        check_equal(report["before"], dict(model.named_parameters(remove_duplicate=False)))
        moved = {name for name, weight in report["after"].items() if not torch.equal(weight, report["before"][name])}
        assert moved == set(trained)


# -- the caller's own ----------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """A module that keeps its weights in a list of its own, a bare parameter, and statistics that training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, track_running_stats=True).eval()
        self.lstm = nn.LSTM(4, 8)
        self.scale = nn.Parameter(torch.rand(8, 1))
        self.steps = nn.Parameter(torch.tensor([7]), requires_grad=False)

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        self.norm.eval()
        hidden, _ = self.lstm(self.norm(inputs))
        error: Tensor = hidden @ self.scale - labels
        return (error**2).mean()


@pytest.mark.parametrize("name", TIED)
def test_the_callers_model_is_left_as_it_is(name: str, strong: Strong, tmp_path: Path) -> None:
    model = strong(name)
    model(input_ids=torch.ones(1, 4, dtype=torch.long), labels=torch.ones(1, 4, dtype=torch.long)).loss.backward()
    model.config.use_cache = True  # type: ignore[union-attr]  # a transformers config
    model.eval()
    caller = snapshot(model)
    structure = structure_of(model)
    write_object(structure, tmp_path / "model.pkl", "the model")
    place(structure, device=CPU, initialise=initialiser(structure))
    check_untouched(model, caller)
    assert model.config.use_cache is True  # type: ignore[union-attr]
    assert not model.training


def test_a_structure_is_small_whatever_the_model_weighs(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4000, 1000), nn.Linear(1000, 4000))
    write_object(structure_of(model), tmp_path / "model.pkl", "the model")
    assert (tmp_path / "model.pkl").stat().st_size < 10_000


def test_a_structure_keeps_names_types_freezing_and_ties(strong: Strong) -> None:
    model: Any = strong("BertForMaskedLM")
    model.bert.embeddings.requires_grad_(False)
    model.bert.encoder.bfloat16()
    structure = structure_of(model)
    assert digest(structure) == digest(model)
    assert shared(structure) == shared(model) != []
    for (name, one), (other_name, other) in zip(model.named_parameters(), structure.named_parameters(), strict=True):
        assert (name, one.shape, one.dtype, one.requires_grad) == (
            other_name,
            other.shape,
            other.dtype,
            other.requires_grad,
        )


def test_a_model_that_cannot_be_copied_is_refused_by_name() -> None:
    class Guarded(nn.Linear):
        def __deepcopy__(self, memo: Any) -> Any:
            raise RuntimeError("no\ncopies")

    with pytest.raises(JobError) as caught:
        structure_of(Guarded(1, 1))
    assert str(caught.value) == (
        "model Guarded must be one that copy.deepcopy can copy, and it raises RuntimeError: no copies"
    )


# -- digests -------------------------------------------------------------------------------------------------------


def test_a_digest_tells_names_shapes_types_ties_and_freezing_apart_and_not_values() -> None:
    def two(*, tied: bool = False, frozen: bool = False, bias: bool = True, half: bool = False) -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 3, bias=bias), nn.Linear(3, 3, bias=bias))
        if tied:
            model[1].weight = model[0].weight
        if half:
            model[1].bfloat16()
        model[0].weight.requires_grad_(not frozen)
        return model

    changed = [two(), two(tied=True), two(frozen=True), two(bias=False), two(half=True), nn.Linear(3, 3)]
    changed.append(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))
    changed.append(nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)}))
    digests = [digest(model) for model in changed]
    assert len(set(digests)) == len(digests)
    assert all(len(text) == 16 and int(text, 16) >= 0 for text in digests)
    torch.manual_seed(5)
    assert digest(two()) == digests[0]


# -- without weights from the start --------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["bert-tiny", "distilbert-base-uncased", "gpt2"])
def test_a_preset_built_without_weights_has_the_structure_of_the_real_one(preset: str) -> None:
    architecture = {
        **ModelSpec.resolve(preset).architecture,
        "vocab_size": 60,
        "n_embd": 32,
        "n_head": 2,
        "n_layer": 2,
        "dim": 32,
        "n_heads": 2,
        "bos_token_id": 1,
        "eos_token_id": 1,
    }
    bare = build_structure(architecture)
    real = model_class(architecture)(bare.config)
    assert all(parameter.is_meta for parameter in bare.parameters())
    assert not any(parameter.is_meta for parameter in real.parameters())
    assert digest(bare) == digest(real)
    assert shared(bare) == shared(real) != []
    check_equal(dict(bare.named_buffers()), dict(real.named_buffers()))


@pytest.mark.parametrize("preset", sorted(set(preset_names()) - {"gpt2-large"}))
def test_no_preset_takes_memory_for_its_weights(preset: str) -> None:
    architecture = ModelSpec.resolve(preset).architecture
    kept = sum(tensor.nbytes for tensor in tensors_of(build_structure(architecture)) if not tensor.is_meta)
    assert kept < 2**20


def test_modules_built_afterwards_have_weights_again_also_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), without_weights():
        raise ZeroDivisionError
    assert not nn.Linear(2, 2).weight.is_meta


def test_a_meta_buffer_is_refused_since_its_values_are_lost() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("scale", torch.ones(2, device="meta"))
    with pytest.raises(JobError) as caught:
        place(model, device=CPU, initialise=initialiser(model))
    assert str(caught.value) == (
        "buffer scale of Linear must hold values, and is on the meta device: build the model on the CPU"
    )


# -- weights again -------------------------------------------------------------------------------------------------


class Bare(nn.Module):
    """Parameters that no layer of torch's initialises."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.ones(200, 200))
        self.weight = nn.Parameter(torch.zeros(7))
        self.shift = nn.Parameter(torch.ones(7))
        self.count = nn.Parameter(torch.tensor([5]), requires_grad=False)


def test_placed_weights_are_finite_and_follow_the_rules_of_their_modules(strong: Strong) -> None:
    model: Any = nn.ModuleDict({"bare": Bare(), "norm": nn.LayerNorm(5), "linear": nn.Linear(400, 50)})
    model["norm"].bias.data.fill_(3.0)
    placed = structure_of(model)
    place(placed, device=CPU, initialise=initialiser(placed))
    found = {name: parameter.detach() for name, parameter in placed.named_parameters()}
    assert found["bare.matrix"].std() == pytest.approx(0.02, rel=0.1)
    assert torch.equal(found["bare.weight"], torch.ones(7)) and torch.equal(found["bare.shift"], torch.zeros(7))
    assert torch.equal(found["bare.count"], torch.tensor([0]))
    assert torch.equal(found["norm.weight"], torch.ones(5)) and torch.equal(found["norm.bias"], torch.zeros(5))
    assert found["linear.weight"].abs().max() == pytest.approx(1 / 20, rel=0.05)


def test_weights_that_are_there_stay_as_they_are(strong: Strong) -> None:
    model = strong("GPT2LMHeadModel")
    caller = snapshot(model)
    placed = copy.deepcopy(model)
    place(placed, device=CPU, initialise=initialiser(placed))
    check_equal(dict(placed.named_parameters()), caller["parameters"])
    assert shared(placed) == shared(model)


def test_a_class_whose_own_reset_needs_arguments_gets_weights_all_the_same() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = nn.Parameter(torch.ones(3, 3))

        def reset_parameters(self, spread: float) -> None:
            nn.init.normal_(self.matrix, std=spread)

    placed = structure_of(Odd())
    place(placed, device=CPU, initialise=initialiser(placed))
    (matrix,) = placed.parameters()
    assert torch.isfinite(matrix).all() and matrix.std() > 0


def test_rules_that_know_only_some_modules_leave_the_others_to_torch() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(100, 100)
            self.norm = nn.LayerNorm(100)

        def _init_weights(self, module: nn.Module) -> None:
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=3.0)

    placed = structure_of(Partly())
    place(placed, device=CPU, initialise=initialiser(placed))
    assert placed.linear.weight.detach().std() == pytest.approx(3.0, rel=0.1)  # type: ignore[union-attr, operator]
    assert torch.equal(placed.norm.weight, torch.ones(100))  # type: ignore[union-attr, arg-type]


def test_buffers_keep_their_values_though_modules_reset_them_with_their_weights() -> None:
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model(torch.randn(8, 3) + 5)
    placed = pickle.loads(pickle.dumps(structure_of(model)))
    place(placed, device=CPU, initialise=initialiser(placed))
    assert float(model[1].running_mean.abs().min()) > 0.05
    check_equal(dict(placed.named_buffers()), dict(model.named_buffers()))


def shared(model: nn.Module) -> list[list[str]]:
    """Names that share a parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return sorted(sorted(found) for found in names.values() if len(found) > 1)


def tensors_of(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def snapshot(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    return {
        "parameters": {name: parameter.detach().clone() for name, parameter in model.named_parameters()},
        "gradients": {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None},
        "buffers": {name: buffer.clone() for name, buffer in model.named_buffers()},
    }


def check_untouched(model: nn.Module, before: dict[str, dict[str, Tensor]]) -> None:
    now = snapshot(model)
    assert now.keys() == before.keys()
    for kind, values in before.items():
        check_equal(now[kind], values)
    assert all(parameter.device == CPU for parameter in model.parameters())


def check_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Same names, same types, bitwise the same values."""
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
