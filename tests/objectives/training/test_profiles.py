"""Profiles are found on shapes alone; what a real model does on the CPU says whether they are right."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from bo_tuner.objectives.training.job.engine import run_forward
from bo_tuner.objectives.training.job.errors import JobError
from bo_tuner.objectives.training.job.hugging_face import SyntheticData, build_structure, keep_no_caches
from bo_tuner.objectives.training.job.layers import layer_stack, loss_of
from bo_tuner.objectives.training.job.recompute import recompute, recomputed_layers
from bo_tuner.objectives.training.job.split import as_stack
from bo_tuner.objectives.training.job.structure import initialiser, place
from bo_tuner.objectives.training.kernels import DeviceType
from bo_tuner.objectives.training.profiles import profile_of
from bo_tuner.profile import ModelProfile
from bo_tuner.workload import Precision

TYPES: Mapping[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
CPU_ATTENTION: dict[Any, Any] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda *shapes, **_: sdpa_flop_count(*shapes[:3]),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda *shapes, **_: sdpa_backward_flop_count(*shapes[:4])
    ),
}
"""torch's counter knows no products in the CPU's flash attention."""
SEQ_LEN = 48
N_SAMPLES = 4

BERT = {
    "model_type": "bert",
    "architectures": ["BertForMaskedLM"],
    "vocab_size": 500,
    "hidden_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "max_position_embeddings": 64,
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 500,
    "n_embd": 64,
    "n_layer": 5,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 500,
    "hidden_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
}
DISTILBERT = {
    "model_type": "distilbert",
    "architectures": ["DistilBertForMaskedLM"],
    "vocab_size": 500,
    "dim": 64,
    "n_layers": 5,
    "n_heads": 4,
    "hidden_dim": 256,
    "max_position_embeddings": 64,
}
ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    "bert": BERT,
    "bert, attention without dropout": {**BERT, "attention_probs_dropout_prob": 0.0},
    "distilbert": DISTILBERT,
    "gpt2": GPT2,
    "gpt2, attention without dropout": {**GPT2, "attn_pdrop": 0.0},
    "gpt2, eager": {**GPT2, "attn_implementation": "eager"},
    "llama": LLAMA,
    "llama, tied": {**LLAMA, "tie_word_embeddings": True, "num_key_value_heads": 4},
}


def batch_of(architecture: Mapping[str, Any], n_samples: int, *, is_padded: bool = False) -> dict[str, Tensor]:
    """So many times the same sample."""
    sample = SyntheticData(architecture, seq_len=SEQ_LEN)[0]
    batch = {name: torch.stack([column] * n_samples) for name, column in sample.items()}
    if is_padded:
        batch["attention_mask"][:, SEQ_LEN - 9 :] = 0
    return batch


_profiles: dict[str, ModelProfile] = {}


def profile(architecture: Mapping[str, Any], precision: Precision = "fp32", **options: Any) -> ModelProfile:
    """Found once for all tests."""
    key = json.dumps([architecture, precision, options])
    if key not in _profiles:
        batch = batch_of(architecture, 1, is_padded=options.pop("is_padded", False))
        settings: dict[str, Any] = {"name": "small", "precision": precision, "device": "cpu", **options}
        _profiles[key] = profile_of(build_structure(architecture), batch, **settings)
    return _profiles[key]


def real(architecture: Mapping[str, Any], precision: Precision = "fp32") -> nn.Module:
    """A model with weights, as a trial trains it."""
    model = build_structure(architecture)
    keep_no_caches(model)
    place(model, device=torch.device("cpu"), initialise=initialiser(model))
    return model.to(TYPES[precision]).train()


def saved_bytes(model: nn.Module, batch: Any) -> int:
    """What hooks see of a real forward pass, weights and buffers left out."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_of(run_forward(model, batch))
    n_bytes = sum(saved.values())
    del loss
    return n_bytes


def kept(found: ModelProfile, *, is_recomputed: bool = False) -> int:
    return sum(
        layer.recomputed.kept_bytes if is_recomputed and layer.recomputed else layer.kept_bytes
        for layer in found.layers
    )


# -- parameters ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=ARCHITECTURES.keys())
def test_parameters_are_those_of_the_real_model_tied_ones_once(architecture: Mapping[str, Any]) -> None:
    found = profile(architecture)
    assert found.n_parameters == found.n_trainable == sum(weight.numel() for weight in real(architecture).parameters())
    assert (found.hidden, found.heads, found.seq_len, found.element_bytes) == (64, 4, SEQ_LEN, 4)


