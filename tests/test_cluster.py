from __future__ import annotations

import json
import os
from typing import Any

import pytest

from bo_tuner.cluster import Cluster, MemoryLimit
from bo_tuner.errors import ClusterError, ConfigError

N_CORES = len(os.sched_getaffinity(0))


@pytest.fixture
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides the GPUs of a machine that has some, as a user would."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def cluster_of(memory_bytes: int) -> Cluster:
    return Cluster(device="cuda", n_ranks=8, device_name="Tesla V100", memory_bytes=memory_bytes)


# -- detection -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_ranks", range(1, N_CORES + 1))
def test_cpu_ranks_share_cores_and_memory_evenly(n_ranks: int) -> None:
    cluster = Cluster.detect(device="cpu", n_ranks=n_ranks)
    whole = Cluster.detect(device="cpu", n_ranks=1)
    assert (cluster.device, cluster.n_ranks) == ("cpu", n_ranks)
    assert cluster.threads_per_rank == N_CORES // n_ranks
    assert cluster.memory_bytes == whole.memory_bytes // n_ranks
    assert cluster.device_name
    assert cluster.usual_precision == "fp32"


def test_memory_is_what_the_machine_has() -> None:
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 2**28 < Cluster.detect(device="cpu", n_ranks=1).memory_bytes <= physical


@pytest.mark.usefixtures("no_gpus")
def test_without_gpus_auto_is_two_cpu_ranks() -> None:
    assert Cluster.detect() == Cluster.detect(device="cpu", n_ranks=min(2, N_CORES))


def test_more_ranks_than_cores_are_refused_with_the_number_of_cores() -> None:
    with pytest.raises(ClusterError) as caught:
        Cluster.detect(device="cpu", n_ranks=N_CORES + 1)
    assert str(caught.value) == (
        f"--ranks must be at most the {N_CORES} CPU cores this process may use; got {N_CORES + 1}: "
        f"use --ranks {N_CORES} or fewer"
    )


@pytest.mark.parametrize("n_ranks", [0, -2])
def test_fewer_than_one_rank_is_refused(n_ranks: int) -> None:
    with pytest.raises(ClusterError) as caught:
        Cluster.detect(device="cpu", n_ranks=n_ranks)
    assert str(caught.value) == f"--ranks must be at least 1; got {n_ranks}"


def test_an_unknown_device_is_refused_with_those_there_are() -> None:
    with pytest.raises(ClusterError) as caught:
        Cluster.detect(device="tpu")
    assert str(caught.value) == "--device must be auto, cpu or cuda; got 'tpu'"


@pytest.mark.usefixtures("no_gpus")
def test_cuda_without_a_visible_gpu_is_refused_with_the_way_out() -> None:
    with pytest.raises(ClusterError) as caught:
        Cluster.detect(device="cuda")
    assert str(caught.value) == (
        "--device cuda needs a visible NVIDIA GPU, and the driver shows none; use --device cpu"
    )
    assert isinstance(caught.value, ConfigError)


def test_a_cluster_reads_back_from_json_as_the_same() -> None:
    cluster = Cluster(
        device="cuda",
        n_ranks=8,
        device_name="NVIDIA A100-SXM4-40GB",
        memory_bytes=40 * 2**30,
        threads_per_rank=3,
        usual_precision="bf16",
        n_nodes=2,
        network_bytes_per_s=5e10,
    )
    assert Cluster.from_dict(json.loads(json.dumps(cluster.to_dict()))) == cluster


def test_a_cluster_is_named_briefly_for_files_and_fully_for_people() -> None:
    cluster = cluster_of(16 * 2**30)
    assert cluster.label == "8cuda"
    assert str(cluster) == "8 cuda ranks (Tesla V100, 16.00 GiB each)"
    one = Cluster(device="cpu", n_ranks=1, device_name="Xeon", memory_bytes=512 * 2**20)
    assert str(one) == "1 cpu rank (Xeon, 512 MiB each)"


# -- description ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("notation", "n_nodes", "n_ranks", "device_name", "memory_gib", "usual_precision"),
    [
        ("8x8xV100-16GB", 8, 64, "V100-16GB", 16, "fp16"),
        ("8xA100", 1, 8, "A100-80GB", 80, "bf16"),
        ("H100", 1, 1, "H100-80GB", 80, "bf16"),
        (" 2 x 4 x NVIDIA A100-SXM4-40GB ", 2, 8, "A100-40GB", 40, "bf16"),
        ("1x2xRTX 4090", 1, 2, "RTX-4090", 24, "bf16"),
        ("2x4xV100-32GB+T4", 2, 8, "T4 + V100-32GB", 15, "fp16"),
    ],
)
def test_a_cluster_is_described_by_nodes_devices_and_name(
    notation: str, n_nodes: int, n_ranks: int, device_name: str, memory_gib: int, usual_precision: str
) -> None:
    cluster = Cluster.described(notation)
    assert (cluster.device, cluster.n_nodes, cluster.n_ranks) == ("cuda", n_nodes, n_ranks)
    assert (cluster.device_name, cluster.memory_bytes) == (device_name, memory_gib * 2**30)
    assert (cluster.usual_precision, cluster.network_bytes_per_s) == (usual_precision, None)


@pytest.mark.parametrize("notation", ["4x8xH100@400Gb/s", "4 x 8 x H100 @ 400.0 Gb/s"])
def test_the_network_of_a_node_may_be_told(notation: str) -> None:
    cluster = Cluster.described(notation)
    assert cluster.network_bytes_per_s == 50e9
    assert str(cluster) == "32 cuda ranks on 4 nodes (H100-80GB, 80.00 GiB each)"


