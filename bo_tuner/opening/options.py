"""`TuneOptions`: what `tune` was called with, and which options go together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args

from bo_tuner.budget import Budget
from bo_tuner.cluster import Cluster, MemoryLimit
from bo_tuner.dimension import Dimension
from bo_tuner.engine import Progress
from bo_tuner.errors import ConfigError
from bo_tuner.goal import Goal
from bo_tuner.objectives.simulated import Simulation
from bo_tuner.objectives.training import DeepSpeedBackEnd
from bo_tuner.objectives.training.dimensions import dimensions_of
from bo_tuner.objectives.training.facts import Balance
from bo_tuner.objectives.training.sources import named
from bo_tuner.objectives.training.users_code import code_of
from bo_tuner.origin import OriginKind
from bo_tuner.samplers.table import check_sampler_name
from bo_tuner.schedules import SCHEDULES, check_schedule
from bo_tuner.space import BatchRule, SearchSpace
from bo_tuner.text import fraction_in
from bo_tuner.workload import OPTIMIZERS, UNKNOWN_LENGTH, ModelSpec, Precision, Workload, check_choice, check_seq_len

__all__ = ["TuneOptions"]

_FEWEST_STEPS = 4
_RECOMPUTE = {"both": (False, True), "on": (True,), "off": (False,)}
_DEVICES_HERE = ("device", "ranks", "allow_shared_gpu")
_OF_THE_TABLE = (
    "model",
    "simulate",
    "cluster",
    *_DEVICES_HERE,
    "memory_limit",
    "memory_reserve",
    "global_batch",
    "max_global_batch",
    "data",
    "data_timeout",
    "first_step_timeout",
    "seq_len",
    "precision",
    "optimizer",
    "zero_stages",
    "max_depth",
    "schedules",
    "balance",
    "recompute",
    "dimensions",
)
_SHOWN = {"model": "MODEL", "dimensions": "--dimension"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """The arguments of `tune`, which explains them, with the same defaults."""

    model: Any = None
    replay: str | Path | None = None
    group: str | None = None
    simulate: bool | Simulation = False
    cluster: str | None = None
    budget: str | int | Budget = "20 trials"
    objective: str = "throughput"
    price_per_gpu_hour: float | None = None
    study: str | None = None
    fork: str | None = None
    storage: str | None = None
    ranks: int | None = None
    device: str = "auto"
    memory_limit: str | float | MemoryLimit | None = None
    memory_reserve: str | None = None
    allow_shared_gpu: bool = False
    global_batch: int | None = None
    max_global_batch: int | None = None
    data: str | Callable[..., Any] | None = None
    data_timeout: float = 120.0
    first_step_timeout: float | None = None
    seq_len: int | None = None
    precision: str = "auto"
    optimizer: str | Callable[..., Any] = "adamw"
    zero_stages: Sequence[int] = (0, 1, 2, 3)
    max_depth: int | None = None
    schedules: Sequence[str] = ("1f1b",)
    balance: str = "time"
    recompute: str = "both"
    dimensions: Sequence[Dimension | str] = ()
    sampler: str = "bo"
    min_gain: str | float = 0.01
    precision_target: str | float = 0.02
    max_steps: int | None = None
    confirm: bool = True
    insist: bool = False
    retry_failed: bool = False
    seed: int = 0
    progress: Progress | None = None

    def check(self) -> None:
        """Find what can be found wrong before anything is looked at.

        Raises:
            ConfigError: An option is outside its domain, or makes no sense beside another.
        """
        self._check_together()
        self._check_goal()
        check_choice("--precision", self.precision, ("auto", *get_args(Precision)))
        check_choice("--balance", self.balance, get_args(Balance))
        check_choice("--recompute", self.recompute, tuple(_RECOMPUTE))
        self._check_schedules()
        check_sampler_name(self.sampler)
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"--seed must be from 0 to {2**32 - 1}; got {self.seed}")
        fraction = self.precision_fraction
        if not 0 < fraction < 1:
            raise ConfigError(
                f'--precision-target must be over 0 and under 1, as in 0.02 or "2%"; got {self.precision_target!r}'
            )
        if not 0 <= self.min_gain_fraction < 1:
            raise ConfigError(f'--min-gain must be at least 0 and under 1, as in 0.01 or "1%"; got {self.min_gain!r}')
        if self.max_steps is not None and self.max_steps < _FEWEST_STEPS:
            raise ConfigError(
                f"--max-steps must be at least {_FEWEST_STEPS}: one to warm up, and three to measure; got {self.max_steps}"
            )
        if self.data_timeout <= 0:
            raise ConfigError(f"--data-timeout must be over 0 s; got {self.data_timeout:g}")
        if self.first_step_timeout is not None and self.first_step_timeout <= 0:
            raise ConfigError(f"--first-step-timeout must be over 0 s; got {self.first_step_timeout:g}")

    @property
    def kind(self) -> OriginKind:
        """What the figures shall come from."""
        return "replay" if self.replay is not None else "simulation" if self.simulate is not False else "training"

    def _check_together(self) -> None:
        if self.kind == "replay":
            self._refuse(_OF_THE_TABLE, "with --replay the table tells model, devices and configs")
            return
        self._refuse(("group",), "only a table has groups, which --replay names")
        if self.model is None:
            raise ConfigError("Missing argument 'MODEL': name what to tune, or with --replay a measured table")
        if self.kind == "training":
            self._refuse(("cluster",), "a cluster that is described and not here can only be simulated: add --simulate")
        else:
            self._refuse(
                ("allow_shared_gpu", "data_timeout", "first_step_timeout"),
                "a simulation runs nothing, and takes samples of one kind",
            )
            if self.cluster is not None:
                self._refuse(_DEVICES_HERE, "--cluster tells the devices")

    def _check_goal(self) -> None:
        goal = self.goal_on(1)
        if goal.needs_fixed_batch and self.global_batch is None and self.kind != "replay":
            raise ConfigError(
                f"--objective {goal.name} compares steps of one size: add --global-batch N, or leave --objective out"
            )
        if goal.needs_power and self.kind != "training":
            raise ConfigError(f"--objective {goal.name} needs power that is measured, and a {self.kind} draws none")

    def _check_schedules(self) -> None:
        for name in self.schedules:
            check_schedule(name, "--schedules")
            if "deepspeed" not in SCHEDULES[name].back_ends:
                raise ConfigError(
                    f"--schedules must be some that DeepSpeed runs; got {name}, which only `bo-tuner plan` takes"
                )
            if SCHEDULES[name].changes_training:
                raise ConfigError(
                    f"--schedules must leave training as it is; with {name} {SCHEDULES[name].changes_training}: only "
                    "`bo-tuner plan --allow-2bw` takes it"
                )

    def goal_on(self, n_ranks: int) -> Goal:
        """What the trials are judged by on so many ranks.

        Raises:
            ConfigError: There is no such objective, or its price is missing, wrong or out of place.
        """
        return Goal.of(self.objective, price_per_gpu_hour=self.price_per_gpu_hour, n_ranks=n_ranks)

    def _refuse(self, names: Iterable[str], because: str) -> None:
        usual = {field.name: field.default for field in fields(self)}
        given = [name for name in names if getattr(self, name) != usual[name]]
        if given:
            shown = " and ".join(_SHOWN.get(name, f"--{name.replace('_', '-')}") for name in given)
            raise ConfigError(f"{because}; got {shown}: leave {'it' if len(given) == 1 else 'them'} out")

    @property
    def precision_fraction(self) -> float:
        """The target as a fraction; 0 where it is none."""
        return fraction_in(str(self.precision_target)) or 0.0

    @property
    def min_gain_fraction(self) -> float:
        """The gain as a fraction; -1 where it is none."""
        fraction = fraction_in(str(self.min_gain))
        return -1.0 if fraction is None else fraction

    @property
    def memory(self) -> MemoryLimit:
        """What a rank may use."""
        return MemoryLimit.of(memory_limit=self.memory_limit, memory_reserve=self.memory_reserve)

    def space_on(self, cluster: Cluster) -> SearchSpace:
        """What is searched, as far as that is known without the model.

        Raises:
            ConfigError: Nothing is left, or a bound is none.
        """
        if self.max_depth is not None and not 1 <= self.max_depth <= cluster.n_ranks:
            raise ConfigError(f"--max-depth must be from 1 to the {cluster.n_ranks} ranks; got {self.max_depth}")
        most = self.max_depth or cluster.n_ranks
        space = SearchSpace(
            zero_stages=tuple(self.zero_stages),
            batch_rule=BatchRule.of(global_batch=self.global_batch, max_global_batch=self.max_global_batch),
            pipeline_depths=tuple(depth for depth in range(1, most + 1) if cluster.n_ranks % depth == 0),
            schedules=tuple(self.schedules),
            recompute=_RECOMPUTE[self.recompute],
            dimensions=dimensions_of(self.dimensions),
        )
        space.candidates(cluster, DeepSpeedBackEnd())  # says at once if there are none
        return space

    @property
    def users_code(self) -> dict[str, str]:
        """Fingerprints of the code behind model, data and optimizer."""
        return code_of([self.model, self.data, self.optimizer])

    def length_of(self, spec: ModelSpec, device: str = "cpu") -> int:
        """Tokens of a sample on such a device, as far as they are known without the model.

        Raises:
            ConfigError: The model has no positions for so many.
        """
        is_length_known = spec.source == "config" and self.data is None
        usual = spec.made_up_seq_len(device) if is_length_known else UNKNOWN_LENGTH
        length = self.seq_len if self.seq_len is not None else usual
        check_seq_len(spec, length)
        return length

    def workload_of(self, spec: ModelSpec, cluster: Cluster, *, folder: Path) -> Workload:
        """What is trained, as far as it is known before the model was built; Python functions are pickled into `folder`.

        Raises:
            ConfigError: Data or optimizer cannot be used.
        """
        usual = spec.usual_seq_len if spec.source == "config" else None
        offered = self.seq_len if self.seq_len is not None else usual
        is_known = isinstance(self.optimizer, str) and self.optimizer in OPTIMIZERS
        return Workload(
            model=spec,
            n_parameters=0,
            seq_len=self.length_of(spec, cluster.device),
            precision=cluster.usual_precision if self.precision == "auto" else self.precision,  # type: ignore[arg-type]  # checked
            optimizer=str(self.optimizer) if is_known else named("--optimizer", self.optimizer, folder),
            data=None if self.data is None else named("--data", self.data, folder),
            data_seq_len=None if self.data is None else offered,
        )
