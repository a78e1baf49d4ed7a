"""What is found by name, and what is said where it is not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from bo_tuner.errors import ConfigError
from bo_tuner.registry import Registry


@dataclass(frozen=True)
class Thing:
    name: str
    number: int = 0


def registry() -> Registry[Thing]:
    return Registry(
        "thing", group="bo_tuner.tests", name_of=lambda one: one.name, built_in=(Thing("one"), Thing("two"))
    )


def test_built_in_and_registered_things_are_found_in_their_order() -> None:
    known = registry()
    three = known.register(Thing("three"))
    assert (list(known), known.find("three"), len(known)) == (["one", "two", "three"], three, 3)
    with pytest.raises(ConfigError) as caught:
        known.find("tree")
    assert str(caught.value) == "thing must be one of one, two, three; got 'tree' (did you mean three?)"


def test_a_name_is_given_once() -> None:
    known = registry()
    known.register(known["one"])
    with pytest.raises(ConfigError, match="each thing must have a name of its own; there is a one already"):
        known.register(Thing("one", 1))


def test_a_package_whose_part_cannot_be_loaded_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    information = tmp_path / "broken-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[bo_tuner.tests]\nthree = no_such_module:Three\n")
    monkeypatch.syspath_prepend(tmp_path)
    known = registry()
    assert known.find("two").name == "two"  # nothing is loaded for what is there
    with pytest.raises(ConfigError, match=r"bo_tuner.tests must load no_such_module:Three of broken, and it fails"):
        known.find("three")
