"""`Choices`: many configs at once, as arrays; `Problem`: what they are to train, and on what."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bo_tuner.config import TrainConfig
from bo_tuner.dimension import Dimension
from bo_tuner.errors import ConfigError
from bo_tuner.hardware import Hardware
from bo_tuner.models.software import Software
from bo_tuner.profile import ModelProfile
from bo_tuner.schedules import Pipeline, Schedule, find_schedule

__all__ = ["Choices", "Constants", "Flags", "Floats", "Problem"]

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """What belongs to no device and no framework. `benchmarks/fit.py` fits those called fitted, on calibration groups only."""

    hidden: float = 0.66
    """Of a backward pass: what the reduction of gradients can hide behind. Fitted."""
    least_shown: float = 0.15
    """Of a reduction that could be hidden altogether: the last bucket waits for the last gradient. Guessed once."""
    node_toll: float = 0.09
    """By which a collective over all nodes slows for each doubling of their number. Fitted."""
    rank_toll_s: float = 7.3e-5
    """Seconds that each data-parallel rank adds to a step: stragglers. Fitted."""
    far_exponent: float = 1.0
    """Host time grows with (tensor degree / node size) to this power once a tensor group spans nodes. Fitted."""
    overlap: float = 3.5
    """Host and device work side by side: a layer takes (host^q + device^q)^(1/q) with this q. Fitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A model, the devices and the framework: all that an expectation rests on besides the config."""

    profile: ModelProfile
    hardware: Hardware
    software: Software
    n_ranks: int
    """World size."""
    layer_costs: tuple[float, ...] = ()
    """What layers are dealt to pipeline stages by, in any unit, where it is known better than by their arithmetic."""
    constants: Constants = Constants()
    dimensions: tuple[Dimension, ...] = ()
    """The user's own, of which those with a term of time or memory count."""

    def __post_init__(self) -> None:
        if self.layer_costs and len(self.layer_costs) != self.max_depth:
            raise ConfigError(f"a cost must be told of each layer; got {len(self.layer_costs)} for {self.max_depth}")
        if self.n_ranks < 1 or self.node_size < 1:
            raise ConfigError(f"ranks must be at least 1; got {self.n_ranks} on nodes of {self.node_size}")

    @property
    def max_depth(self) -> int:
        """Stages of the deepest pipeline that something can be expected of: a layer each."""
        return len(self.profile.layers)

    def knows(self, config: TrainConfig) -> bool:
        """Something can be expected of it: tables hold configs of more stages than the model has layers."""
        return config.pipeline_depth <= self.max_depth

    @property
    def node_size(self) -> int:
        """Ranks of a node."""
        return self.hardware.node_size

    @property
    def n_nodes(self) -> int:
        """Nodes, the last perhaps not full."""
        return -(-self.n_ranks // self.node_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """One array a dimension, one element a config."""

    zero_stage: Floats
    micro_batch: Floats
    """Samples."""
    accumulation: Floats
    """Micro-batches of a step in one replica."""
    depth: Floats
    tensor: Floats
    data: Floats
    """Data-parallel size."""
    recomputes: Flags
    schedule: NDArray[np.int64]
    """Place in `schedules`."""
    schedules: tuple[Schedule, ...]
    """Those that configs have, each once."""
    extra: Mapping[str, NDArray[Any]] = field(default_factory=dict[str, NDArray[Any]])
    """Dimensions beside these by name; None for a config that has it not."""

    @classmethod
    def of(cls, configs: Sequence[TrainConfig], n_ranks: int) -> Choices:
        """From configs on `n_ranks`.

        Raises:
            ConfigError: Depth x tensor degree of one does not divide the ranks.
        """
        depth = _floats([config.pipeline_depth for config in configs])
        tensor = _floats([config.tensor_parallel for config in configs])
        uneven = np.flatnonzero(n_ranks % (depth * tensor))
        if uneven.size:
            configs[int(uneven[0])].data_parallel(n_ranks)
        names = [config.pipeline_schedule for config in configs]
        place = {name: index for index, name in enumerate(dict.fromkeys(names))}
        return cls(
            zero_stage=_floats([config.zero_stage for config in configs]),
            micro_batch=_floats([config.micro_batch_size for config in configs]),
            accumulation=_floats([config.grad_accum_steps for config in configs]),
            depth=depth,
            tensor=tensor,
            data=np.floor_divide(n_ranks, depth * tensor),
            recomputes=np.array([config.recompute for config in configs], dtype=bool),
            schedule=np.array([place[name] for name in names], dtype=np.int64),
            schedules=tuple(map(find_schedule, place)),
            extra=_extra(configs),
        )

    def __len__(self) -> int:
        return len(self.depth)

    def at(self, chosen: Flags | NDArray[np.int64]) -> Choices:
        """Those that are flagged, or stand at these places."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in ("schedules", "extra")}
        return Choices(
            schedules=self.schedules,
            extra={name: value[chosen] for name, value in self.extra.items()},
            **{name: value[chosen] for name, value in values.items()},
        )

    def by_schedule(self, formula: Callable[[Schedule, Any], Any]) -> Floats:
        """Ask each config's own schedule.

        Args:
            formula: Told of a schedule, and of which configs have it: an index of arrays with a row a config. Gives as many rows, or one number
                for all of them.
        """
        present = [0] if len(self.schedules) == 1 else np.unique(self.schedule).tolist()
        found: Floats = np.zeros(len(self))
        for place in present:
            chosen = slice(None) if len(present) == 1 else self.schedule == place
            values = np.asarray(formula(self.schedules[place], chosen), dtype=np.float64)
            if values.ndim > found.ndim:
                found = np.zeros((len(self), *values.shape[1:]))
            found[chosen] = values
        return found

    @property
    def global_batch(self) -> Floats:
        """Samples of an optimizer step."""
        return self.micro_batch * self.accumulation * self.data

    @property
    def in_flight(self) -> Floats:
        """Most micro-batches that the first stage keeps."""
        return self.held_by(np.zeros(1))[:, 0]

    def held_by(self, ranks: Floats) -> Floats:
        """Most micro-batches that each of `ranks` keeps, counted from the first stage; shape (configs, ranks)."""
        depth, accumulation = self.depth[:, None], self.accumulation[:, None]
        return self.by_schedule(
            lambda schedule, chosen: schedule.peak_held(
                ranks, depth=depth[chosen], n_micro_batches=accumulation[chosen]
            )
        )

    @property
    def bubble_fraction(self) -> Floats:
        """Share of a step in which stages wait, if all of them took equally long."""
        even = Pipeline.even(depth=self.depth, n_micro_batches=self.accumulation, forward_s=1.0, backward_s=2.0)
        return self.by_schedule(lambda schedule, chosen: schedule.bubble_fraction(even.at(chosen)))


def _extra(configs: Sequence[TrainConfig]) -> dict[str, NDArray[Any]]:
    extras = [config.extra for config in configs]
    rows = [dict(extra) for extra in extras] if any(extras) else []
    found: dict[str, NDArray[Any]] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        found[name] = np.array(values, dtype=object if None in values else None)
    return found


def _floats(values: list[Any]) -> Floats:
    return np.array(values, dtype=np.float64)
