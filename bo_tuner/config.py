"""`TrainConfig`: one point of the search space."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from bo_tuner.errors import ConfigError
from bo_tuner.schedules import check_schedule

__all__ = ["ExtraValue", "TrainConfig"]

ZeroStage = Literal[0, 1, 2, 3]
Offload = Literal["none", "optimizer", "all"]
ExtraValue = bool | int | float | str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """One point of the search space: all that a launcher needs to start a job.

    Raises:
        ConfigError: A value is outside its domain, or `extra` repeats a name or takes one of ours.
    """

    zero_stage: ZeroStage = 0
    """Sharded over data-parallel ranks: 0 none, 1 optimizer state, 2 + gradients, 3 + weights."""
    micro_batch_size: int = 1
    """Samples per rank in one forward pass."""
    grad_accum_steps: int = 1
    """Forward-backward passes per optimizer step."""
    pipeline_depth: int = 1
    """Pipeline stages; 1 means no pipeline."""
    pipeline_schedule: str = "1f1b"
    """Order of the passes in a pipeline, by its name in `bo_tuner.schedules`; without a pipeline it changes nothing."""
    recompute: bool = False
    """Activations are recomputed in the backward pass instead of kept."""
    tensor_parallel: int = 1
    """Ranks that share every layer; 1 means layers are whole."""
    offload: Offload = "none"
    """What lives in host memory: nothing, the optimizer state, or weights too."""
    extra: tuple[tuple[str, ExtraValue], ...] = ()
    """A user's or a table's own dimensions as (name, value); kept sorted by name."""

    def __post_init__(self) -> None:
        for name in ("micro_batch_size", "grad_accum_steps", "pipeline_depth", "tensor_parallel"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}")
        if type(self.recompute) is not bool:
            raise ConfigError(f"recompute must be True or False, got {self.recompute!r}")
        for name, choices in (
            ("zero_stage", get_args(ZeroStage)),
            ("offload", get_args(Offload)),
        ):
            value = getattr(self, name)
            if value not in choices or isinstance(value, bool | float):
                wanted = ", ".join(map(str, choices))
                raise ConfigError(f"{name} must be one of {wanted}; got {value!r}")
        check_schedule(self.pipeline_schedule)
        names = [name for name, _ in self.extra]
        own = {field.name for field in fields(self)}
        if len(set(names)) < len(names) or own & set(names):
            raise ConfigError(f"extra dimensions need names of their own, each once; got {', '.join(names)}")
        object.__setattr__(self, "extra", tuple(sorted(self.extra)))

    @property
    def name(self) -> str:
        """Identifies the config in tables and files, as in `z1_gas4_mbs16`; every non-default field is in it."""
        before, after = self._layout_parts()
        return "_".join([*before, f"gas{self.grad_accum_steps}", f"mbs{self.micro_batch_size}", *after])

    @property
    def layout_name(self) -> str:
        """The name without micro-batch and accumulation, as in `z1_pp2_rc`."""
        before, after = self._layout_parts()
        return "_".join([*before, *after])

    def _layout_parts(self) -> tuple[list[str], list[str]]:
        """What stands before and after the batch in a name."""
        before, after = [f"z{self.zero_stage}"], list[str]()
        if self.tensor_parallel > 1:
            before.append(f"tp{self.tensor_parallel}")
        if self.pipeline_depth > 1:
            before.append(f"pp{self.pipeline_depth}")
        if self.pipeline_schedule != "1f1b":
            before.append(self.pipeline_schedule)
        if self.recompute:
            after.append("rc")
        if self.offload != "none":
            after.append(f"off-{self.offload}")
        return before, after + [f"{name}-{value}" for name, value in self.extra]

    @property
    def layout(self) -> TrainConfig:
        """The config without its micro-batch and accumulation: what decides how memory grows with the micro-batch.

        A pipeline keeps as many micro-batches in flight as it is deep, if the accumulation gives so many; that number stays.
        """
        return replace(self, micro_batch_size=1, grad_accum_steps=min(self.grad_accum_steps, self.pipeline_depth))

    def data_parallel(self, n_ranks: int) -> int:
        """Data-parallel degree on `n_ranks`: world size = depth x tensor degree x data-parallel size.

        Raises:
            ConfigError: The ranks do not divide.
        """
        per_replica = self.pipeline_depth * self.tensor_parallel
        if n_ranks % per_replica:
            raise ConfigError(f"{per_replica} ranks a replica must divide the {n_ranks} ranks of {self.name}")
        return n_ranks // per_replica

    def global_batch(self, n_ranks: int) -> int:
        """Samples per optimizer step on `n_ranks`: micro-batch x accumulation x data-parallel size."""
        return self.micro_batch_size * self.grad_accum_steps * self.data_parallel(n_ranks)

    def params(self) -> dict[str, ExtraValue]:
        """Every field by name, those of `extra` beside the others: what an Optuna trial holds."""
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "extra"}
        return {**own, **dict(self.extra)}

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> TrainConfig:
        """The inverse of `params`: names that are not ours become `extra`."""
        own = {field.name for field in fields(cls)}
        extra = tuple((name, value) for name, value in params.items() if name not in own)
        return cls(**{name: value for name, value in params.items() if name in own}, extra=extra)
