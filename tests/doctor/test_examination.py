"""A check that breaks is a finding, and the others are made all the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bo_tuner.doctor.examination import look
from bo_tuner.doctor.finding import Finding, Status, fail, ok


def broken() -> Finding:
    raise OSError("the disk\nis gone")


def half_broken() -> Iterator[Finding]:
    yield ok("first", "fine")
    raise RuntimeError("then this")


def test_a_check_that_raises_is_a_finding_that_says_so() -> None:
    told: list[str] = []
    (found,) = look("disk", broken, told.append, debug=False)
    assert (found.name, found.status) == ("disk", Status.WARN)
    assert found.found == "could not be looked at: OSError: the disk is gone"
    assert told == []


def test_debug_shows_where_it_happened() -> None:
    told: list[str] = []
    list(look("disk", broken, told.append, debug=True))
    assert "in broken" in told[0]


def test_what_a_check_found_before_it_broke_is_kept() -> None:
    first, second = look("pair", half_broken, print, debug=False)
    assert (first.found, second.status) == ("fine", Status.WARN)


def test_a_problem_without_a_mend_cannot_be_made() -> None:
    with pytest.raises(AssertionError, match="has its mend"):
        fail("disk", "full", "")
