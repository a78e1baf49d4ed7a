"""`DeviceSheet`: what makers say of their devices, and how machines with them are usually built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["CATALOGUE", "CPU_CORE", "DeviceSheet", "LinkKind"]

LinkKind = Literal["NVLink", "PCIe", "loopback"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSheet:
    """One kind of device, and the node that it usually stands in."""

    name: str
    """`A100-80GB`."""
    memory_bytes: int
    """That a driver shows. Data sheets' GB are GiB; of GDDR6 with ECC, which is on from the factory, a sixteenth is less."""
    memory_bytes_per_s: float
    """Of that memory."""
    peak_flops_per_s: Mapping[str, float]
    """Dense, by precision; one that is missing the device has no units for. fp32 is not TF32: torch leaves that switched off
    (`torch.backends.cuda.matmul.allow_tf32`), and so do we."""
    link_kind: LinkKind
    """What joins the devices of a node."""
    link_bytes_per_s: float
    """Of one device, in one direction."""
    pcie_bytes_per_s: float
    """Of its PCIe slot, in one direction."""
    node_size: int
    """Devices of a node."""
    network_bytes_per_s: float
    """Of all network cards of a node together, in one direction."""
    source: str
    """Of the device's figures."""
    node_source: str
    """Of the node's."""


def _sheet(
    name: str,
    memory_gib: float,
    memory_gb_per_s: float,
    peak_tflops: tuple[float, float | None, float | None],
    link: tuple[LinkKind, float],
    pcie_gb_per_s: float,
    node: tuple[int, float],
    source: str,
    node_source: str,
) -> DeviceSheet:
    """A row, in the units of data sheets: GiB, GB/s, TFLOP/s in fp32, bf16 and fp16, GB/s, devices and Gbit/s."""
    peaks = zip(("fp32", "bf16", "fp16"), peak_tflops, strict=True)
    return DeviceSheet(
        name=name,
        memory_bytes=int(memory_gib * 2**30),
        memory_bytes_per_s=memory_gb_per_s * 1e9,
        peak_flops_per_s={precision: peak * 1e12 for precision, peak in peaks if peak is not None},
        link_kind=link[0],
        link_bytes_per_s=link[1] * 1e9,
        pcie_bytes_per_s=pcie_gb_per_s * 1e9,
        node_size=node[0],
        network_bytes_per_s=node[1] * 1e9 / 8,
        source=source,
        node_source=node_source,
    )


_V100 = "NVIDIA V100 data sheet (2020), SXM2"
_A100 = "NVIDIA A100 data sheet (2021), SXM4"
_A800 = "NVIDIA A800 data sheet (2022), SXM4"
_H100 = "NVIDIA H100 data sheet (2023), SXM5, half of the tensor figures, which count sparsity"
_H200 = "NVIDIA H200 data sheet (2024), SXM, half of the tensor figures, which count sparsity"
_B200 = (
    "NVIDIA Blackwell data sheet (2024), HGX B200, half of the tensor figures, which count sparsity; memory: NVIDIA DGX "
    "B200 data sheet (2024)"
)
_L4 = "NVIDIA L4 data sheet (2023), half of the tensor figures, which count sparsity"
_T4 = "NVIDIA T4 data sheet (2019)"
_4090 = "NVIDIA Ada GPU architecture white paper (2023), tensor cores that accumulate in fp32"
_EPYC = (
    "AMD EPYC 9004 data sheet (2022): 12 x DDR5-4800 for 96 cores, 3.7 GHz; 32 fp32 operations a cycle (optimization "
    "guide for family 19h, AMD 57647); link measured: gloo between two ranks of one machine"
)
_NDV2 = "Azure NDv2 (2019): 8 GPUs, EDR InfiniBand 100 Gb/s"
_N1 = "Google Cloud N1 with 8 V100 (2019): up to 100 Gb/s"
_DGX_A100 = "NVIDIA DGX A100 data sheet (2020): 8 ConnectX-6 of 200 Gb/s"
_DGX_H100 = "NVIDIA DGX H100 data sheet (2023): 8 ConnectX-7 of 400 Gb/s"
_DGX_H200 = "NVIDIA DGX H200 data sheet (2024): 8 ConnectX-7 of 400 Gb/s"
_DGX_B200 = "NVIDIA DGX B200 data sheet (2024): 8 ConnectX-7 of 400 Gb/s"
_G2 = "Google Cloud g2-standard-96 (2023): 8 L4, up to 100 Gb/s"
_G4DN = "AWS g4dn.12xlarge (2019): 4 T4, 50 Gb/s"
_BOARD = "no maker builds one: four cards on a workstation board with 10 Gb/s Ethernet are assumed"
_M7A = "AWS m7a.48xlarge (2023): 192 cores, 4 GiB each, 50 Gb/s"

# Of a chip with several memories, the first is meant where none is named.
# fmt: off
_ROWS = (
    #       name         GiB    GB/s   TFLOP/s in fp32, bf16, fp16  between devices   PCIe  node: devices, Gb/s
    _sheet("V100-32GB",  32,     900,  (15.7,   None,   125.0),     ("NVLink", 150),  16,   (8, 100),   _V100, _NDV2),
    _sheet("V100-16GB",  16,     900,  (15.7,   None,   125.0),     ("NVLink", 150),  16,   (8, 100),   _V100, _N1),
    _sheet("A100-80GB",  80,    2039,  (19.5,   312.0,  312.0),     ("NVLink", 300),  32,   (8, 1600),  _A100, _DGX_A100),
    _sheet("A100-40GB",  40,    1555,  (19.5,   312.0,  312.0),     ("NVLink", 300),  32,   (8, 1600),  _A100, _DGX_A100),
    _sheet("A800-80GB",  80,    2039,  (19.5,   312.0,  312.0),     ("NVLink", 200),  32,   (8, 1600),  _A800, _DGX_A100),
    _sheet("H100-80GB",  80,    3350,  (67.0,   989.5,  989.5),     ("NVLink", 450),  64,   (8, 3200),  _H100, _DGX_H100),
    _sheet("H200",       141,   4800,  (67.0,   989.5,  989.5),     ("NVLink", 450),  64,   (8, 3200),  _H200, _DGX_H200),
    _sheet("B200",       180,   8000,  (75.0,   2250.0, 2250.0),    ("NVLink", 900),  64,   (8, 3200),  _B200, _DGX_B200),
    _sheet("L4",         22.5,   300,  (30.3,   121.0,  121.0),     ("PCIe",   32),   32,   (8, 100),   _L4,   _G2),
    _sheet("T4",         15,     320,  (8.1,    None,   65.0),      ("PCIe",   16),   16,   (4, 50),    _T4,   _G4DN),
    _sheet("RTX-4090",   24,    1008,  (82.6,   165.2,  165.2),     ("PCIe",   32),   32,   (4, 10),    _4090, _BOARD),
    _sheet("CPU-core",   4,      4.8,  (0.1184, 0.2368, None),      ("loopback", 2.5), 64,  (192, 50),  _EPYC, _M7A),
)
# fmt: on

CATALOGUE: Mapping[str, DeviceSheet] = {row.name: row for row in _ROWS}
"""By name."""

CPU_CORE = CATALOGUE["CPU-core"]
"""A server's, of a few years ago."""
