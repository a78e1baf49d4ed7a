"""`hardware_of`: a cluster's rates from data sheets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bo_tuner.cluster import Cluster
from bo_tuner.errors import ClusterError, ConfigError
from bo_tuner.hardware import REACHED, Hardware, hardware_of


def test_a_described_cluster_has_the_rates_of_its_sheet() -> None:
    hardware = hardware_of(Cluster.described("4x8xH100"), "bf16")
    assert hardware.name == "H100-80GB"
    assert hardware.memory_bytes_per_s == pytest.approx(REACHED.memory * 3350e9)
    assert hardware.matmul.peak_flops_per_s == 989.5e12
    assert hardware.matmul.share == REACHED.matmul["H100"]
    assert hardware.matmul.half_tokens == REACHED.half_tokens_of_h100
    assert hardware.inside.bytes_per_s == pytest.approx(REACHED.nvlink * 450e9)
    assert hardware.between.bytes_per_s == pytest.approx(REACHED.network * 400e9)
    assert hardware.between.latency_s > hardware.inside.latency_s
    assert hardware.node_size == 8
    assert hardware.operation_s == 5e-6
    assert "H100 data sheet" in hardware.source
    assert "DGX H100 data sheet" in hardware.source


def test_a_slower_device_is_filled_by_fewer_tokens() -> None:
    half_tokens = hardware_of(Cluster.described("A100"), "bf16").matmul.half_tokens
    assert half_tokens == pytest.approx(REACHED.half_tokens_of_h100 * 312 / 989.5)


def test_other_shares_than_the_usual_can_be_assumed() -> None:
    half = replace(REACHED, memory=0.5, matmul={}, other_matmul=0.1)
    hardware = hardware_of(Cluster.described("A100"), "bf16", half)
    assert hardware.memory_bytes_per_s == pytest.approx(0.5 * 2039e9)
    assert hardware.matmul.share == 0.1


def test_a_network_that_was_told_holds_instead_of_the_usual() -> None:
    usual = hardware_of(Cluster.described("2x8xA100"), "bf16")
    told = hardware_of(Cluster.described("2x8xA100@400Gb/s"), "bf16")
    assert usual.between.bytes_per_s == pytest.approx(4 * told.between.bytes_per_s)
    assert told.inside == usual.inside


def test_a_gpu_that_was_detected_is_looked_up_by_its_drivers_name() -> None:
    here = Cluster(
        device="cuda",
        n_ranks=2,
        device_name="Tesla V100-SXM2-32GB",
        memory_bytes=34_079_637_504,
        usual_precision="fp16",
    )
    hardware = hardware_of(here, "fp16")
    assert hardware.name == "V100-32GB"
    assert hardware.memory_bytes == here.memory_bytes
    assert hardware.node_size == 2


def test_cpu_ranks_have_the_rates_of_their_threads() -> None:
    one = Cluster(device="cpu", n_ranks=2, device_name="any", memory_bytes=2**33)
    three = replace(one, threads_per_rank=3)
    slow, fast = hardware_of(one, "fp32"), hardware_of(three, "fp32")
    assert fast.matmul.peak_flops_per_s == pytest.approx(3 * slow.matmul.peak_flops_per_s)
    assert fast.memory_bytes_per_s == pytest.approx(3 * slow.memory_bytes_per_s)
    assert fast.inside == slow.inside


def test_a_precision_without_units_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError) as caught:
        hardware_of(Cluster.described("8xV100-16GB"), "bf16")
    assert str(caught.value) == ("--precision must be one that V100-16GB has units for; got bf16: use fp32 or fp16")


def test_a_gpu_without_a_sheet_is_refused_with_the_nearest() -> None:
    here = Cluster(device="cuda", n_ranks=1, device_name="NVIDIA L40S", memory_bytes=2**35)
    with pytest.raises(ClusterError) as caught:
        hardware_of(here, "bf16")
    assert str(caught.value).startswith(
        "rates can be looked up of devices with a data sheet only: no figures are known of 'NVIDIA L40S' (did you mean L4?)"
    )


def test_hardware_survives_its_plain_form() -> None:
    hardware = hardware_of(Cluster.described("2x4xT4"), "fp16")
    assert Hardware.from_dict(hardware.to_dict()) == hardware
