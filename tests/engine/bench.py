"""A study of made-up trials in a real database, driven by the real engine."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

import optuna

from bo_tuner.budget import Budget
from bo_tuner.cluster import Cluster
from bo_tuner.config import TrainConfig
from bo_tuner.engine import Engine, Snapshot, StopReason
from bo_tuner.goal import THROUGHPUT, Goal
from bo_tuner.objectives import EventSink, TrialEvent
from bo_tuner.open_candidates import OpenCandidates
from bo_tuner.outcome import Measurement, Outcome, TrialLimits, TrialResult
from bo_tuner.samplers import CandidateSampler, make_sampler
from bo_tuner.space import BackEnd, SearchSpace
from bo_tuner.storage import Location, Manifest, StudyStore
from bo_tuner.trial import TrialRecord
from bo_tuner.workload import ModelSpec, Workload

N_RANKS = 2
LIMIT_BYTES = 1000
CLUSTER = Cluster(device="cpu", n_ranks=N_RANKS, device_name="a thought", memory_bytes=10 * LIMIT_BYTES)
SMALL = SearchSpace(zero_stages=(0, 1), max_micro_batch=8, max_grad_accum=2)
"""32 candidates; every micro-batch is a rung."""
TINY = SearchSpace(zero_stages=(0,), max_micro_batch=3, max_grad_accum=1)
"""Three candidates."""
WIDE = SearchSpace()
TrialState = optuna.trial.TrialState


class AnyBackEnd:
    """A back end that runs everything."""

    def legal(self, config: TrainConfig) -> bool:
        return True


class Analytic:
    """An objective by formula: larger batches are faster, and cost memory by layout.

    `bytes_of` a ZeRO stage are needed before the first sample. `script` overrides: how the first runs of a config end, in
    turn; "*" stands for every config. `interrupts_at` is the number of the call that Ctrl-C hits. `slowed` tells by which factors the
    runs of a config take longer than they should, in turn; `wall_s` is how long every run takes.
    """

    def __init__(
        self,
        *,
        bytes_of: Mapping[int, int] | None = None,
        script: Mapping[str, list[Outcome]] | None = None,
        interrupts_at: int | None = None,
        slowed: Mapping[str, list[float]] | None = None,
        wall_s: float = 1.0,
    ) -> None:
        self.calls: list[str] = []
        self.limits: list[TrialLimits] = []
        self._bytes_of = bytes_of or {0: 500, 1: 300, 2: 200, 3: 100}
        self._script = {name: list(outcomes) for name, outcomes in (script or {}).items()}
        self._interrupts_at = interrupts_at
        self._slowed = {name: list(factors) for name, factors in (slowed or {}).items()}
        self._wall_s = wall_s

    def __call__(self, config: TrainConfig, *, limits: TrialLimits, on_event: EventSink) -> TrialResult:
        self.calls.append(config.name)
        self.limits.append(limits)
        if len(self.calls) == self._interrupts_at:
            raise KeyboardInterrupt
        on_event(TrialEvent(phase="measure", step=1, n_steps=6))
        planned = self._script.get(config.name) or self._script.get("*")
        if planned:
            return TrialResult(outcome=planned.pop(0), reason="as planned", wall_s=3.0, limit_bytes=limits.memory_bytes)
        used = self._bytes_of[config.zero_stage] + 100 * config.micro_batch_size
        if used > limits.memory_bytes:
            return TrialResult(
                outcome=Outcome.OOM,
                reason="out of memory",
                peak_memory_bytes=limits.memory_bytes,
                requested_bytes=used - limits.memory_bytes,
                limit_bytes=limits.memory_bytes,
            )
        batch = config.global_batch(N_RANKS)
        slowed = self._slowed.get(config.name)
        step_s = (0.01 + 0.001 * batch + 0.002 * config.zero_stage) * (slowed.pop(0) if slowed else 1.0)
        times = ((step_s,) * 3,) * N_RANKS
        measurement = Measurement(
            global_batch=batch,
            seq_len=8,
            step_times_s=times,
            engine_times_s=times,
            peak_memory_bytes=(used,) * N_RANKS,
        )
        return TrialResult(
            outcome=Outcome.COMPLETE,
            measurement=measurement,
            peak_memory_bytes=used,
            limit_bytes=limits.memory_bytes,
            wall_s=self._wall_s,
            phases_s={"start": 20.0},
        )


class Told:
    """A progress that remembers."""

    def __init__(self) -> None:
        self.shown: list[Snapshot] = []
        self.over: list[tuple[TrialRecord, Snapshot]] = []
        self.again: list[tuple[TrialRecord, Snapshot]] = []
        self.n_closed = 0

    def shows(self, snapshot: Snapshot) -> None:
        self.shown.append(snapshot)

    def ended(self, record: TrialRecord, snapshot: Snapshot) -> None:
        self.over.append((record, snapshot))

    def ran_again(self, record: TrialRecord, snapshot: Snapshot) -> None:
        self.again.append((record, snapshot))

    def close(self) -> None:
        self.n_closed += 1


class Bench:
    """A study in a real database; every `run` opens it anew, as another process would."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._opened: list[StudyStore] = []
        self.store = StudyStore(Location(folder=folder), "study")
        """As the latest run opened it."""

    def run(
        self,
        objective: Analytic,
        budget: str | Budget,
        *,
        space: SearchSpace = SMALL,
        sampler: str | type[CandidateSampler] = "random",
        memory_bytes: int = LIMIT_BYTES,
        progress: Told | None = None,
        is_timed: bool = False,
        back_end: BackEnd | None = None,
        confirms: bool = False,
        min_gain: float = 0.0,
        goal: Goal = THROUGHPUT,
    ) -> StopReason:
        """Go on with the study; `is_timed` takes the lease, which counts the time and takes some."""
        self.store = store = StudyStore(Location(folder=self._folder), "study")
        self._opened.append(store)
        if store.manifest() is None:
            workload = Workload(model=ModelSpec.resolve("bert-tiny"), n_parameters=1, seq_len=8)
            store.create(Manifest(workload=workload, cluster=CLUSTER, space=space, seed=3, goal=goal))
        candidates = OpenCandidates(
            space.candidates(CLUSTER, back_end or AnyBackEnd()),
            space=space,
            n_ranks=N_RANKS,
            limit_bytes=memory_bytes,
            longest_step_s=20.0,
            goal=goal,
        )
        engine = Engine(
            store=store,
            sampler=make_sampler(sampler, candidates, seed=3)
            if isinstance(sampler, str)
            else sampler(candidates, seed=3),
            candidates=candidates,
            objective=objective,
            budget=Budget.parse(budget),
            limits=TrialLimits(memory_bytes=memory_bytes),
            n_ranks=N_RANKS,
            progress=progress or Told(),
            confirms=confirms,
            min_gain=min_gain,
        )
        with store.drive(n_ranks=N_RANKS) if is_timed else contextlib.nullcontext():
            return engine.run()

    @property
    def records(self) -> list[TrialRecord]:
        return self.store.records()

    @property
    def names(self) -> list[str]:
        return [record.config.name for record in self.records]

    @property
    def outcomes(self) -> list[Outcome | None]:
        return [record.result.outcome if record.result else None for record in self.records]

    def close(self) -> None:
        for store in self._opened:
            store.location.open().engine.dispose()
