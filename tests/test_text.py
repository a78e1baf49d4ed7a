from __future__ import annotations

import json
import math

import pytest

from bo_tuner.text import json_text, large, percent


@pytest.mark.parametrize(
    ("number", "text"),
    [(99_999, "99999"), (100_000, "0.1 M"), (4_400_000, "4.4 M"), (999_900_000, "999.9 M"), (2_246_000_000, "2.246 B")],
)
def test_parameters_are_told_in_millions_and_billions(number: int, text: str) -> None:
    assert large(number) == text


def test_percents_have_no_exponent() -> None:
    assert [percent(value) for value in (0.123, 42.4, 99.7, 100.4, 1234)] == [
        "0.12 %",
        "42 %",
        "100 %",
        "100 %",
        "1234 %",
    ]


def test_json_holds_no_numbers_that_json_does_not_know() -> None:
    text = json_text({"a": [math.inf, (math.nan, 1.5)], "b": 10**400})
    assert json.loads(text, parse_constant=pytest.fail) == {"a": [None, [None, 1.5]], "b": 10**400}