def test_a_family_is_cut_into_embedding_blocks_and_head_and_tells_the_weights_that_they_share() -> None:
    found = profile(GPT2)
    assert [layer.name for layer in found.layers] == ["embedding", *["block"] * 5, "head"]
    assert [layer.is_block for layer in found.layers] == [False, *[True] * 5, False]
    (tie,) = found.ties
    assert (tie.first, tie.second, tie.n_parameters) == (0, 6, 500 * 64)
    assert (found.n_blocks, found.whole_because) == (5, "")


def test_a_stack_is_profiled_as_the_family_is_that_it_was_made_of() -> None:
    stack = as_stack(build_structure(BERT))
    found = profile_of(stack, batch_of(BERT, 1), name="small", precision="fp32", device="cpu")
    assert found.layers == profile(BERT).layers


def test_a_profile_survives_json_and_layers_that_are_alike_are_told_once() -> None:
    for found in (profile(GPT2), profile(LLAMA, whole_because="it is to stay whole")):
        assert ModelProfile.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    told = profile(GPT2).to_dict()
    assert (len(told["layers"]), len(told["kinds"])) == (7, 4)


class Adapted(nn.Module):
    """A frozen product, and a trained one of low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.down, self.up = nn.Linear(32, 2, bias=False), nn.Linear(2, 32, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.frozen(hidden) + self.up(self.down(hidden)))


def mean_square(outputs: Tensor, labels: Tensor) -> Tensor:
    return ((outputs - labels) ** 2).mean()


def test_frozen_weights_are_told_apart_and_keep_the_model_whole() -> None:
    model = layer_stack([Adapted() for _ in range(3)], mean_square)
    batch = (torch.randn(1, 7, 32), torch.randn(1, 7, 32))
    found = profile_of(model, batch, name="adapted", precision="fp32", device="cpu")
    assert (found.n_parameters, found.n_trainable) == (3 * (32 * 33 + 2 * 64), 3 * 2 * 64)
    assert found.whole_because.startswith("some of its weights are frozen, ")
    (layer,) = found.layers
    assert layer.matmul_flops == 3 * 2 * 7 * (32 * 32 + 2 * 64)
    four = tuple(torch.cat([part] * 4) for part in batch)
    assert 4 * layer.kept_bytes == pytest.approx(saved_bytes(model.train(), four), rel=0.001)


# -- what is kept, and computed -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "is_padded"), [("fp32", False), ("bf16", True)], ids=["fp32, full", "bf16, padded"]
)
@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=ARCHITECTURES.keys())
def test_as_much_is_kept_as_hooks_see_in_a_real_run(
    architecture: Mapping[str, Any], precision: Precision, is_padded: bool
) -> None:
    """In 16 bits the CPU keeps means and deviations of layer norms in 16, and CUDA and the meta device in 32."""
    found = profile(architecture, precision, is_padded=is_padded)
    truth = saved_bytes(real(architecture, precision), batch_of(architecture, N_SAMPLES, is_padded=is_padded))
    assert N_SAMPLES * kept(found) == pytest.approx(truth, rel=0.01)


@pytest.mark.parametrize("architecture", [BERT, DISTILBERT, GPT2], ids=["bert", "distilbert", "gpt2"])
def test_layers_keep_together_what_the_whole_keeps_with_recomputation_and_without(
    architecture: Mapping[str, Any],
) -> None:
    layers, whole = profile(architecture), profile(architecture, whole_because="it is to stay whole")
    assert len(layers.layers) == 7 and len(whole.layers) == 1
    for is_recomputed in (False, True):
        together = kept(layers, is_recomputed=is_recomputed)
        assert together == pytest.approx(kept(whole, is_recomputed=is_recomputed), rel=0.02)
    for name in ("matmul_flops", "attention_flops"):
        assert sum(getattr(layer, name) for layer in layers.layers) == getattr(whole.layers[0], name)
    assert sum(layer.n_operations for layer in layers.layers) == pytest.approx(whole.layers[0].n_operations, rel=0.1)


@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=ARCHITECTURES.keys())
def test_products_are_those_that_torch_counts_in_a_real_run(architecture: Mapping[str, Any]) -> None:
    with FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as counter:
        run_forward(real(architecture), batch_of(architecture, N_SAMPLES))
    layers = profile(architecture).layers
    assert N_SAMPLES * sum(layer.matmul_flops + layer.attention_flops for layer in layers) == counter.get_total_flops()
    assert N_SAMPLES * sum(layer.attention_flops for layer in layers) == 5 * N_SAMPLES * 4 * SEQ_LEN * SEQ_LEN * 64


def test_of_experts_those_that_a_token_goes_to_are_counted_and_kept() -> None:
    """In 16 bits alone: torch multiplies no others on the meta device."""
    architecture = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    found = profile(architecture, "bf16")
    attention, experts = 2 * 64 * 64 + 2 * 64 * 32, 2 * 3 * 64 * 160
    assert found.layers[0].matmul_flops == 2 * SEQ_LEN * (5 * (attention + 4 * 64 + experts) + 64 * 500)
    truth = saved_bytes(real(architecture, "bf16"), batch_of(architecture, N_SAMPLES))
    assert N_SAMPLES * kept(found) == pytest.approx(truth, rel=0.02)


@pytest.mark.parametrize("name", ["bert", "gpt2, attention without dropout", "llama"])
def test_under_recomputation_as_much_is_kept_as_hooks_see_in_a_real_run(name: str) -> None:
    architecture = ARCHITECTURES[name]
    found = profile(architecture, whole_because="it is to stay whole")
    model = real(architecture)
    recompute(recomputed_layers(model))
    truth = saved_bytes(model, batch_of(architecture, N_SAMPLES))
    assert N_SAMPLES * kept(found, is_recomputed=True) == pytest.approx(truth, rel=0.02)
    assert kept(found, is_recomputed=True) < 0.5 * kept(found)


def test_a_recomputed_block_keeps_what_it_is_given_and_has_all_the_rest_for_a_moment() -> None:
    blocks = [layer for layer in profile(GPT2).layers if layer.is_block]
    hidden = SEQ_LEN * 64 * 4
    for block in blocks[1:]:
        assert block.recomputed is not None
        assert block.recomputed.kept_bytes == hidden
        assert block.recomputed.working_bytes > block.kept_bytes - hidden
        assert block.recomputed.share == 1.0
    assert blocks[0].recomputed and blocks[0].recomputed.kept_bytes == hidden + SEQ_LEN * 8, "and the mask of padding"


def test_what_recomputation_repeats_is_the_share_that_torch_counts_in_a_real_run() -> None:
    found = profile(LLAMA).layers[0]
    assert found.recomputed is not None
    totals: list[int] = []
    for is_recomputed in (False, True):
        model = real(LLAMA)
        if is_recomputed:
            recompute(recomputed_layers(model))
        with FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as counter:
            loss_of(run_forward(model, batch_of(LLAMA, N_SAMPLES))).backward()
        totals.append(counter.get_total_flops())
    repeated = (totals[1] - totals[0]) / N_SAMPLES
    assert found.recomputed.share == pytest.approx(repeated / (found.matmul_flops + found.attention_flops), rel=1e-6)
    assert 0.5 < found.recomputed.share < 1, "the last product of a block is not needed again"


def most_allocated(model: nn.Module, batch: Any) -> int:
    """Most bytes that torch's allocator has given out in one forward and backward pass, as its profiler tells."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        loss_of(run_forward(model, batch)).backward()
    assert profiler.profiler is not None
    results: Any = profiler.profiler.kineto_results
    events = sorted((e for e in results.events() if e.name() == "[memory]"), key=lambda event: event.start_ns())
    n_bytes: list[int] = [event.nbytes() for event in events]
    return max(accumulate(n_bytes))


