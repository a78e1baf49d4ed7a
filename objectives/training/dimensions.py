"""The user's own dimensions: as they are given, tried before a study begins, and found again by other processes."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bo_tuner.config import TrainConfig
from bo_tuner.dimension import DIMENSIONS, Dimension
from bo_tuner.errors import ConfigError
from bo_tuner.objectives.training.deepspeed_backend import deepspeed_config
from bo_tuner.objectives.training.deepspeed_keys import unknown_key
from bo_tuner.objectives.training.sources import reference, write_object
from bo_tuner.space import SearchSpace
from bo_tuner.workload import Workload

__all__ = ["dimensions_found", "dimensions_of", "dimensions_ready"]

_WRITTEN = re.compile(r"(?P<name>\w+)=(?P<values>[^:=]+):(?P<path>[\w.]+)")
_NAMED = re.compile(r"(?P<name>\w+)(?:=(?P<values>[^:=]+))?")


def dimensions_of(given: Sequence[Dimension | str]) -> tuple[Dimension, ...]:
    """What the user gave as dimensions.

    Args:
        given: Each itself, as `NAME=VALUE,VALUE:PATH`, as `FILE.py:FUNCTION`, which returns one or a list of them, or by its name, as
            registered, with `=VALUE,VALUE` behind it for other values.

    Raises:
        ConfigError: One is none of these, or the function raises.
    """
    found: list[Dimension] = []
    for one in given:
        written = _WRITTEN.fullmatch(one) if isinstance(one, str) else None
        if isinstance(one, Dimension) and (one.path or one.change is not None):
            found.append(one)
        elif written:
            found.append(Dimension(name=written["name"], values=_values(written["values"]), path=written["path"]))
        elif isinstance(one, str) and ".py:" in one:
            found += _of_file(reference("--dimension", one, ConfigError))
        elif isinstance(one, str) and (named := _NAMED.fullmatch(one)) and named["name"] in DIMENSIONS:
            known = DIMENSIONS[named["name"]]
            found.append(replace(known, values=_values(named["values"])) if named["values"] else known)
        else:
            raise ConfigError(
                '--dimension must be NAME=VALUE,VALUE:PATH, as in "overlap=false,true:zero_optimization.overlap_comm", '
                f"{', '.join(['FILE.py:FUNCTION', *DIMENSIONS])} or a Dimension; got {one!r}"
            )
    return tuple(map(_registered, found))


def _registered(one: Dimension) -> Dimension:
    """Marked where it is. What a path and a function cannot tell, other commands find in the registry alone."""
    known = DIMENSIONS.get(one.name)
    if known is not None and replace(known, values=one.values) == replace(one, is_registered=False):
        return replace(one, is_registered=True)
    if one.is_modelled or one.legal is not None:
        raise ConfigError(
            f"dimension {one.name} must be registered, since it has a term or says what is legal: call register_dimension with it, or "
            "offer it by an entry point of bo_tuner.dimensions"
        )
    return one


def _values(text: str) -> tuple[Any, ...]:
    return tuple(_value(word.strip()) for word in text.split(","))


def _value(word: str) -> Any:
    """A flag or number as JSON writes it, else the word."""
    try:
        return json.loads(word)
    except ValueError:
        return word


def _of_file(source: str) -> list[Dimension]:
    from bo_tuner.objectives.training.job.errors import JobError
    from bo_tuner.objectives.training.job.functions import call_offering, load_function

    try:
        returned = call_offering(load_function(source), "the function")
    except JobError as error:
        raise ConfigError(f"--dimension {source}: {error}") from error
    found = list(returned) if isinstance(returned, list | tuple) else [returned]
    if not found or not all(isinstance(one, Dimension) for one in found):
        raise ConfigError(
            f"--dimension {source} must return a Dimension, or a list of them; it returned {returned!r:.100}"
        )
    return [one if one.path else replace(one, source=source) for one in found]


def dimensions_ready(space: SearchSpace, workload: Workload, *, folder: Path) -> tuple[Dimension, ...]:
    """Those of a study that begins or goes on: every value tried on a config of each ZeRO stage, and functions that came from Python
    pickled into `folder`.

    Raises:
        ConfigError: A value cannot be applied, DeepSpeed has no such key, or a function does not pickle.
    """
    ready: list[Dimension] = []
    for dimension in space.dimensions:
        digest = _tried(dimension, space, workload)
        if dimension.change is None or dimension.is_registered:
            ready.append(dimension)
            continue
        source = dimension.source
        if not source:
            source = f"dimension-{dimension.name}"
            write_object(dimension.change, folder / f"{source}.pkl", f"the change of dimension {dimension.name}")
        ready.append(replace(dimension, source=source, digest=digest))
    return tuple(ready)


def dimensions_found(space: SearchSpace, workload: Workload, *, folder: Path) -> tuple[Dimension, ...]:
    """Those of a stored study with their functions, from the user's file or from the pickles in the study's `folder`.

    Raises:
        ConfigError: A function is gone, or does not do what it did when the study began.
    """
    found: list[Dimension] = []
    for dimension in space.dimensions:
        if not dimension.path and dimension.change is None and dimension.is_registered:
            raise ConfigError(
                f"dimension {dimension.name} must be registered, as when the study began: install the package that offers it"
            )
        if not dimension.path and dimension.change is None:
            stored = dimension
            dimension = replace(stored, change=_change_of(stored, folder))
            if _tried(dimension, space, workload) != stored.digest:
                raise ConfigError(
                    f"dimension {stored.name} must do what it did when the study began, and {stored.source} now does something else: "
                    "put it back as it was"
                )
        found.append(dimension)
    return tuple(found)


def _change_of(dimension: Dimension, folder: Path) -> Any:
    from bo_tuner.objectives.training.job.functions import load_object

    if ".py:" in dimension.source:
        same = [one.change for one in _of_file(dimension.source) if one.name == dimension.name and one.change]
        if not same:
            raise ConfigError(f"{dimension.source} must give dimension {dimension.name}, as when the study began")
        return same[0]
    file = folder / f"{dimension.source}.pkl"
    try:
        return load_object(str(file))
    except Exception as error:
        raise ConfigError(
            f"{file} must hold the change of dimension {dimension.name} and cannot be read ({type(error).__name__}: {error}): "
            "run tune once more where it ran"
        ) from error


def _tried(dimension: Dimension, space: SearchSpace, workload: Workload) -> str:
    """A digest of what its values change in a config of each ZeRO stage, whatever else bo_tuner writes there."""
    effects: list[Any] = []
    small = replace(workload, n_parameters=0)  # the same before and after the model was built
    for stage in space.zero_stages:
        config = TrainConfig.from_params({"zero_stage": stage})
        settings = deepspeed_config(config, small, n_ranks=1)
        for value in dimension.values:
            changed = dimension.applied(settings, value)
            for key in changed.keys() - settings.keys():
                if unknown_key(key):
                    raise ConfigError(f"dimension {dimension.name} sets {key}, and {unknown_key(key)}")
            effects.append(dict(_differences(settings, changed)))
    return hashlib.sha256(json.dumps(effects, sort_keys=True).encode()).hexdigest()[:12]


def _differences(before: Mapping[str, Any], after: Mapping[str, Any], under: str = "") -> Iterator[tuple[str, Any]]:
    """Every path whose value is another, with the new one; None where it is gone."""
    for key in sorted({*before, *after}):
        old, new = before.get(key), after.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _differences(old, new, f"{under}{key}.")
        elif old != new:
            yield f"{under}{key}", new
