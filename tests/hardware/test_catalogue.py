"""The catalogue: what the data sheets say, in our units, and nothing impossible."""

from __future__ import annotations

import pytest

from bo_tuner.hardware import CATALOGUE, DeviceSheet

SHEETS = pytest.mark.parametrize("sheet", CATALOGUE.values(), ids=CATALOGUE)


def test_every_device_asked_for_is_in_it() -> None:
    assert set(CATALOGUE) >= {"V100-16GB", "V100-32GB", "A100-40GB", "A100-80GB", "H100-80GB", "H200", "B200"}
    assert set(CATALOGUE) >= {"L4", "T4", "RTX-4090", "CPU-core"}


def test_units_are_bytes_and_operations_a_second() -> None:
    sheet = CATALOGUE["A100-40GB"]
    assert sheet.memory_bytes == 40 * 2**30
    assert sheet.memory_bytes_per_s == 1555e9
    assert sheet.peak_flops_per_s == {"fp32": 19.5e12, "bf16": 312e12, "fp16": 312e12}
    assert sheet.link_bytes_per_s == 300e9
    assert sheet.network_bytes_per_s == 200e9


@pytest.mark.parametrize(("name", "has_bf16"), [("V100-16GB", False), ("T4", False), ("L4", True), ("A100-80GB", True)])
def test_bf16_is_what_ampere_and_later_have(name: str, has_bf16: bool) -> None:
    assert ("bf16" in CATALOGUE[name].peak_flops_per_s) is has_bf16


@SHEETS
def test_no_precision_is_slower_than_fp32(sheet: DeviceSheet) -> None:
    assert min(sheet.peak_flops_per_s.values()) == sheet.peak_flops_per_s["fp32"]


@SHEETS
def test_memory_is_faster_than_links_and_nvlink_than_pcie(sheet: DeviceSheet) -> None:
    assert sheet.memory_bytes_per_s > sheet.link_bytes_per_s
    assert (sheet.link_bytes_per_s > sheet.pcie_bytes_per_s) is (sheet.link_kind == "NVLink")


@SHEETS
def test_every_sheet_names_its_sources(sheet: DeviceSheet) -> None:
    assert "20" in sheet.source, "the year is missing"
    assert sheet.node_source
