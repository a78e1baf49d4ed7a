"""`plan`: every config of a model on a cluster, ranked by what it should give, before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bo_tuner.config import TrainConfig
from bo_tuner.dimension import Dimension
from bo_tuner.errors import ConfigError
from bo_tuner.models.choices import Choices, Flags, Floats, Problem
from bo_tuner.models.cost import TIME_PARTS, StageTimes, Times, stage_times, times_of
from bo_tuner.models.memory import MEMORY_PARTS, Memory, memory_of
from bo_tuner.schedules import Action, Timeline, find_schedule, simulate
from bo_tuner.space import BatchRule, SearchSpace, divisors
from bo_tuner.text import gib

__all__ = ["Cause", "Family", "Plan", "Planned", "plan", "timeline_of"]

_N_CHECKED = 50
"""Best configs whose pipelines are simulated,"""
_MOST_ACTIONS = 200_000
"""as long as they have no more actions than this together: half a second."""
_FILLED = 2
"""A pipeline is simulated for so many times as many micro-batches as it is deep, and for once as many more: later ones take as long."""


Cause = Literal["memory", "global batch", "schedule"]
"""What a family fell for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Configs that differ only in their micro-batch."""

    layout: TrainConfig
    cause: Cause
    reason: str
    """Why none of them can be run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What is expected of one config."""

    config: TrainConfig
    samples_per_s: float
    step_time_s: float
    times_s: Mapping[str, float]
    """The step by part."""
    memory_bytes: Mapping[str, int]
    """Of the rank that needs most, by part."""
    fits: bool

    @property
    def total_bytes(self) -> int:
        """Of the rank that needs most."""
        return sum(self.memory_bytes.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All configs, best first: those that fit by samples/s, then the others by the memory they need."""

    problem: Problem
    global_batch: int
    limit_bytes: int
    """Of one device."""
    families: tuple[Family, ...]
    """That fell, and why; those that memory is short for last, the nearest of them first."""
    layouts: Sequence[TrainConfig]
    of_layout: NDArray[np.int64]
    choices: Choices
    times: Times
    memory: Memory
    step_s: Floats
    """All times together: as simulated for the best pipelines, else by closed form."""
    fits: Flags
    order: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.choices)

    @property
    def n_fitting(self) -> int:
        """Configs that should fit."""
        return int(self.fits.sum())

    def best(self, n: int | None = None) -> list[Planned]:
        """The first `n`, or all."""
        return [self._planned(int(index)) for index in self.order[:n]]

    def find(self, name: str) -> Planned:
        """The config of that name.

        Raises:
            ConfigError: There is none.
        """
        try:
            return self._planned(int(self.order[self.names().index(name)]))
        except ValueError:
            raise ConfigError(f"--timeline must name a config of this plan, as its table does; got {name!r}") from None

    def best_pipeline(self) -> Planned | None:
        """The fastest that fits and has stages; None where there is none."""
        staged = self.order[self.fits[self.order] & (self.choices.depth[self.order] > 1)]
        return self._planned(int(staged[0])) if len(staged) else None

    def names(self, n: int | None = None) -> list[str]:
        """Of the first `n`, or of all, as `TrainConfig.name` has them, without making configs of 100,000 candidates."""
        order = self.order[:n]
        parts = [layout.name.split("gas1_mbs1") for layout in self.layouts]
        return [
            f"{parts[layout][0]}gas{accumulation}_mbs{micro_batch}{parts[layout][1]}"
            for layout, accumulation, micro_batch in zip(
                self.of_layout[order].tolist(),
                self.choices.accumulation[order].astype(int).tolist(),
                self.choices.micro_batch[order].astype(int).tolist(),
                strict=True,
            )
        ]

    def config_at(self, index: int) -> TrainConfig:
        """The config at a place of the arrays."""
        return replace(
            self.layouts[int(self.of_layout[index])],
            micro_batch_size=int(self.choices.micro_batch[index]),
            grad_accum_steps=int(self.choices.accumulation[index]),
        )

    def _planned(self, index: int) -> Planned:
        step_s = float(self.step_s[index])
        return Planned(
            config=self.config_at(index),
            samples_per_s=self.global_batch / step_s,
            step_time_s=step_s,
            times_s={part: float(getattr(self.times, part)[index]) for part in TIME_PARTS},
            memory_bytes={part: int(getattr(self.memory, part)[index]) for part in MEMORY_PARTS},
            fits=bool(self.fits[index]),
        )


