"""`find_device`: names as people, tables and NVIDIA's driver write them."""

from __future__ import annotations

import pytest

from bo_tuner.hardware import CATALOGUE, find_device


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("h100_80gb", "H100-80GB"),
        ("H100-80GB", "H100-80GB"),
        ("a100 40 GB", "A100-40GB"),
        ("v100-32g", "V100-32GB"),
        ("RTX4090", "RTX-4090"),
        ("B200-192GB", "B200"),
        # What NVML says.
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("Tesla V100-SXM3-32GB", "V100-32GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A800-SXM4-80GB", "A800-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA L4", "L4"),
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
    ],
)
def test_a_name_that_tells_all_needs_no_note(name: str, found: str) -> None:
    assert find_device(name) == (CATALOGUE[found], "")


@pytest.mark.parametrize("name", CATALOGUE)
def test_names_of_the_catalogue_find_themselves(name: str) -> None:
    assert find_device(name) == (CATALOGUE[name], "")


@pytest.mark.parametrize(("name", "found"), [("A100", "A100-80GB"), ("Tesla V100", "V100-32GB")])
def test_without_its_memory_the_larger_is_meant_and_that_is_said(name: str, found: str) -> None:
    assert find_device(name) == (CATALOGUE[found], f"{name} is taken as {found}")


@pytest.mark.parametrize("name", ["NVIDIA A100 80GB PCIe", "A100-PCIE-80GB"])
def test_a_card_has_no_nvlink(name: str) -> None:
    sheet, note = find_device(name)
    assert sheet is not None
    assert (sheet.name, sheet.link_kind, sheet.link_bytes_per_s) == ("A100-80GB-PCIe", "PCIe", 32e9)
    assert note.startswith(f"{name} is taken as A100-80GB-PCIe")
    assert find_device(sheet.name)[0] == sheet


def test_of_a_mixture_every_figure_is_the_slowest_members() -> None:
    sheet, note = find_device("V100-32GB+T4")
    assert sheet is not None
    assert note == "every figure is that of the slowest of T4 and V100-32GB"
    assert sheet.name == "T4 + V100-32GB"
    assert sheet.memory_bytes == 15 * 2**30
    assert sheet.memory_bytes_per_s == 320e9
    assert sheet.peak_flops_per_s == {"fp32": 8.1e12, "fp16": 65e12}
    assert (sheet.link_kind, sheet.link_bytes_per_s) == ("PCIe", 16e9)
    assert sheet.network_bytes_per_s == 50e9 / 8
    assert find_device(sheet.name) == (sheet, note)


def test_a_mixture_has_only_the_precisions_of_all() -> None:
    sheet, _ = find_device("A100-40GB + V100-16GB")
    assert sheet is not None
    assert sheet.peak_flops_per_s == {"fp32": 15.7e12, "fp16": 125e12}


def test_alternatives_are_a_mixture_too() -> None:
    sheet, note = find_device("A100/A800-80GB")
    assert sheet is not None
    assert sheet.link_bytes_per_s == 200e9
    assert note.startswith("A100 is taken as A100-80GB; every figure")


def test_the_same_device_twice_is_no_mixture() -> None:
    assert find_device("T4 + Tesla T4") == (CATALOGUE["T4"], "")


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("H300", " (did you mean H200?)"),
        ("MI300X", ""),
        ("", ""),
        ("A100-48GB", " (did you mean A100-80GB?)"),
        # Others than they seem at first sight.
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", " (did you mean A100-40GB?)"),
        ("NVIDIA H100 NVL", " (did you mean H100-80GB?)"),
        ("NVIDIA L40S", " (did you mean L4?)"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", ""),
    ],
)
def test_an_unknown_device_is_told_with_the_nearest_and_all(name: str, near: str) -> None:
    sheet, note = find_device(name)
    assert sheet is None
    assert note == f"no figures are known of {name!r}{near}; they are of {', '.join(CATALOGUE)}"


def test_one_unknown_member_makes_a_mixture_unknown() -> None:
    sheet, note = find_device("V100+T5")
    assert sheet is None
    assert "'T5'" in note
