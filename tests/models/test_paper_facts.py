"""What papers measured of pipelines and ZeRO on V100s, and what the models say of the same.

PipeDream-2BW: Narayanan et al., ICML 2021, arXiv 2006.09503v3. Servers of 8 V100 with 16 GB and NVLink (AWS p3.16xlarge, 25 Gb/s), mixed
precision, sequences of 512 tokens, a fork of Megatron-LM, every layer recomputed; rates are read off figures 6 and 10, memory off 7 and 11.
DeepSpeed's autotuning: DeepSpeedExamples, training/autotuning/hf at commit 45b4b71: one node of 16 V100.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from bo_tuner.cluster import Cluster
from bo_tuner.config import TrainConfig
from bo_tuner.hardware import hardware_of
from bo_tuner.models.choices import Choices, Problem
from bo_tuner.models.cost import times_of
from bo_tuner.models.memory import memory_of
from bo_tuner.models.planner import Plan, plan
from bo_tuner.models.shape import profile_of_shape
from bo_tuner.models.software import DEEPSPEED, MEGATRON
from bo_tuner.objectives.training.profiles import workload_profile
from bo_tuner.profile import ModelProfile
from bo_tuner.workload import ModelSpec, Precision, Workload

ONE_SERVER, EIGHT_SERVERS = "8xV100-16GB", "8x8xV100-16GB@25Gb/s"
USABLE = 0.92


def transformer(hidden: int, *, vocab: int = 51_200, causal: bool = True) -> ModelProfile:
    """32 layers with 32 heads: GPT of 2.2 or 3.8 billion parameters, or BERT with its smaller vocabulary."""
    return profile_of_shape(
        name="transformer",
        seq_len=512,
        layers=32,
        hidden=hidden,
        heads=32,
        ffn=4 * hidden,
        vocab=vocab,
        gated_mlp=False,
        tied_embeddings=True,
        causal=causal,
        flash_attention=False,
        n_positions=512,
    )


GPT_22, GPT_38 = transformer(2304), transformer(3072)
BERT_22 = transformer(2304, vocab=30_592, causal=False)


def of_paper(profile: ModelProfile, notation: str) -> Problem:
    cluster = Cluster.described(notation)
    hardware = hardware_of(cluster, "fp16")
    return Problem(
        profile=profile,
        hardware=hardware,
        software=MEGATRON,
        n_ranks=cluster.n_ranks,
    )


def pipeline(schedule: str, *, depth: int = 8, micro_batch: int, n_micro_batches: int) -> TrainConfig:
    return TrainConfig(
        pipeline_depth=depth,
        pipeline_schedule=schedule,
        micro_batch_size=micro_batch,
        grad_accum_steps=n_micro_batches,
        recompute=True,
    )


def needed(given: Problem, config: TrainConfig) -> float:
    """Bytes of the fullest device."""
    return float(memory_of(given, Choices.of([config], given.n_ranks)).total[0])


def rate(given: Problem, config: TrainConfig) -> float:
    """Samples/s."""
    choices = Choices.of([config], given.n_ranks)
    return float(choices.global_batch[0] / times_of(given, choices).total[0])


def test_the_shapes_have_the_parameters_that_the_models_are_called_by() -> None:
    assert GPT_22.n_parameters == pytest.approx(2.2e9, rel=0.03)
    assert GPT_38.n_parameters == pytest.approx(3.8e9, rel=0.03)


@pytest.mark.parametrize("micro_batch", [1, 2, 4, 8])
def test_gpipe_holds_32_samples_of_gpt_on_one_server_and_not_64(micro_batch: int) -> None:
    """Section 5.3: out of memory at batch 64 even with recomputation, and only batch 32 fits."""
    given = of_paper(GPT_22, ONE_SERVER)
    usable = USABLE * given.hardware.memory_bytes
    assert needed(given, pipeline("gpipe", micro_batch=micro_batch, n_micro_batches=32 // micro_batch)) < usable
    assert needed(given, pipeline("gpipe", micro_batch=micro_batch, n_micro_batches=64 // micro_batch)) > usable


def test_gpipe_holds_64_samples_of_bert_whose_vocabulary_is_smaller_and_not_256() -> None:
    """Figure 11."""
    given = of_paper(BERT_22, ONE_SERVER)
    usable = USABLE * given.hardware.memory_bytes
    assert needed(given, pipeline("gpipe", micro_batch=4, n_micro_batches=16)) < usable
    assert needed(given, pipeline("gpipe", micro_batch=4, n_micro_batches=64)) > usable


@pytest.mark.parametrize("profile", [GPT_22, BERT_22], ids=["gpt", "bert"])
@pytest.mark.parametrize("micro_batch", [1, 4, 8])
def test_a_flushed_pipeline_needs_less_than_2bw_and_that_less_than_gpipe(
    profile: ModelProfile, micro_batch: int
) -> None:
    """Section 5.3 and figures 7 and 11: inter-layer model parallelism < flush < 2BW < GPipe.

    Where the head's scores make the last stage the fullest, the first two are alike: it never keeps more than one micro-batch.
    """
    given = of_paper(profile, ONE_SERVER)
    n = 64 // micro_batch
    one_at_a_time = needed(given, pipeline("1f1b", micro_batch=micro_batch, n_micro_batches=1))
    flush, two_bw, gpipe = (
        needed(given, pipeline(schedule, micro_batch=micro_batch, n_micro_batches=n))
        for schedule in ("1f1b", "2bw", "gpipe")
    )
    assert one_at_a_time <= flush < two_bw < gpipe


def test_memory_of_one_server_is_near_the_bars_of_figure_7() -> None:
    given = of_paper(GPT_22, ONE_SERVER)
    for schedule, measured_gb in (("1f1b", 10.1), ("2bw", 11.3)):
        config = pipeline(schedule, micro_batch=8, n_micro_batches=8)
        assert needed(given, config) / 1e9 == pytest.approx(measured_gb, rel=0.1)


@pytest.mark.parametrize(
    ("config", "batch", "measured"),
    [
        (pipeline("2bw", micro_batch=8, n_micro_batches=8), 64, 43),
        (pipeline("2bw", micro_batch=8, n_micro_batches=32), 256, 44),
        (pipeline("1f1b", micro_batch=8, n_micro_batches=8), 64, 26),
        (pipeline("1f1b", micro_batch=8, n_micro_batches=32), 256, 38),
        (pipeline("1f1b", micro_batch=8, n_micro_batches=1), 8, 7),
    ],
    ids=lambda value: value.name if isinstance(value, TrainConfig) else str(value),
)
def test_rates_of_one_server_are_near_the_bars_of_figure_6a(config: TrainConfig, batch: int, measured: float) -> None:
    given = of_paper(GPT_22, ONE_SERVER)
    assert config.global_batch(8) == batch
    assert rate(given, config) == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(("profile", "depth", "measured"), [(GPT_22, 8, 160), (GPT_38, 16, 127)], ids=["2.2B", "3.8B"])
def test_rates_of_eight_servers_are_near_the_bars_of_figures_6b_and_6c(
    profile: ModelProfile, depth: int, measured: float
) -> None:
    given = of_paper(profile, EIGHT_SERVERS)
    config = pipeline("2bw", depth=depth, micro_batch=8, n_micro_batches=depth)
    assert config.global_batch(64) == 512
    assert rate(given, config) == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize("batch", [512, 1024, 2048])
def test_the_planner_cuts_gpt_of_38_into_16_stages(batch: int) -> None:
    assert best_2bw(GPT_38, batch).best(1)[0].config.pipeline_depth == 16


def best_2bw(profile: ModelProfile, batch: int) -> Plan:
    """As the paper plans: width x depth x micro-batch of 2BW, recomputed, without ZeRO."""
    given = of_paper(profile, EIGHT_SERVERS)
    return plan(
        given,
        global_batch=batch,
        limit_bytes=int(USABLE * given.hardware.memory_bytes),
        zero_stages=(0,),
        schedules=("2bw",),
        recompute=(True,),
    )


def test_megatron_collapses_once_a_tensor_group_spans_servers() -> None:
    """Figures 6a and 6c: within a server 1.7 times as slow as 2BW, across two of them 17 times."""
    inside, across = of_paper(GPT_22, ONE_SERVER), of_paper(GPT_38, EIGHT_SERVERS)
    near = rate(inside, TrainConfig(tensor_parallel=8, micro_batch_size=8, grad_accum_steps=8, recompute=True))
    far = rate(across, TrainConfig(tensor_parallel=16, micro_batch_size=8, grad_accum_steps=16, recompute=True))
    piped_inside = rate(inside, pipeline("2bw", micro_batch=8, n_micro_batches=8))
    piped_across = rate(across, pipeline("2bw", depth=16, micro_batch=8, n_micro_batches=16))
    assert 1.2 < piped_inside / near < 2
    assert piped_across / far > 16


BEST_OF_AUTOTUNING = [
    ("distilbert-base-uncased", "DistilBertForSequenceClassification", "fp32", 128, 0, 256, False),
    ("bert-base-uncased", "BertForSequenceClassification", "fp32", 128, 0, 235, True),
    ("bert-large-uncased", "BertForSequenceClassification", "fp32", 128, 1, 93, True),
    ("gpt2", "GPT2LMHeadModel", "fp16", 1024, 1, 15, True),
    ("gpt2-medium", "GPT2LMHeadModel", "fp16", 1024, 1, 6, True),
    ("gpt2-large", "GPT2LMHeadModel", "fp16", 1024, 1, 3, True),
    ("gpt2-xl", "GPT2LMHeadModel", "fp16", 1024, 1, 1, False),
    ("deberta-v2-xxlarge", "DebertaV2ForSequenceClassification", "fp16", 256, 1, 11, True),
]
"""Model, class, precision, tokens, best stage and micro-batch, and whether memory bounded it: distilbert's was by a cap on the global batch,
and 1 is the least there is."""


@pytest.mark.parametrize(
    ("name", "architecture", "precision", "seq_len", "zero_stage", "micro_batch", "is_bounded"),
    BEST_OF_AUTOTUNING,
    ids=lambda value: value if isinstance(value, str) and "For" not in value else "",
)
def test_the_published_best_stage_and_micro_batch_fit_and_twice_as_many_samples_do_not(
    name: str,
    architecture: str,
    precision: Precision,
    seq_len: int,
    zero_stage: int,
    micro_batch: int,
    is_bounded: bool,
) -> None:
    """With attention as transformers 4.12 had it, on cards of 32 GB: a node of 16 V100 is a DGX-2."""
    spec = ModelSpec.resolve(name)
    told = {**spec.architecture, "architectures": [architecture], "attn_implementation": "eager"}
    profile = workload_profile(
        Workload(model=replace(spec, architecture=told), n_parameters=0, seq_len=seq_len, precision=precision)
    )
    cluster = Cluster.described("16xV100-32GB")
    hardware = hardware_of(cluster, precision)
    given = Problem(profile=profile, hardware=hardware, software=DEEPSPEED, n_ranks=16)
    best, twice = (
        needed(given, TrainConfig(zero_stage=zero_stage, micro_batch_size=size))  # type: ignore[arg-type]
        for size in (micro_batch, 2 * micro_batch)
    )
    assert best < cluster.memory_bytes
    assert twice > cluster.memory_bytes or not is_bounded
