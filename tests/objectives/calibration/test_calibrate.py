"""`calibrate`: real ranks measure this machine at the same time."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict, replace

import pytest

from bo_tuner.cluster import Cluster
from bo_tuner.errors import LaunchError
from bo_tuner.hardware import Link, MatmulRate, ProductReading
from bo_tuner.objectives.calibration import LinkReading, Readings, WideReading, calibrate
from bo_tuner.objectives.launch import ForkServer


@pytest.fixture(scope="module")
def readings(server: ForkServer, cluster: Cluster) -> Readings:
    return calibrate(server, cluster, precision="fp32")


def test_products_of_many_sizes_are_timed(readings: Readings) -> None:
    assert len(readings.products) >= 8
    assert len({product.n_tokens for product in readings.products}) >= 3
    assert len({product.width for product in readings.products}) >= 3


def test_products_grow_faster_with_their_size_from_the_smallest_on(readings: Readings) -> None:
    smallest = min(readings.products, key=lambda product: product.flops)
    fastest = max(product.flops_per_s for product in readings.products)
    assert 1e8 < smallest.flops_per_s < 0.8 * fastest
    assert fastest < 1e13, "no CPU is that fast"


def test_the_fitted_curve_is_near_what_was_measured(readings: Readings, cluster: Cluster) -> None:
    rate = readings.hardware(cluster).matmul
    errors = [
        abs(rate.flops_per_s(n_tokens=product.n_tokens, width=product.width) / product.flops_per_s - 1)
        for product in readings.products
    ]
    assert statistics.median(errors) < 0.35, errors


def test_the_rates_are_possible(readings: Readings, cluster: Cluster) -> None:
    hardware = readings.hardware(cluster)
    assert 1e8 < hardware.memory_bytes_per_s < 1e12
    assert 1e-7 < hardware.operation_s < 1e-3
    assert 1e6 < hardware.inside.bytes_per_s < hardware.memory_bytes_per_s
    assert 1e-6 < hardware.inside.latency_s < 0.1
    assert hardware.between == hardware.inside
    assert hardware.source == "measured here"
    assert hardware.update_s is not None
    assert 1e-10 < hardware.update_s < 1e-6
    assert 0 <= hardware.wide_s_per_byte < 1e-7
    assert hardware.name == cluster.device_name
    assert hardware.node_size == 2


def test_a_large_exchange_takes_longer_than_a_small_one(readings: Readings) -> None:
    for reading in (readings.all_reduce, readings.all_gather, readings.message):
        assert reading is not None
        assert reading.large_s > reading.small_s > 0


def test_one_rank_has_nothing_to_exchange(server: ForkServer, cluster: Cluster) -> None:
    alone = replace(cluster, n_ranks=1)
    readings = calibrate(server, alone, precision="bf16")
    assert (readings.all_reduce, readings.all_gather, readings.message) == (None, None, None)
    hardware = readings.hardware(alone)
    assert hardware.inside == Link(bytes_per_s=readings.memory_bytes_per_s, latency_s=0.0)
    assert hardware.gather_bytes_per_s is None


def test_a_rank_that_fails_is_named_with_its_last_words(server: ForkServer, cluster: Cluster) -> None:
    with pytest.raises(LaunchError) as caught:
        calibrate(server, cluster, precision="fp32", target="misbehave:no_such_function")
    assert str(caught.value).startswith(
        "2 ranks must measure the machine, and rank 0 gave no answer; it last printed: "
    )
    assert "AttributeError" in str(caught.value)


def test_ranks_that_take_too_long_are_given_up_on(server: ForkServer, cluster: Cluster) -> None:
    began = time.monotonic()
    with pytest.raises(LaunchError, match="rank 0 gave no answer"):
        calibrate(server, cluster, precision="fp32", longest_s=0.2)
    assert time.monotonic() - began < 30


# -- what follows from readings ------------------------------------------------------------------------------------

EXCHANGE = LinkReading(small_bytes=1024, small_s=0.001, large_bytes=1024 + 10**7, large_s=0.011)
WIDE = WideReading(n_tokens=100, width=10, n_columns=1000, element_bytes=4, seconds=0.03)
RANK = Readings(
    products=(
        ProductReading(n_tokens=64, width=256, seconds=0.02),
        ProductReading(n_tokens=128, width=256, seconds=0.03),
    ),
    wide=WIDE,
    memory_bytes_per_s=8e9,
    update_s=4e-9,
    operation_s=2e-6,
    all_reduce=EXCHANGE,
    all_gather=EXCHANGE,
    message=EXCHANGE,
)
OTHER = Readings(
    products=(
        ProductReading(n_tokens=64, width=256, seconds=0.01),
        ProductReading(n_tokens=128, width=256, seconds=0.04),
    ),
    wide=replace(WIDE, seconds=0.02),
    memory_bytes_per_s=9e9,
    update_s=3e-9,
    operation_s=1e-6,
    all_reduce=replace(EXCHANGE, small_s=0.002),
    all_gather=replace(EXCHANGE, large_s=0.021),
    message=replace(EXCHANGE, large_s=0.005),
)


def test_the_slowest_rank_counts_in_every_figure() -> None:
    slowest = Readings.slowest([RANK, OTHER])
    assert [product.seconds for product in slowest.products] == [0.02, 0.04]
    assert (slowest.memory_bytes_per_s, slowest.operation_s, slowest.update_s) == (8e9, 2e-6, 4e-9)
    assert slowest.wide == WIDE
    assert slowest.all_reduce == replace(EXCHANGE, small_s=0.002)
    assert slowest.all_gather == replace(EXCHANGE, large_s=0.021)
    assert slowest.message == EXCHANGE


def test_the_fastest_round_counts_in_every_figure() -> None:
    fastest = Readings.fastest([RANK, OTHER])
    assert [product.seconds for product in fastest.products] == [0.01, 0.03]
    assert (fastest.memory_bytes_per_s, fastest.operation_s, fastest.update_s) == (9e9, 1e-6, 3e-9)
    assert fastest.wide == replace(WIDE, seconds=0.02)
    assert fastest.all_reduce == EXCHANGE
    assert fastest.message == replace(EXCHANGE, large_s=0.005)


@pytest.mark.parametrize(("n_ranks", "bytes_per_s", "latency_s"), [(2, 1e9, 0.0005), (4, 1.5e9, 0.001 / 6)])
def test_an_all_reduce_goes_round_the_ring_twice(n_ranks: int, bytes_per_s: float, latency_s: float) -> None:
    cluster = Cluster(device="cpu", n_ranks=n_ranks, device_name="made up", memory_bytes=2**30)
    hardware = RANK.hardware(cluster)
    link = hardware.inside
    assert link.bytes_per_s == pytest.approx(bytes_per_s)
    assert hardware.gather_bytes_per_s == pytest.approx(bytes_per_s / 2), "an all-gather goes round once"
    assert link.latency_s == pytest.approx(latency_s)


def test_products_that_the_host_holds_up_are_left_out_of_the_curve() -> None:
    held_up = ProductReading(n_tokens=16, width=64, seconds=11e-6)
    cluster = Cluster(device="cpu", n_ranks=2, device_name="made up", memory_bytes=2**30)
    with_it = replace(RANK, products=(*RANK.products, held_up))
    assert with_it.hardware(cluster).matmul == RANK.hardware(cluster).matmul


def test_where_the_host_holds_up_all_products_they_are_all_there_is() -> None:
    cluster = Cluster(device="cpu", n_ranks=2, device_name="made up", memory_bytes=2**30)
    slow = replace(RANK, operation_s=1.0)
    assert slow.hardware(cluster).matmul == RANK.hardware(cluster).matmul


def test_a_wide_product_tells_what_it_takes_beyond_its_arithmetic() -> None:
    arithmetic_s = 6 * 100 * 10 * 1000 / 6e8
    rate = MatmulRate(peak_flops_per_s=6e8, share=1.0, half_tokens=0.0, half_width=0.0)
    assert WIDE.s_per_byte(rate) == pytest.approx((0.03 - arithmetic_s) / (3 * 100 * 1000 * 4))
    assert replace(WIDE, seconds=arithmetic_s / 2).s_per_byte(rate) == 0


def test_readings_survive_json() -> None:
    assert Readings.from_dict(json.loads(json.dumps(asdict(RANK)))) == RANK
    alone = replace(RANK, all_reduce=None, all_gather=None, message=None)
    assert Readings.from_dict(json.loads(json.dumps(asdict(alone)))) == alone