def test_cpu_cores_can_be_described_too() -> None:
    cluster = Cluster.described("16xCPU-core")
    assert (cluster.device, cluster.n_ranks, cluster.usual_precision) == ("cpu", 16, "fp32")


@pytest.mark.parametrize("notation", ["", "0xA100", "8x0xA100", "A100@", "A100@400GB/s", "A100@0Gb/s", "@400Gb/s"])
def test_a_description_that_cannot_be_read_is_refused_with_examples(notation: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Cluster.described(notation)
    assert str(caught.value) == (
        "--cluster must be nodes x devices x name, as in 8x8xV100-16GB, 8xA100-80GB, H100 or 2x8xA100@400Gb/s; "
        f"got {notation!r}"
    )


@pytest.mark.parametrize(("notation", "device"), [("8x8xV200-16GB", "V200-16GB"), ("8x8x8xA100", "8xA100")])
def test_a_description_of_an_unknown_device_is_refused_with_the_nearest(notation: str, device: str) -> None:
    with pytest.raises(ClusterError) as caught:
        Cluster.described(notation)
    assert str(caught.value).startswith(
        f"--cluster must name devices whose figures are known; got {notation!r}: no figures are known of {device!r} "
        "(did you mean "
    )


# -- the memory limit ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "limit_bytes"),
    [
        (0.5, 500_000_000),
        (1, 1_000_000_000),
        (1.0, 1_000_000_000),
        ("0.25", 250_000_000),
        ("50%", 500_000_000),
        ("12.5 %", 125_000_000),
        ("100%", 1_000_000_000),
        ("800MiB", 800 * 2**20),
        ("800 mib", 800 * 2**20),
        ("0.5GiB", 2**29),
        ("1GB", 10**9),
        ("2.5 MB", 2_500_000),
        ("64KiB", 2**16),
        ("3kb", 3000),
        ("1000000b", 1_000_000),
    ],
)
def test_a_memory_limit_is_a_fraction_of_the_device_or_bytes(given: str | float, limit_bytes: int) -> None:
    assert MemoryLimit.parse(given).bytes_on(cluster_of(10**9)) == limit_bytes


def test_the_usual_limit_is_92_percent() -> None:
    assert MemoryLimit.parse("0.92") == MemoryLimit.parse(0.92) == MemoryLimit(fraction=0.92)
    assert MemoryLimit.parse("92%").bytes_on(cluster_of(100)) == 92


def test_a_limit_that_is_one_already_is_taken_as_it_is() -> None:
    limit = MemoryLimit(limit_bytes=5)
    assert MemoryLimit.parse(limit) is limit


@pytest.mark.parametrize(
    "given",
    [
        0,
        0.0,
        -0.5,
        1.5,
        "1.5",
        "101%",
        "0%",
        "nan",
        "inf",
        "",
        "lots",
        "3g",
        "-1GiB",
        "0GiB",
        "nanGiB",
        "infGiB",
        "GiB",
    ],
)
def test_an_amount_that_cannot_be_used_is_refused_with_examples(given: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        MemoryLimit.parse(given)
    assert str(caught.value) == (
        f'--memory-limit must be a fraction as in 0.92, or bytes a rank as in "3GiB"; got {given!r}'
    )


def test_more_bytes_than_the_device_has_are_refused_and_all_of_them_are_not() -> None:
    cluster = cluster_of(16 * 2**30)
    assert MemoryLimit.parse("16GiB").bytes_on(cluster) == 16 * 2**30
    with pytest.raises(ConfigError) as caught:
        MemoryLimit.parse("17GiB").bytes_on(cluster)
    assert str(caught.value) == (
        "--memory-limit must be at most the 16.00 GiB of one rank; got 17.00 GiB: lower it, or leave it out for 92 %"
    )


# -- the reserve ---------------------------------------------------------------------------------------------------


def test_a_reserve_is_what_stays_free_of_each_device() -> None:
    assert MemoryLimit.of(memory_reserve="2GiB").bytes_on(cluster_of(16 * 2**30)) == 14 * 2**30


def test_with_neither_limit_nor_reserve_it_is_92_percent() -> None:
    assert MemoryLimit.of() == MemoryLimit(fraction=0.92)
    assert MemoryLimit.of(memory_limit="3GiB") == MemoryLimit(limit_bytes=3 * 2**30)


def test_limit_and_reserve_together_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        MemoryLimit.of(memory_limit="0.9", memory_reserve="2GiB")
    assert str(caught.value) == (
        "--memory-limit and --memory-reserve say the same in two ways; got 0.9 and 2GiB: give one"
    )


@pytest.mark.parametrize("given", ["0.1", "8%", "lots", "-2GiB", "0GiB", ""])
def test_a_reserve_that_is_not_bytes_is_refused(given: str) -> None:
    with pytest.raises(ConfigError) as caught:
        MemoryLimit.of(memory_reserve=given)
    assert str(caught.value) == f'--memory-reserve must be bytes as in "2GiB"; got {given!r}'


def test_a_reserve_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        MemoryLimit.of(memory_reserve="16GiB").bytes_on(cluster_of(16 * 2**30))
    assert str(caught.value) == "--memory-reserve must be less than the 16.00 GiB of one rank; got 16.00 GiB: lower it"
