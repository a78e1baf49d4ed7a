"""`hardware_of`: the rates of a cluster that nobody has measured, from data sheets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from bo_tuner.errors import ClusterError, ConfigError
from bo_tuner.hardware.catalogue import CATALOGUE, CPU_CORE, DeviceSheet
from bo_tuner.hardware.names import find_device
from bo_tuner.hardware.rates import Hardware, Link, MatmulRate

if TYPE_CHECKING:
    from bo_tuner.cluster import Cluster

__all__ = ["REACHED", "Reached", "hardware_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """What trainings get of the figures of data sheets. `benchmarks/fit.py` fits those called fitted, on calibration groups only."""

    matmul: Mapping[str, float] = field(
        default_factory=lambda: {"A100": 0.88, "A800": 0.88, "H100": 0.56, "H200": 0.56}
    )
    """Share of the peak in large products, by the first word of a device's name. Fitted."""
    other_matmul: float = 0.7
    """Of devices that no calibration group ran on: between those."""
    half_tokens_of_h100: float = 128.0
    """Tokens at which half the rate is reached; on slower devices fewer in proportion. Fitted."""
    half_width: float = 71.0
    """Width of a matrix at which half the rate is reached. Fitted."""
    attention: float = 0.34
    """Share of the peak in products of activations. Fitted."""
    memory: float = 0.87
    """Share of the bandwidth that element-wise kernels get. Fitted."""
    nvlink: float = 0.82
    """Share of the wire's rate that collectives get; NCCL itself reckons with 20 of 25 GB/s (src/graph/topo.h). Fitted."""
    pcie: float = 0.75
    """NCCL reckons with 12 of 16 GB/s of PCIe 3 (src/graph/topo.h)."""
    network: float = 0.50
    """Of all network cards of a node together. Fitted."""
    near_latency_s: float = 1.1e-5
    """Of a step of a collective inside a node. Fitted."""
    far_latency_s: float = 2.5e-5
    """Between nodes. Fitted."""
    loopback_latency_s: float = 1.5e-4
    """Of a gloo message on one machine. Measured."""
    operation_s: float = 5e-6
    """Host time to launch a kernel, with what torch does before it. Guessed once; `Software.host_factor` is fitted on top."""


REACHED = Reached()
"""What is assumed where nobody has measured."""


def hardware_of(cluster: Cluster, precision: str, reached: Reached = REACHED) -> Hardware:
    """The rates of `cluster` in `precision`, from the data sheets of its devices.

    On CPUs the rates of a server's core stand for those of each thread.

    Args:
        cluster: Here or elsewhere.
        precision: `fp32`, `bf16` or `fp16`.
        reached: What trainings get of those figures.

    Raises:
        ClusterError: The device is in no data sheet that we have; the text names the nearest.
        ConfigError: It has no units for the precision.
    """
    if cluster.device == "cpu":
        sheet = _times(CPU_CORE, cluster.threads_per_rank)
    else:
        found, note = find_device(cluster.device_name)
        if found is None:
            raise ClusterError(f"rates can be looked up of devices with a data sheet only: {note}")
        sheet = found
    peak = sheet.peak_flops_per_s.get(precision)
    if peak is None:
        raise ConfigError(
            f"--precision must be one that {sheet.name} has units for; got {precision}: "
            f"use {' or '.join(sheet.peak_flops_per_s)}"
        )
    network = cluster.network_bytes_per_s or sheet.network_bytes_per_s
    return Hardware(
        name=sheet.name,
        memory_bytes=cluster.memory_bytes,
        memory_bytes_per_s=sheet.memory_bytes_per_s * reached.memory,
        matmul=MatmulRate(
            peak_flops_per_s=peak,
            share=reached.matmul.get(sheet.name.partition("-")[0], reached.other_matmul),
            half_tokens=reached.half_tokens_of_h100 * peak / CATALOGUE["H100-80GB"].peak_flops_per_s["bf16"],
            half_width=reached.half_width,
        ),
        attention_flops_per_s=peak * reached.attention,
        inside=_inside(sheet, reached),
        between=Link(bytes_per_s=reached.network * network, latency_s=reached.far_latency_s),
        node_size=cluster.n_ranks // cluster.n_nodes,
        operation_s=reached.operation_s,
        launches_ahead=cluster.device != "cpu",
        source=f"{sheet.source}; {_network_source(cluster, sheet)}",
    )


def _network_source(cluster: Cluster, sheet: DeviceSheet) -> str:
    given = cluster.network_bytes_per_s
    return sheet.node_source if given is None else f"{given * 8 / 1e9:g} Gb/s a node, as given"


def _inside(sheet: DeviceSheet, reached: Reached) -> Link:
    if sheet.link_kind == "loopback":
        return Link(bytes_per_s=sheet.link_bytes_per_s, latency_s=reached.loopback_latency_s)
    share = reached.nvlink if sheet.link_kind == "NVLink" else reached.pcie
    return Link(bytes_per_s=share * sheet.link_bytes_per_s, latency_s=reached.near_latency_s)


def _times(sheet: DeviceSheet, n_cores: int) -> DeviceSheet:
    """Several cores as one device; the link is a process's, whatever its threads."""
    return replace(
        sheet,
        memory_bytes_per_s=sheet.memory_bytes_per_s * n_cores,
        peak_flops_per_s={precision: peak * n_cores for precision, peak in sheet.peak_flops_per_s.items()},
    )
