from __future__ import annotations

import pytest

from bo_tuner.text import large


@pytest.mark.parametrize(
    ("number", "text"),
    [(99_999, "99999"), (100_000, "0.1 M"), (4_400_000, "4.4 M"), (999_900_000, "999.9 M"), (2_246_000_000, "2.246 B")],
)
def test_parameters_are_told_in_millions_and_billions(number: int, text: str) -> None:
    assert large(number) == text
