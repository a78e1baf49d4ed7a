"""The driver, asked through pynvml of a compiled stand-in."""

from __future__ import annotations

import pytest

from bo_tuner.nvml import visible_indices

UUIDS = ["GPU-a0aa", "GPU-b1bb", "GPU-b2cc"]


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        ("0,1,2", [0, 1, 2]),
        ("2,0", [2, 0]),
        (" 1 , 2 ", [1, 2]),
        ("", []),
        (" ", []),
        ("GPU-a0aa", [0]),
        ("GPU-a", [0]),
        ("GPU-b2,GPU-b1", [2, 1]),
        ("GPU-b1,0", [1, 0]),
    ],
)
def test_visible_devices_are_taken_by_index_or_start_of_uuid_in_the_order_given(
    visible: str, indices: list[int]
) -> None:
    assert visible_indices(visible, UUIDS) == indices


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        ("0,-1,1", [0]),
        ("-1,0", []),
        ("0,3,1", [0]),
        ("1,,2", [1]),
        ("1,GPU-z,2", [1]),
        ("2,GPU-b,0", [2]),  # two devices start so
        ("0,cuda,1", [0]),
    ],
)
def test_visible_devices_end_at_the_first_entry_that_names_no_single_device(visible: str, indices: list[int]) -> None:
    assert visible_indices(visible, UUIDS) == indices