@pytest.mark.parametrize("is_recomputed", [False, True], ids=["plain", "recomputed"])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_kept_and_working_bytes_are_what_a_sample_adds_to_the_peak_of_a_real_run(
    name: str, is_recomputed: bool
) -> None:
    architecture = ARCHITECTURES[name]
    (layer,) = profile(architecture, whole_because="it is to stay whole").layers
    peaks: list[int] = []
    for n_samples in (48, 80):  # so many that activations are more than the gradients of weights
        model = real(architecture)
        if is_recomputed:
            recompute(recomputed_layers(model))
        peaks.append(most_allocated(model, batch_of(architecture, n_samples)))
    told = layer.recomputed if is_recomputed and layer.recomputed else layer
    assert told.kept_bytes + told.working_bytes == pytest.approx((peaks[1] - peaks[0]) / 32, rel=0.01)


def test_an_accelerators_kernels_keep_no_scores_and_one_byte_of_each_dropped_element() -> None:
    architecture = {**GPT2, "activation_function": "gelu"}
    there, here = (profile(architecture, "bf16", device=device).layers[2] for device in ("cuda", "cpu"))
    tokens, scores = SEQ_LEN * 64, 4 * SEQ_LEN * SEQ_LEN
    # The CPU drops weights of attention: it keeps them, the mask and their product; and the masks of two other dropouts in 16 bits.
    assert here.kept_bytes - there.kept_bytes > 3 * 2 * scores + 2 * tokens
    assert here.matmul_flops == there.matmul_flops and here.attention_flops == there.attention_flops
    # Korthikanti 2022, section 4.1: 34 without scores. In fp32 two norms keep mean and deviation, attention a sum for each head.
    assert there.kept_bytes - 34 * tokens == pytest.approx(SEQ_LEN * (2 * 2 + 4) * 4, abs=64)
    # Section 4.2: of those, tensor parallelism leaves 10 whole, and the means.
    assert there.whole_kept_bytes - 10 * tokens == pytest.approx(SEQ_LEN * 2 * 2 * 4, abs=64)