def plan(
    problem: Problem,
    *,
    global_batch: int,
    limit_bytes: int,
    zero_stages: Sequence[int] = (0, 1, 2, 3),
    schedules: Sequence[str] = ("1f1b",),
    tensor_degrees: Sequence[int] = (1,),
    recompute: Sequence[bool] = (False, True),
    dimensions: Sequence[Dimension] = (),
) -> Plan:
    """Rank every config that makes steps of `global_batch` samples: the planner of PipeDream-2BW (arXiv 2006.09503, section 3.3, and
    appendix A) over width x depth x micro-batch x recomputation, with ZeRO and tensor parallelism beside them.

    Closed forms rank; the pipelines of the best are then simulated, uneven stages and messages included, and ranked again.

    Args:
        problem: What is trained, and on what; all its ranks are used.
        global_batch: Samples of an optimizer step: for 2BW, whose gradients are one step old, the largest that is safe.
        limit_bytes: Memory of one device that may be used.
        zero_stages: With a pipeline only those that go with its schedule.
        schedules: Of pipelines, by name.
        tensor_degrees: Degrees of tensor parallelism.
        recompute: Whether blocks are recomputed.
        dimensions: The user's own, whose terms count.

    Raises:
        ConfigError: No config makes such a step.
    """
    layouts: list[TrainConfig] = []
    fallen: list[Family] = []
    rows: list[tuple[int, int, int]] = []
    most = problem.profile.n_blocks or len(problem.profile.layers)
    space = SearchSpace(
        zero_stages=tuple(zero_stages),
        max_micro_batch=global_batch,
        batch_rule=BatchRule.of(global_batch=global_batch),
        pipeline_depths=tuple(depth for depth in divisors(problem.n_ranks) if depth <= most),
        schedules=tuple(schedules),
        recompute=tuple(recompute),
        tensor_parallel=tuple(degree for degree in tensor_degrees if degree <= problem.profile.heads),
        dimensions=tuple(dimensions),
    )
    problem = replace(problem, dimensions=space.dimensions)
    for layout in (varied for plain in space.layouts(problem.n_ranks) for varied in space.varied(plain)):
        refused = _refusal(problem, layout)
        batches = [] if refused else space.batches(layout, problem.n_ranks)
        if not batches:
            fallen.append(refused or _without_batch(problem, layout, global_batch))
            continue
        rows += [(len(layouts), micro_batch, accumulation) for micro_batch, accumulation in batches]
        layouts.append(layout)
    if not rows:
        raise ConfigError(
            f"--global-batch must be a multiple of the data-parallel ranks of some config; got {global_batch} for "
            f"{problem.n_ranks} ranks: {fallen[0].reason if fallen else 'no config is legal'}"
        )
    table = np.array(rows, dtype=np.int64)
    of_layout = table[:, 0]
    choices = replace(
        Choices.of(layouts, problem.n_ranks).at(of_layout),
        micro_batch=table[:, 1].astype(np.float64),
        accumulation=table[:, 2].astype(np.float64),
    )
    times, memory = times_of(problem, choices), memory_of(problem, choices)
    fits = memory.total <= limit_bytes
    fallen += _too_large(layouts, of_layout, memory.total, fits, limit_bytes)
    made = Plan(
        problem=problem,
        global_batch=global_batch,
        limit_bytes=limit_bytes,
        families=tuple(fallen),
        layouts=layouts,
        of_layout=of_layout,
        choices=choices,
        times=times,
        memory=memory,
        step_s=times.total,
        fits=fits,
        order=_ranked(times.total, memory.total, fits),
    )
    return _checked(made)


def timeline_of(problem: Problem, config: TrainConfig, *, n_micro_batches: int | None = None) -> Timeline:
    """What every stage does when, in one step of `config`'s pipeline.

    Args:
        problem: What is trained, and on what.
        config: Of any depth.
        n_micro_batches: Fewer than the config has, to see the start only; None for all.
    """
    return _run(stage_times(problem, config), config, n_micro_batches or config.grad_accum_steps)


def _run(of_stage: StageTimes, config: TrainConfig, n_micro_batches: int) -> Timeline:
    return simulate(
        _orders(config.pipeline_schedule, config.pipeline_depth, n_micro_batches),
        forward_s=of_stage.forward_s,
        backward_s=of_stage.backward_s,
        message_s=[of_stage.message_s] * (config.pipeline_depth - 1),
    )


