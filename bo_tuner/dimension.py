"""`Dimension`: something of the user's own to search over, and how a value of it changes the DeepSpeed config."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, fields, replace
from typing import Any

from bo_tuner.config import ExtraValue, TrainConfig
from bo_tuner.errors import ConfigError
from bo_tuner.registry import Registry

__all__ = ["DIMENSIONS", "Change", "Dimension", "Term", "check_apart", "register_dimension"]

Change = Callable[[dict[str, Any], Any], dict[str, Any] | None]
"""Gets a DeepSpeed config of its own and a value; changes the config in place, or returns another."""

Term = Callable[[Any], Mapping[str, Any]]
"""Gets an `Estimate` of `bo_tuner.models.terms`, and gives the parts that become others, by name."""

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_WORD = re.compile(r"[A-Za-z0-9_.+-]+")
_MOST_VALUES = 1000
_MOST_SHOWN = 6
_LARGEST = 2**53
"""Optuna's databases hold numbers as floats, which are exact up to here."""
_LONGEST_NAMES = 160
"""Characters that all dimensions may add to a config's name, which files are named by; file systems take 255."""
_OURS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "zero_optimization.stage",
    "fp16.enabled",
    "bf16.enabled",
    "optimizer.type",
)
"""Settings that other dimensions and options decide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimension:
    """A dimension of the search space beside those that every study has.

    Candidates are listed one by one, so a range is a grid. The first value is the default: the study's first trial has it.

    Example:
        >>> Dimension(name="overlap", values=(False, True), path="zero_optimization.overlap_comm").values
        (False, True)
        >>> Dimension(name="clip", low=0.5, high=2, step=0.5, path="gradient_clipping").values
        (0.5, 1.0, 1.5, 2.0)
        >>> Dimension(name="bucket", low=10**6, high=10**8, points=3, log=True, path="zero_optimization.reduce_bucket_size").values
        (1000000, 10000000, 100000000)

    Raises:
        ConfigError: The name is taken or no word, values are none or differ in type, or it does not say what it changes.
    """

    name: str
    """Letters, digits and underscores; no field of `TrainConfig`."""
    values: tuple[ExtraValue, ...] = ()
    """Flags, numbers or words, all of one type, each once."""
    path: str = ""
    """Key of the DeepSpeed config that takes the value, with dots between levels."""
    change: Change | None = None
    """Instead of `path`: what changes the config. It runs in the process of `tune`, for every trial and export."""
    source: str = ""
    """Where another process finds `change`: `FILE.py:FUNCTION`, or the name of its pickle in the study's folder; filled in by `tune`."""
    digest: str = ""
    """Of what `change` does; likewise."""
    legal: Callable[[TrainConfig, Any], bool] | None = None
    """Whether a config may have a value; None: every one. The first value must always be legal."""
    time: Term | None = None
    """What a value changes in the seconds of a step; None: unknown."""
    memory: Term | None = None
    """What it changes in the bytes of a rank; None: unknown."""
    is_registered: bool = False
    """Other processes find it in `DIMENSIONS`, by its name; filled in by `tune` and `plan`."""
    low: InitVar[float | None] = None
    """Instead of values: a range from here ..."""
    high: InitVar[float | None] = None
    """... to here, both included."""
    step: InitVar[float | None] = None
    """Between values of a range; 1 for whole numbers."""
    points: InitVar[int | None] = None
    """Instead: how many values."""
    log: InitVar[bool] = False
    """The `points` are spread evenly in ratio, not in difference."""

    def __post_init__(
        self, low: float | None, high: float | None, step: float | None, points: int | None, log: bool
    ) -> None:
        own = {field.name for field in fields(TrainConfig)}
        if not _NAME.fullmatch(self.name) or self.name in own:
            raise ConfigError(
                f"a dimension's name must be letters, digits and underscores, and none of {', '.join(sorted(own))}; "
                f"got {self.name!r}"
            )
        if (low, high, step, points, log) != (None, None, None, None, False):
            if self.values or low is None or high is None:
                raise self._error("must have either values, or low and high")
            object.__setattr__(self, "values", self._grid(low, high, step, points, log=log))
        object.__setattr__(self, "values", self._checked())
        if self.path and not all(self.path.split(".")):
            raise self._error(f"must have a path as in zero_optimization.overlap_comm; got {self.path!r}")
        is_change = self.change is not None or bool(self.source)
        if bool(self.path) == is_change and not (self.is_registered and not is_change):
            raise self._error("must say what it changes, by either path or change")
        if self.change is not None and not callable(self.change):
            raise self._error(f"must have a function as its change; got {self.change!r}")

    def _error(self, text: str) -> ConfigError:
        return ConfigError(f"dimension {self.name} {text}")

    def _grid(self, low: float, high: float, step: float | None, points: int | None, *, log: bool) -> tuple[float, ...]:
        numbers = [number for number in (low, high, step) if number is not None]
        if not all(type(number) in (int, float) and math.isfinite(number) for number in numbers) or low > high:
            raise self._error(f"must have a range of numbers, low at most high; got {low!r} to {high!r}")
        if (step is None) == (points is None):
            if step is not None or not all(type(number) is int for number in (low, high)):
                raise self._error("must have either a step or a number of points in its range")
            step = 1
        if points is None:
            assert step is not None
            if log or step <= 0:
                raise self._error(f"must have a step over 0, or points where it is log; got {step}")
            n_values = math.floor((high - low) / step * (1 + 1e-12)) + 1
        else:
            n_values = points
        if type(n_values) is not int or not 1 <= n_values <= _MOST_VALUES or (points == 1 and low < high):
            raise self._error(f"must have from 2 to {_MOST_VALUES} values in its range; got {n_values}")
        if log and low <= 0:
            raise self._error(f"must have a range over 0 to be log; got {low} to {high}")
        shares = [index / max(n_values - 1, 1) for index in range(n_values)]
        if step is not None:
            values = [low + index * step for index in range(n_values)]
        elif log:
            values = [low * (high / low) ** share for share in shares]
        else:
            values = [low + (high - low) * share for share in shares]
        if all(type(number) is int for number in numbers):
            return tuple(dict.fromkeys(round(value) for value in values))
        return tuple(float(f"{value:.12g}") for value in values)

    def _checked(self) -> tuple[ExtraValue, ...]:
        values: tuple[ExtraValue, ...] = tuple(self.values)
        if {type(value) for value in values} == {int, float}:
            values = tuple(map(float, values))
        if not values or len({type(value) for value in values}) > 1 or type(values[0]) not in (bool, int, float, str):
            raise self._error(f"must have flags, numbers or words, all of one type, as its values; got {self.values}")
        if len(set(values)) < len(values) or len(values) > _MOST_VALUES:
            raise self._error(f"must have each value once, and at most {_MOST_VALUES}; got {len(values)}")
        for value in values:
            if isinstance(value, str) and not _WORD.fullmatch(value):
                raise self._error(f"must have words of letters, digits and _ . + - as its values; got {value!r}")
            if not isinstance(value, str) and not abs(value) <= _LARGEST:
                raise self._error(f"must have numbers of at most 2**53 as its values; got {value}")
        return values

    def __str__(self) -> str:
        first, *rest = map(str, self.values)
        shown = (
            ", ".join([first, *rest])
            if len(rest) < _MOST_SHOWN
            else f"{first}, ... {rest[-1]} ({len(rest) + 1} values)"
        )
        return f"{self.name}: {shown}; changes {self.path or 'the DeepSpeed config by a function'}"

    def allows(self, config: TrainConfig, value: ExtraValue) -> bool:
        """Whether `config` may have `value`."""
        return self.legal is None or self.legal(config, value)

    @property
    def is_modelled(self) -> bool:
        """Something is expected of its values."""
        return self.time is not None or self.memory is not None

    @property
    def longest_name(self) -> int:
        """Characters that it adds to a config's name at most."""
        return len(self.name) + 2 + max(len(str(value)) for value in self.values)

    def applied(self, settings: Mapping[str, Any], value: ExtraValue) -> dict[str, Any]:
        """A DeepSpeed config with `value` in it; `settings` stay as they are.

        Raises:
            ConfigError: It cannot be, or what comes is no DeepSpeed config, or changes what other dimensions decide.
        """
        changed = copy.deepcopy(dict(settings))
        if self.path:
            *parents, key = self.path.split(".")
            holder: Any = changed
            for parent in parents:
                holder = holder.setdefault(parent, {})
                if not isinstance(holder, dict):
                    raise self._error(
                        f"must have a path of keys that hold others, and {parent} in {self.path} is {holder!r}"
                    )
            holder[key] = value
        else:
            changed = self._changed(changed, value)
        for path in _OURS:
            before, after = _at(settings, path), _at(changed, path)
            if before != after:
                raise self._error(
                    f"must leave {path} of the DeepSpeed config as it is, which other dimensions and options decide; "
                    f"{value!r} makes it {after!r} from {before!r}"
                )
        return changed

    def _changed(self, settings: dict[str, Any], value: ExtraValue) -> dict[str, Any]:
        assert self.change is not None, f"{self.name} was read from a study, and its change was not looked for"
        try:
            returned: Any = self.change(settings, value)
        except Exception as error:
            raise self._error(f"must take the DeepSpeed config and {value!r}, and raises {_told(error)}") from error
        if returned is not None and not isinstance(returned, dict):
            raise self._error(f"must return a DeepSpeed config or nothing; with {value!r} it gave {returned!r:.100}")
        try:
            plain: dict[str, Any] = json.loads(json.dumps(settings if returned is None else returned, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise self._error(f"must make a config that JSON can hold; with {value!r}: {_told(error)}") from error
        return plain

    def to_dict(self) -> dict[str, Any]:
        """Plain data that JSON can hold: all but the name, and the function itself."""
        how = {"path": self.path} if self.path else {"source": self.source, "digest": self.digest}
        return {"values": list(self.values), **how, **({"is_registered": True} if self.is_registered else {})}

    @classmethod
    def from_dict(cls, name: str, data: Mapping[str, Any]) -> Dimension:
        """The inverse of `to_dict`, where what is not a path is still to be found, and what is registered where it is."""
        values, path = tuple(data["values"]), data.get("path", "")
        is_registered = data.get("is_registered", False)
        if is_registered and name in DIMENSIONS:
            return replace(DIMENSIONS[name], values=values, path=path, is_registered=True)
        return cls(
            name=name,
            values=values,
            path=path,
            source=data.get("source", ""),
            digest=data.get("digest", ""),
            is_registered=is_registered,
        )


def _name_of(dimension: Any) -> str:
    if not isinstance(dimension, Dimension):
        raise ConfigError(f"what is registered as a dimension must be a Dimension; got {dimension!r:.100}")
    return dimension.name


DIMENSIONS = Registry[Dimension]("dimension", group="bo_tuner.dimensions", name_of=_name_of)
"""Those that installed packages offer by entry points of the group `bo_tuner.dimensions`, and that programs register."""

register_dimension = DIMENSIONS.register
"""Takes a `Dimension`."""


def check_apart(dimensions: Sequence[Dimension]) -> None:
    """Dimensions get along with each other.

    Raises:
        ConfigError: Two have one name or one path, or their names and values are too long together.
    """
    for what in ("name", "path"):
        known = [getattr(dimension, what) for dimension in dimensions if getattr(dimension, what)]
        twice = next((one for one in known if known.count(one) > 1), None)
        if twice:
            raise ConfigError(f"each dimension must have a {what} of its own; two have {twice}")
    length = sum(dimension.longest_name for dimension in dimensions)
    if length > _LONGEST_NAMES:
        raise ConfigError(
            f"names and values of all dimensions together must be at most {_LONGEST_NAMES} characters, since trials are named by "
            f"them; got {length}: shorten them"
        )


def _at(settings: Any, path: str) -> Any:
    """The value at a path; None where there is none."""
    for key in path.split("."):
        settings = settings.get(key) if isinstance(settings, Mapping) else None
    return settings


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
