"""`hardware_of`: the rates of a cluster that nobody has measured, from data sheets."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from bo_tuner.errors import ClusterError, ConfigError
from bo_tuner.hardware.catalogue import CATALOGUE, CPU_CORE, DeviceSheet, LinkKind
from bo_tuner.hardware.names import find_device
from bo_tuner.hardware.rates import Hardware, Link, MatmulRate

if TYPE_CHECKING:
    from bo_tuner.cluster import Cluster

__all__ = ["hardware_of"]

_SHARE = 0.62
"""Of the peak, in large products: a first guess, which held on 25 tuning problems of published trainings."""
_HALF_TOKENS_OF_H100 = 300.0
"""On devices that are slower, fewer in proportion; from the same trainings."""
_HALF_WIDTH = 250.0
"""Likewise."""
_OPERATION_S = 5e-6
"""To launch a kernel, with what torch does before it."""
_REACHED: dict[LinkKind, float] = {"NVLink": 0.8, "PCIe": 0.75, "loopback": 1.0}
"""Share of the wire's rate that messages get: NCCL reckons with 20 of 25 GB/s of an NVLink, and 12 of 16 GB/s of PCIe 3
(src/graph/topo.h); what was measured is a message's."""
_REACHED_BY_NETWORK = 0.96
"""As there, 12 of 12.5 GB/s."""
_LATENCY_S: dict[LinkKind, float] = {"NVLink": 3.4e-6, "PCIe": 5.7e-6, "loopback": 150e-6}
"""Of one step of a ring: NCCL's (src/graph/tuning.cc, the protocol "Simple"), and gloo's, measured."""
_LATENCY_OF_NETWORK_S = 9.6e-6
"""As there."""


def hardware_of(cluster: Cluster, precision: str) -> Hardware:
    """The rates of `cluster` in `precision`, from the data sheets of its devices.

    On CPUs the rates of a server's core stand for those of each thread.

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
        memory_bytes_per_s=sheet.memory_bytes_per_s,
        matmul=MatmulRate(
            peak_flops_per_s=peak,
            share=_SHARE,
            half_tokens=_HALF_TOKENS_OF_H100 * peak / CATALOGUE["H100-80GB"].peak_flops_per_s["bf16"],
            half_width=_HALF_WIDTH,
        ),
        inside=Link(
            bytes_per_s=_REACHED[sheet.link_kind] * sheet.link_bytes_per_s, latency_s=_LATENCY_S[sheet.link_kind]
        ),
        between=Link(bytes_per_s=_REACHED_BY_NETWORK * network, latency_s=_LATENCY_OF_NETWORK_S),
        node_size=cluster.n_ranks // cluster.n_nodes,
        operation_s=_OPERATION_S,
        source=f"{sheet.source}; {sheet.node_source}",
    )


def _times(sheet: DeviceSheet, n_cores: int) -> DeviceSheet:
    """Several cores as one device; the link is a process's, whatever its threads."""
    return replace(
        sheet,
        memory_bytes_per_s=sheet.memory_bytes_per_s * n_cores,
        peak_flops_per_s={precision: peak * n_cores for precision, peak in sheet.peak_flops_per_s.items()},
    )