@lru_cache(maxsize=64)
def _orders(schedule: str, depth: int, n_micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Of every rank: the same for all micro-batch sizes."""
    found = find_schedule(schedule)
    return tuple(found.actions(rank, depth=depth, n_micro_batches=n_micro_batches) for rank in range(depth))


def _refusal(problem: Problem, layout: TrainConfig) -> Family | None:
    """Why the model cannot be trained so, whatever the batch."""
    n_blocks, depth = problem.profile.n_blocks, layout.pipeline_depth
    if not find_schedule(layout.pipeline_schedule).needs_even_blocks or n_blocks % depth == 0:
        return None
    reason = f"{layout.pipeline_schedule} wants as many blocks in every stage, and {n_blocks} do not divide by {depth}"
    return Family(layout=layout, cause="schedule", reason=reason)


def _without_batch(problem: Problem, layout: TrainConfig, global_batch: int) -> Family:
    """Why no micro-batch makes such steps."""
    width = layout.data_parallel(problem.n_ranks)
    if global_batch % width:
        reason = f"{global_batch} samples a step do not divide by {width} replicas"
        return Family(layout=layout, cause="global batch", reason=reason)
    reason = (
        f"{layout.pipeline_schedule}: {find_schedule(layout.pipeline_schedule).rule}; a replica has "
        f"{global_batch // width} samples a step for {layout.pipeline_depth} stages"
    )
    return Family(layout=layout, cause="schedule", reason=reason)


def _too_large(
    layouts: Sequence[TrainConfig], of_layout: NDArray[np.int64], total: Floats, fits: Flags, limit_bytes: int
) -> list[Family]:
    least = np.full(len(layouts), np.inf)
    np.minimum.at(least, of_layout, total)
    has_one = np.zeros(len(layouts), dtype=bool)
    np.logical_or.at(has_one, of_layout, fits)
    return [
        Family(
            layout=layouts[place],
            cause="memory",
            reason=f"needs at least {gib(int(least[place]))} a device, and {gib(limit_bytes)} may be used",
        )
        for place in np.argsort(least, kind="stable")
        if not has_one[place]
    ]


def _ranked(step_s: Floats, total: Floats, fits: Flags) -> NDArray[np.int64]:
    return np.lexsort((np.where(fits, step_s, total), ~fits))


def _checked(made: Plan) -> Plan:
    """The best ones' pipelines simulated, and all ranked again: what stages wait in them counts as bubble and exchange."""
    times, choices = made.times, made.choices
    bubble, exchange = times.bubble.copy(), times.exchange.copy()
    n_actions = 0
    for index in map(int, made.order[:_N_CHECKED]):
        depth, m = int(choices.depth[index]), int(choices.accumulation[index])
        if not made.fits[index] or depth == 1:
            continue
        lengths = _lengths(depth, m, drains=choices.schedules[choices.schedule[index]].drains)
        n_actions += 2 * depth * sum(lengths)
        if n_actions > _MOST_ACTIONS:
            break
        waits = max(_simulated(made, index, lengths) - times.compute[index] - times.tensor[index], 0.0)
        bubble[index] = min(bubble[index], waits)
        exchange[index] = waits - bubble[index]
    times = replace(times, bubble=bubble, exchange=exchange)
    step_s = times.total
    return replace(made, times=times, step_s=step_s, order=_ranked(step_s, made.memory.total, made.fits))


def _lengths(depth: int, n_micro_batches: int, *, drains: bool) -> tuple[int, ...]:
    """Micro-batches of the runs that a step follows from: one of the whole step, or two that differ by a filled pipeline's."""
    filled = _FILLED * depth
    return (n_micro_batches,) if drains and n_micro_batches <= filled + depth else (filled, filled + depth)


def _simulated(made: Plan, index: int, lengths: tuple[int, ...]) -> float:
    """Seconds that a step spends in the pipeline; where that never drains, as long as so many micro-batches in the middle of a long run."""
    config = made.config_at(index)
    of_stage = stage_times(made.problem, config)
    first, *longer = (_run(of_stage, config, n).makespan_s for n in lengths)
    if not longer:
        return first
    each = (longer[0] - first) / (lengths[1] - lengths[0])
    m = config.grad_accum_steps
    return first + (m - lengths[0]) * each if find_schedule(config.pipeline_schedule).drains else m * each