def test_tensor_parallelism_divides_the_scores_of_a_vocabulary_whatever_comes_before_them() -> None:
    head = profile(BERT).layers[-1]
    assert head.kept_bytes > SEQ_LEN * 500 * 4
    assert head.whole_kept_bytes < SEQ_LEN * 2 * 64 * 4


# -- what stays as it is, and what cannot be traced -----------------------------------------------------------------


def test_the_model_is_left_as_it_is() -> None:
    model = real(GPT2)
    before, config = copy.deepcopy(model), copy.deepcopy(model.config)
    profile_of(model, batch_of(GPT2, 1), name="small", precision="bf16", device="cuda")
    assert [type(part) for part in model.modules()] == [type(part) for part in before.modules()]
    for one, other in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(one, other) and one.dtype is torch.float32 and one.grad is None
    assert model.config.to_dict() == config.to_dict()  # type: ignore[operator,union-attr]  # transformers' own


class Reading(nn.Module):
    """Does what its weights say."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.linear(hidden)
        return found.sum() if self.linear.bias[0] > 0 else found.mean()


class Counting(nn.Module):
    """Works sample by sample."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.stack([self.linear(sample).sum() for sample in hidden]).mean()


class Classifying(nn.Module):
    """Of 4 features `n_classes`."""

    def __init__(self, n_classes: int, *, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, n_classes, bias=bias)

    def forward(self, features: Tensor) -> Tensor:
        scores: Tensor = self.linear(features)
        return scores.square().mean()


@pytest.mark.parametrize(("n_classes", "wide_bytes"), [(32, 0), (33, 33 * 4)])
def test_a_product_is_wide_that_makes_over_eight_times_as_many_features_as_it_reads(
    n_classes: int, wide_bytes: int
) -> None:
    model = Classifying(n_classes, bias=True)
    found = profile_of(model, (torch.ones(1, 4),), name="wide", precision="fp32", device="cpu")
    assert [layer.wide_bytes for layer in found.layers] == [wide_bytes]


@pytest.mark.parametrize(("device", "more_bytes"), [("cpu", 20 * 4), ("cuda", 0)])
def test_on_a_cpu_a_bias_is_written_before_its_product(device: DeviceType, more_bytes: int) -> None:
    plain, biased = (
        profile_of(Classifying(20, bias=bias), (torch.ones(1, 4),), name="b", precision="fp32", device=device)
        for bias in (False, True)
    )
    assert biased.layers[0].moved_bytes - plain.layers[0].moved_bytes == more_bytes


def test_a_model_that_reads_its_weights_cannot_be_traced_and_says_so() -> None:
    with pytest.raises(JobError, match=r"^Reading must run where weights have shapes and no values, and raises "):
        profile_of(Reading(), (torch.ones(1, 4),), name="reading", precision="fp32", device="cpu")


def test_a_model_that_works_sample_by_sample_cannot_be_told_by_one_sample() -> None:
    with pytest.raises(JobError, match=r"^the model must do the same for 2 samples as for 3, and does not$"):
        profile_of(Counting(), (torch.ones(1, 4),), name="counting", precision="fp32", device="cpu")


def test_layers_that_cannot_be_cut_are_traced_whole_with_the_reason() -> None:
    class Begin(nn.Linear):
        def forward(self, input: Any) -> Any:
            return {"hidden": super().forward(input)}

    class End(nn.Linear):
        def forward(self, input: Any) -> Any:
            return super().forward(input["hidden"])

    batch = (torch.ones(1, 4), torch.ones(1, 4))
    model = layer_stack([Begin(4, 4), End(4, 4)], mean_square)
    found = profile_of(model, batch, name="dicts", precision="fp32", device="cpu")
    assert found.whole_because.startswith("layer 0 (Begin) gives a dict, and only a tensor")
    assert len(found.layers) == 1 and found.layers[0].matmul_flops == 2 * 2 * 16
