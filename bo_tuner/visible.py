"""CUDA_VISIBLE_DEVICES as CUDA and torch read it. What they would cut short in silence is an error here."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from bo_tuner.errors import ClusterError

__all__ = ["VARIABLE", "refused", "visible_devices"]

VARIABLE = "CUDA_VISIBLE_DEVICES"
_KINDS = ("GPU-", "MIG-")
_HIDE_ALL = ([""], ["NoDevFiles"])
"""Nothing, as `-1`, is how people hide all GPUs; the word is Slurm's for a job that was given none."""
_INDEX = re.compile(r"\s*\+?([0-9]+)")
_Name = TypeVar("_Name", int, str)
_NEGATIVE = re.compile(r"\s*-[0-9]")


def visible_devices(
    value: str, n_devices: int, uuids: Callable[[], Sequence[str | None]]
) -> Sequence[int] | Sequence[str]:
    """What a value leaves of the machine's GPUs, in its order; nothing where it hides them.

    The kind of the first entry decides. An index ends at the first character that is no digit, as in C; a negative one ends the
    list on purpose. The beginning of a UUID will do, if it is that of one GPU only.

    Args:
        value: Of the variable.
        n_devices: GPUs of the machine.
        uuids: Tells the UUID of each, None for one that does not answer; asked only where the value names some.

    Returns:
        Indices of GPUs, or the UUIDs of instances of divided ones.

    Raises:
        ClusterError: CUDA would stop at an entry that is no GPU, or show none at all, since one is named twice.
    """
    entries = _entries(value)
    if entries in _HIDE_ALL:
        return ()
    kind = next((kind for kind in _KINDS if entries[0].startswith(kind)), None)
    if kind is None:
        return _once(value, _indices(value, n_devices))
    other = next((entry for entry in entries if not entry.startswith(kind)), None)
    if other is not None:
        raise refused(value, f"{other!r} does not begin with {kind} as the first does")
    return _once(value, entries) if kind == "MIG-" else _once(value, _indices_of(value, uuids()))


def _entries(value: str) -> list[str]:
    return value.rstrip(", ").split(",")


def _indices(value: str, n_devices: int) -> list[int]:
    indices: list[int] = []
    for entry in _entries(value):
        if _NEGATIVE.match(entry):
            break
        found = _INDEX.match(entry)
        if found is None:
            raise refused(value, f"{entry!r} is no index")
        index = int(found[1])
        if index >= n_devices:
            raise refused(
                value, f"there is no GPU {index}, only {'GPU 0' if n_devices == 1 else f'GPU 0 to {n_devices - 1}'}"
            )
        indices.append(index)
    return indices


def _indices_of(value: str, uuids: Sequence[str | None]) -> list[int]:
    indices: list[int] = []
    silent = " and ".join(f"GPU {index}" for index, uuid in enumerate(uuids) if uuid is None)
    for start in _entries(value):
        matches = [index for index, uuid in enumerate(uuids) if uuid is not None and uuid.startswith(start)]
        if len(matches) > 1:
            raise refused(value, f"{start!r} is the beginning of several")
        if not matches:
            raise refused(value, f"{start!r} is none of them" + (f" ({silent} does not answer)" if silent else ""))
        indices.append(matches[0])
    return indices


def _once(value: str, named: Sequence[_Name]) -> Sequence[_Name]:
    twice = next((name for number, name in enumerate(named) if name in named[:number]), None)
    if twice is not None:
        what = f"GPU {twice}" if isinstance(twice, int) else repr(twice)
        raise refused(value, f"{what} is named twice, for which CUDA shows none at all")
    return named


def refused(value: str, why: str) -> ClusterError:
    """The value cannot be used."""
    return ClusterError(
        f"CUDA_VISIBLE_DEVICES must name GPUs of this machine, each once, by index or by UUID; got {value!r}, and {why}: "
        "correct it, or use --device cpu"
    )
