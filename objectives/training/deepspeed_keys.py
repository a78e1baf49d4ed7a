"""Which keys the installed DeepSpeed knows, read from its sources: importing it takes seconds, and it ignores what it does not know."""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path

from bo_tuner.text import did_you_mean

__all__ = ["unknown_key"]

_CONFIG_FILE = re.compile(r"(config|constants)\w*\.py")
_QUOTED = re.compile(r"[\"']([a-z]\w*)[\"']")
_FIELD = re.compile(r"^    ([a-z]\w*):", re.MULTILINE)


def unknown_key(name: str) -> str:
    """What is wrong with a top-level key of a DeepSpeed config; empty where nothing is."""
    words, zero_fields = _known()
    if name in zero_fields:
        return f"DeepSpeed reads it inside another: zero_optimization.{name}"
    return "" if not words or name in words else f"DeepSpeed knows no such key{did_you_mean(name, words)}"


@functools.cache
def _known() -> tuple[frozenset[str], frozenset[str]]:
    """Words that stand in quotes where configs are read, the keys among them, and the fields of ZeRO's config."""
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or spec.origin is None:
        return frozenset(), frozenset()
    folder = Path(spec.origin).parent
    files = [file for file in folder.rglob("*.py") if _CONFIG_FILE.search(file.name)]
    words = {word for file in files for word in _QUOTED.findall(file.read_text(encoding="utf-8"))}
    fields = _FIELD.findall((folder / "runtime" / "zero" / "config.py").read_text(encoding="utf-8"))
    return frozenset(words), frozenset(fields)
