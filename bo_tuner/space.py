"""`SearchSpace`: which configs a study may run, each legal one once."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from bo_tuner.cluster import Cluster
from bo_tuner.config import Offload, TrainConfig, ZeroStage
from bo_tuner.dimension import Dimension, check_apart
from bo_tuner.errors import ConfigError
from bo_tuner.schedules import check_schedule, find_schedule
from bo_tuner.stored import known_fields
from bo_tuner.workload import ModelStructure

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

__all__ = [
    "BackEnd",
    "BatchRule",
    "SearchSpace",
    "default_config",
    "distributions",
    "divisors",
    "lightest",
    "micro_batch_ladder",
]

_RUNGS_PER_OCTAVE = 11
"""Rungs between a power of two and the next: steps of 2**(1/11) = 6.5 %, and BERT-large's known optimum, 93, is one."""
_MOST_CANDIDATES = 100_000
"""The sampler goes through all of them before every trial."""


_FIRST_SCHEDULES = ("1f1b", "gpipe", "2bw")
"""Optuna keeps choices by their index: these are the first in every study."""


class BackEnd(Protocol):
    """What runs the steps, as far as the space needs to know it."""

    def legal(self, config: TrainConfig) -> bool:
        """The back end can run `config`."""
        ...


_MOST_SAMPLES = 2**40
"""Of a step: far beyond all use. From 2**53 on numbers of samples are not exact any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRule:
    """What the global batch (samples per optimizer step) may be."""

    kind: Literal["free", "fixed", "at_most"] = "free"
    global_batch: int | None = None
    """Samples; when free the most there are, those of the data set, or None."""

    @classmethod
    def of(cls, *, global_batch: int | None = None, max_global_batch: int | None = None) -> BatchRule:
        """From the two options.

        Raises:
            ConfigError: Both are given, or one is below 1.
        """
        if global_batch is not None and max_global_batch is not None:
            raise ConfigError("--global-batch fixes the batch and --max-global-batch bounds it; give one of them")
        for option, value in (("--global-batch", global_batch), ("--max-global-batch", max_global_batch)):
            if value is not None and value < 1:
                raise ConfigError(f"{option} must be at least 1; got {value}")
            if value is not None and value > _MOST_SAMPLES:
                raise ConfigError(f"{option} must be at most {_MOST_SAMPLES} samples; got {value}")
        if global_batch is not None:
            return cls(kind="fixed", global_batch=global_batch)
        if max_global_batch is not None:
            return cls(kind="at_most", global_batch=max_global_batch)
        return cls()

    def __str__(self) -> str:
        if self.kind == "free":
            up_to = "" if self.global_batch is None else f", up to the {self.global_batch} samples of the data"
            return f"free{up_to}: a faster config may train with another global batch (--global-batch N fixes it)"
        return f"{'exactly' if self.kind == 'fixed' else 'at most'} {self.global_batch} samples a step"


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """Bounds on every dimension; `candidates` lists what is inside."""

    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    max_micro_batch: int = 1024
    """Samples per rank; as in DeepSpeed's tuner."""
    max_grad_accum: int = 64
    """Accumulation is a power of two up to this, or what a fixed batch leaves."""
    batch_rule: BatchRule = BatchRule()
    pipeline_depths: tuple[int, ...] = (1,)
    schedules: tuple[str, ...] = ("1f1b",)
    """Of pipelines, by name."""
    recompute: tuple[bool, ...] = (False,)
    """Whether activations are recomputed."""
    tensor_parallel: tuple[int, ...] = (1,)
    dimensions: tuple[Dimension, ...] = ()
    """The user's own; what their values change is no matter of the back end's law."""
    listed: tuple[TrainConfig, ...] = ()
    """Instead of all that lies within the bounds: these configs alone, as those of a table."""

    @classmethod
    def of_configs(cls, configs: Sequence[TrainConfig]) -> SearchSpace:
        """These configs, in their order, and the bounds they lie within."""
        return cls(
            zero_stages=tuple(config.zero_stage for config in configs),
            max_micro_batch=max(config.micro_batch_size for config in configs),
            max_grad_accum=max(config.grad_accum_steps for config in configs),
            pipeline_depths=tuple(config.pipeline_depth for config in configs),
            schedules=tuple(config.pipeline_schedule for config in configs),
            recompute=tuple(config.recompute for config in configs),
            tensor_parallel=tuple(config.tensor_parallel for config in configs),
            listed=tuple(configs),
        )

    def __post_init__(self) -> None:
        stages = tuple(sorted(set(self.zero_stages)))
        if not stages or not set(stages) <= set(get_args(ZeroStage)):
            given = ",".join(map(str, self.zero_stages))
            raise ConfigError(f"--zero-stages must be some of 0, 1, 2, 3, as in 0,1,2; got {given}")
        object.__setattr__(self, "zero_stages", stages)
        for name in ("pipeline_depths", "tensor_parallel"):
            degrees = tuple(sorted(set(getattr(self, name))))
            if not degrees or degrees[0] < 1:
                raise ConfigError(f"{name} must be whole numbers of at least 1; got {getattr(self, name)}")
            object.__setattr__(self, name, degrees)
        for name in self.schedules:
            check_schedule(name, "--schedules")
        object.__setattr__(self, "schedules", tuple(dict.fromkeys(self.schedules)))
        if not self.schedules:
            raise ConfigError("--schedules must name at least one, as in 1f1b")
        if not self.recompute or not all(type(choice) is bool for choice in self.recompute):
            raise ConfigError(f"recompute must be some of False and True; got {self.recompute}")
        object.__setattr__(self, "recompute", tuple(sorted(set(self.recompute))))
        for name in ("max_micro_batch", "max_grad_accum"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1; got {getattr(self, name)}")
        check_apart(self.dimensions)

    def candidates(self, cluster: Cluster, back_end: BackEnd) -> tuple[TrainConfig, ...]:
        """Every legal config once, in a fixed order: by layout, micro-batch, accumulation, then the user's dimensions. Those that are listed
        ran already, so that all of them are legal.

        Raises:
            ConfigError: No config meets the batch rule, or the user's dimensions make too many.
        """
        if self.listed:
            return self.listed
        found: list[TrainConfig] = []
        replicas: set[int] = set()
        for layout in self.layouts(cluster.n_ranks):
            if not back_end.legal(layout):
                continue
            replicas.add(layout.data_parallel(cluster.n_ranks))
            for micro_batch, accum in self.batches(layout, cluster.n_ranks):
                config = with_batch(layout, micro_batch, accum)
                if back_end.legal(config):
                    found.append(config)
        if not found:
            raise ConfigError(self._nothing_left(cluster, min(replicas, default=cluster.n_ranks)))
        return self._with_dimensions(found)

    def layouts(self, n_ranks: int) -> Iterator[TrainConfig]:
        """Every layout once, in a fixed order, that divides the ranks and goes with its schedule."""
        usual = TrainConfig().pipeline_schedule
        for zero_stage, depth, recompute, tensor in itertools.product(
            self.zero_stages, self.pipeline_depths, self.recompute, self.tensor_parallel
        ):
            if n_ranks % (depth * tensor):
                continue
            for schedule in self.schedules if depth > 1 else (usual,):
                if depth == 1 or zero_stage in find_schedule(schedule).zero_stages:
                    yield TrainConfig(
                        zero_stage=zero_stage,  # type: ignore[arg-type]  # checked above
                        pipeline_depth=depth,
                        pipeline_schedule=schedule,
                        recompute=recompute,
                        tensor_parallel=tensor,
                    )

    def batches(self, layout: TrainConfig, n_ranks: int) -> list[tuple[int, int]]:
        """(micro-batch, accumulation) pairs of a layout that the batch rule and its schedule allow."""
        pairs = self._pairs(layout.data_parallel(n_ranks))
        depth = layout.pipeline_depth
        if depth == 1:
            return pairs
        schedule = find_schedule(layout.pipeline_schedule)
        return [pair for pair in pairs if schedule.is_legal(depth=depth, n_micro_batches=pair[1])]

    def _with_dimensions(self, found: Sequence[TrainConfig]) -> tuple[TrainConfig, ...]:
        """Each config with every combination of the user's values, the first of each first."""
        if not self.dimensions:
            return tuple(found)
        n_combinations = math.prod(len(dimension.values) for dimension in self.dimensions)
        if len(found) * n_combinations > _MOST_CANDIDATES:
            raise ConfigError(
                f"candidates must be at most {_MOST_CANDIDATES}, and {len(found)} configs with {n_combinations} combinations of "
                f"--dimension values are {len(found) * n_combinations}: give fewer values or --zero-stages, or a --global-batch"
            )
        return tuple(varied for config in found for varied in self.varied(config))

    def varied(self, config: TrainConfig) -> Iterator[TrainConfig]:
        """`config` with every legal combination of the user's values, the first of each first."""
        for values in itertools.product(*(dimension.values for dimension in self.dimensions)):
            if all(one.allows(config, value) for one, value in zip(self.dimensions, values, strict=True)):
                names = (dimension.name for dimension in self.dimensions)
                yield replace(config, extra=tuple(zip(names, values, strict=True)))

    def refined(self, family: Iterable[TrainConfig], *, fits: int, fails: int, n_ranks: int) -> list[TrainConfig]:
        """Every integer between two neighbouring rungs of the ladder: candidates at the edge of memory. None where configs are listed.

        Args:
            family: The candidates of one layout.
            fits: Largest micro-batch that ran.
            fails: Smallest that ran out of memory.
            n_ranks: World size.
        """
        listed = list(family)
        rule = self.batch_rule
        if self.listed or rule.kind == "fixed" or any(fits < config.micro_batch_size < fails for config in listed):
            return []
        # What ran may itself be an integer between two rungs: the rung at or below it has the accumulations.
        rung = max((config.micro_batch_size for config in listed if config.micro_batch_size <= fits), default=fits)
        accums = sorted({config.grad_accum_steps for config in listed if config.micro_batch_size == rung})
        between = [
            with_batch(listed[0], micro_batch, accum) for micro_batch in range(fits + 1, fails) for accum in accums
        ]
        if rule.global_batch is None:
            return between
        return [config for config in between if config.global_batch(n_ranks) <= rule.global_batch]

    def _pairs(self, data_parallel: int) -> list[tuple[int, int]]:
        """(micro-batch, accumulation) pairs that the batch rule allows on `data_parallel` replicas."""
        rule = self.batch_rule
        if rule.kind == "fixed":
            assert rule.global_batch is not None
            if rule.global_batch % data_parallel:
                return []
            per_rank = rule.global_batch // data_parallel
            return [(size, per_rank // size) for size in divisors(per_rank) if size <= self.max_micro_batch]
        accums = [2**power for power in range(self.max_grad_accum.bit_length()) if 2**power <= self.max_grad_accum]
        pairs = itertools.product(micro_batch_ladder(self.max_micro_batch), accums)
        if rule.global_batch is None:
            return list(pairs)
        return [(size, accum) for size, accum in pairs if size * accum * data_parallel <= rule.global_batch]

    def for_model(self, structure: ModelStructure) -> SearchSpace:
        """What is left of the space for a model: depths up to its number of layers, recomputation where it has blocks."""
        most = structure.max_depth
        depths = tuple(depth for depth in self.pipeline_depths if depth <= most)
        return replace(self, pipeline_depths=depths, recompute=(False,) if structure.plain_because else self.recompute)

    def for_data(self, n_samples: int | None, *, n_ranks: int) -> SearchSpace:
        """What is left of the space for a data set: no step of more samples than it has, unless the user fixed it.

        Args:
            n_samples: Of the data set; None where it has no length.
            n_ranks: World size; a step of one sample a rank is left in any case.
        """
        rule = self.batch_rule
        if n_samples is None or rule.kind == "fixed":
            return self
        most = max(n_samples, n_ranks)
        return replace(self, batch_rule=replace(rule, global_batch=min(most, rule.global_batch or most)))

    def _nothing_left(self, cluster: Cluster, n_ranks: int) -> str:
        rule = self.batch_rule
        if rule.kind == "fixed" and rule.global_batch is not None and rule.global_batch % n_ranks:
            near = max(rule.global_batch // n_ranks, 1) * n_ranks
            return (
                f"--global-batch must be a multiple of the {n_ranks} data-parallel ranks; got {rule.global_batch}: "
                f"use {near}, or another --ranks"
            )
        if rule.kind == "at_most":
            return (
                f"--max-global-batch must be at least one sample on each of the {n_ranks} data-parallel ranks; "
                f"got {rule.global_batch}: use {n_ranks} or more, or fewer --ranks"
            )
        return f"no config is legal: ZeRO stages {self.zero_stages}, batch {rule}, on {cluster}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data that JSON can hold; of listed configs what is not the default."""
        usual = TrainConfig().params()
        listed = [
            {name: value for name, value in config.params().items() if usual.get(name) != value}
            for config in self.listed
        ]
        return {
            **asdict(replace(self, listed=(), dimensions=())),
            "dimensions": {dimension.name: dimension.to_dict() for dimension in self.dimensions},
            "listed": listed,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SearchSpace:
        """The inverse of `to_dict`."""
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in known_fields(cls, data).items()
        }
        values["batch_rule"] = BatchRule(**known_fields(BatchRule, data["batch_rule"]))
        values["dimensions"] = tuple(
            Dimension.from_dict(name, dimension) for name, dimension in data.get("dimensions", {}).items()
        )
        values["listed"] = tuple(TrainConfig.from_params(params) for params in data.get("listed", ()))
        return cls(**values)


def divisors(number: int) -> list[int]:
    """Of a number of at least 1, the smallest first."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def with_batch(layout: TrainConfig, micro_batch_size: int, grad_accum_steps: int) -> TrainConfig:
    """`layout` with a micro-batch and an accumulation."""
    return replace(layout, micro_batch_size=micro_batch_size, grad_accum_steps=grad_accum_steps)


def micro_batch_ladder(largest: int) -> list[int]:
    """Micro-batch sizes from 1 to `largest`: every integer at first, then 6.5 % steps through the powers of two."""
    rungs = {1, largest}
    for exponent in itertools.count():
        rung = round(2 ** (exponent / _RUNGS_PER_OCTAVE))
        if rung > largest:
            return sorted(rungs)
        rungs.add(rung)
    raise AssertionError("the ladder ends at its largest rung")


def lightest(candidates: Iterable[TrainConfig]) -> TrainConfig:
    """The config that should need least memory: smallest micro-batch, most sharded, recomputed, fewest accumulation steps."""
    return min(
        candidates,
        key=lambda config: (
            config.micro_batch_size,
            -config.zero_stage,
            not config.recompute,
            config.grad_accum_steps,
        ),
    )


def default_config(candidates: Iterable[TrainConfig]) -> TrainConfig:
    """The config that one would start from without tuning: least sharded, whole, nothing recomputed, smallest micro-batch.

    What tuning gains is told against it.
    """
    return min(
        candidates,
        key=lambda config: (
            config.pipeline_depth * config.tensor_parallel,
            config.zero_stage,
            config.recompute,
            config.micro_batch_size,
            config.grad_accum_steps,
        ),
    )


def distributions(candidates: Iterable[TrainConfig]) -> dict[str, BaseDistribution]:
    """One Optuna distribution for every field: whole numbers as Int over the candidates' range, the rest categorical."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    fixed_choices: dict[str, tuple[Any, ...]] = {
        "pipeline_schedule": _FIRST_SCHEDULES,
        "recompute": (False, True),
        "offload": get_args(Offload),
    }
    rows = [config.params() for config in candidates]
    own = TrainConfig().params()
    found: dict[str, BaseDistribution] = {}
    for name in rows[0]:
        values: set[Any] = {row[name] for row in rows}
        if name in fixed_choices:
            added = sorted(values.difference(fixed_choices[name]))
            found[name] = CategoricalDistribution((*fixed_choices[name], *added))
        elif all(type(value) is int for value in values):
            is_log = name in ("micro_batch_size", "grad_accum_steps") or (name not in own and _is_geometric(values))
            found[name] = IntDistribution(min(values), max(values), log=is_log)
        elif all(type(value) is float for value in values):
            found[name] = FloatDistribution(min(values), max(values), log=_is_geometric(values))
        else:
            found[name] = CategoricalDistribution(sorted(values, key=str))
    return found


def _is_geometric(values: Collection[float]) -> bool:
    """Spread rather by ratio than by difference: their middle is nearer to the geometric mean of the ends than to the arithmetic one."""
    low, high = min(values), max(values)
    if low <= 0:
        return False
    middle = statistics.median(values)
    return abs(middle - math.sqrt(low * high)) < abs(middle - (low + high) / 2)
