"""`TrialWatch`: follows one running trial from outside, until it is measured, has failed, or must be stopped."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bo_tuner.cluster import Cluster
from bo_tuner.config import TrainConfig
from bo_tuner.errors import DriverError
from bo_tuner.nvml import Device
from bo_tuner.objectives.base import EventSink, TrialEvent
from bo_tuner.objectives.launch import RankGroup
from bo_tuner.objectives.memory import Conditions, ConditionsTold, DeviceProbe, HostProbe, MemoryGuard, MemoryReading
from bo_tuner.objectives.training.failures import RankFailure
from bo_tuner.objectives.training.oom_kills import OomKills
from bo_tuner.objectives.training.pace import Pace
from bo_tuner.objectives.training.silence import SignsOfLife
from bo_tuner.objectives.training.stopping import LEAST_MEASURED_S, RankStep, StoppingRule
from bo_tuner.objectives.training.verdict import Verdict
from bo_tuner.outcome import Measurement, Outcome, TrialLimits, TrialResult
from bo_tuner.text import count, gib, rate

__all__ = ["TrialWatch"]

_POLL_S = 0.04
"""Between two looks at memory: 25 Hz."""
_POWER_S = 2.0
"""GPUs tell their power as the mean of a second, and are measured for twice that."""
_FEW_STEPS = 3
"""Of so few nobody expects that they have settled."""
_TELL_MICRO_BATCHES_S = 2.0
"""Of a step: where it takes longer, its running micro-batch is told."""
_TELL_EVERY_S = 0.5
"""Between two words on memory to those who look on, while no step ends."""


class TrialWatch:
    """One running trial: collects what the ranks say until it is measured, has failed, or must be stopped."""

    def __init__(
        self,
        group: RankGroup,
        config: TrainConfig,
        limits: TrialLimits,
        on_event: EventSink,
        *,
        cluster: Cluster,
        started: float,
        devices: Sequence[Device] = (),
        life: SignsOfLife | None = None,
    ) -> None:
        """Follow the ranks of `group`, launched at `started` of `time.monotonic`; `devices` are their GPUs, one a rank;
        `life` is None for ranks that make no marks."""
        self._group = group
        self._config = config
        self._limits = limits
        self._on_event = on_event
        self._cluster = cluster
        self._started = started
        self._rule = StoppingRule(
            limits,
            n_ranks=cluster.n_ranks,
            global_batch=config.global_batch(cluster.n_ranks),
            least_measured_s=_POWER_S if devices else LEAST_MEASURED_S,
        )
        self._pace = Pace(n_micro_batches=config.grad_accum_steps, longest_s=limits.longest_step_s)
        self._using_up: set[int] = set()
        """Ranks that take what their loader had ready."""
        self._step_at_least_s: float | None = None
        self._baselines: dict[int, int] = {}
        self._device_probe = DeviceProbe(devices, group.pids) if devices else None
        self._conditions = Conditions(devices)
        host_probe = HostProbe(dict(enumerate(group.pids)), self._baselines)
        self._guard = MemoryGuard(self._device_probe or host_probe, limit_bytes=limits.memory_bytes)
        self._look_at = started
        self._peaks = dict.fromkeys(range(cluster.n_ranks), 0)
        self._n_skipped = dict.fromkeys(range(cluster.n_ranks), 0)
        self._is_loss_finite = True
        self._failure: RankFailure | None = None
        self._oom_kills = OomKills()
        self._verdict = Verdict(n_ranks=cluster.n_ranks, n_oom_kills=self._oom_kills.since)
        for pid in group.pids:
            self._oom_kills.note(pid)
        self._life = life
        self._train_began: float | None = None
        self._ended = started
        self._told_at = started

    def run(self) -> None:
        """Watch until the end."""
        deadline = self._started + self._limits.deadline_s
        self._tell()
        while self._failure is None and not self._rule.is_done:
            for rank, message in self._group.poll(self._until_look_s()):
                self._take(rank, message)
            if self._failure is None:
                self._check_ends()
            if self._failure is None and not self._rule.is_done and not self._verdict.is_pending:
                self._check_memory()
                self._check_pace()
                if time.monotonic() - self._told_at > _TELL_EVERY_S:
                    self._tell()
                self._check_time(deadline)
        with contextlib.suppress(DriverError):  # the steps are measured
            self._conditions.sample(is_last=True)
        self._ended = time.monotonic()
        if self._failure is None and self._life is not None:
            self._life.learn()

    def _until_look_s(self) -> float:
        # Memory is not looked at any more once there is a sign of failure.
        return _POLL_S if self._verdict.is_pending else max(self._look_at - time.monotonic(), 0.0)

    def _take(self, rank: int, message: Mapping[str, Any]) -> None:
        match message["event"]:
            case "baseline":
                self._baselines[rank] = int(message["bytes"])
                self._oom_kills.note(self._group.pids[rank])  # whoever manages jobs may have put it into another group
            case "phase":
                if message["phase"] == "train" and self._train_began is None:
                    self._train_began = time.monotonic()
                    if self._life is not None:
                        self._life.start_ended(self._train_began)
            case "loader":
                n_workers = int(message["n_workers"])
                self._rule.loader_period = max(
                    self._rule.loader_period, n_workers // math.gcd(n_workers, self._config.grad_accum_steps)
                )
            case "uses up":
                (self._using_up.add if message["is_begin"] else self._using_up.discard)(rank)
            case "step":
                self._take_step(rank, message)
            case "skipped":
                self._n_skipped[rank] += 1
            case _:
                self._verdict.told(rank, message)

    def _take_step(self, rank: int, message: Mapping[str, Any]) -> None:
        before = self._rule.n_finished
        self._rule.add(rank, RankStep(total_s=message["total_s"], engine_s=message["engine_s"]))
        self._is_loss_finite &= bool(message["is_loss_finite"])
        self._peaks[rank] = max(self._peaks[rank], int(message["peak_bytes"]))
        if self._peaks[rank] > self._limits.memory_bytes and self._cluster.device == "cpu":
            self._stop_for_memory(MemoryReading(rank=rank, used_bytes=self._peaks[rank]))
        if self._rule.n_finished > before:
            self._tell()

    @property
    def _skipped(self) -> int:
        """Steps that every rank has skipped, since its gradients overflowed."""
        return min(self._n_skipped.values())

    def _check_ends(self) -> None:
        now = time.monotonic()
        for rank in self._group.hung_up:
            self._verdict.hung_up(rank, now=now)
        for rank, code in self._group.exit_codes.items():
            self._verdict.exited(rank, code, now=now)
        self._failure = self._verdict.decide(now)

    def _check_memory(self) -> None:
        now = time.monotonic()
        if now < self._look_at:
            return  # messages of fast steps would have it read a thousand times a second
        self._look_at = now + _POLL_S
        try:
            breach = self._guard.breach()
            if self._train_began is not None:
                self._conditions.sample()
        except DriverError as error:
            self._failure = RankFailure(
                outcome=Outcome.FAILED, reason=f"the GPU driver stopped answering while the trial ran ({error})"
            )
            return
        if breach is not None:
            self._stop_for_memory(breach)

    def _stop_for_memory(self, breach: MemoryReading) -> None:
        used = gib(breach.used_bytes) + ("" if breach.device_index is None else f" of GPU {breach.device_index}")
        self._failure = RankFailure(
            outcome=Outcome.GUARDED,
            reason=f"rank {breach.rank} used {used}, over the limit of {gib(self._limits.memory_bytes)}",
        )

    def _check_pace(self) -> None:
        if self._train_began is None or self._life is None:
            return
        now = time.monotonic()
        self._pace.note(now, n_begun=self._life.n_micro_batches, n_steps=self._rule.n_finished + self._skipped)
        if self._using_up:
            self._pace.wait(now)
        self._step_at_least_s = self._pace.too_long(now, excused_s=self._life.more_time_s)
        if self._step_at_least_s is not None:
            reason = (
                f"an optimizer step of {count(self._config.global_batch(self._cluster.n_ranks), 'sample')} takes over "
                f"{self._step_at_least_s:.0f} s, as its micro-batches show, and steps may take {self._limits.longest_step_s:g} s"
            )
            self._failure = RankFailure(outcome=Outcome.PRUNED, reason=reason)

    def _check_time(self, deadline: float) -> None:
        now = time.monotonic()
        reason = self._life.silence(now, n_steps=self._rule.n_finished) if self._life is not None else None
        if self._life is not None:
            deadline += self._life.more_time_s
        if reason is None and now > deadline:
            doing = f"in step {self._rule.n_finished + 1}" if self._train_began else "before its first step"
            where = f": {self._life.where()}" if self._life is not None else ""
            reason = f"not done after {deadline - self._started:.0f} s, still {doing}{where}"
        if self._limits.left_s is not None and now > self._started + self._limits.left_s:
            reason = "the budget is used up"
        if reason is not None:
            self._failure = RankFailure(outcome=Outcome.TIMEOUT, reason=reason)

    def _tell(self) -> None:
        self._told_at = time.monotonic()
        phase = self._rule.phase if self._train_began else "start"
        memory = max([*self._peaks.values(), self._guard.peak_bytes or 0]) or None
        tells = self._pace.running_s(self._told_at) > _TELL_MICRO_BATCHES_S
        self._on_event(
            TrialEvent(
                phase=phase,
                step=self._rule.n_finished,
                n_steps=self._rule.n_steps,
                memory_bytes=memory,
                micro_batch=self._pace.micro_batch if tells else 0,
                n_micro_batches=self._config.grad_accum_steps,
            )
        )

    def result(self, *, seq_len: int, teardown_s: float, wall_s: float, log_tail: str) -> TrialResult:
        """The trial as it ended."""
        failure, bound = self._failure, self._rule.bound_samples_per_s
        is_cut = failure is not None and failure.outcome is Outcome.PRUNED
        if is_cut and self._step_at_least_s is not None:
            bound = self._config.global_batch(self._cluster.n_ranks) / self._step_at_least_s
        peak = max([*self._peaks.values(), self._guard.peak_bytes or 0]) or None
        measurement, told, measured_s = None, ConditionsTold(), self._rule.measured_s
        if failure is None:
            measured = self._rule.measured()
            told = self._conditions.over(self._ended - measured_s, self._ended)
            measurement = Measurement(
                global_batch=self._config.global_batch(self._cluster.n_ranks),
                seq_len=seq_len,
                step_times_s=tuple(tuple(round(step.total_s, 6) for step in row) for row in measured),
                engine_times_s=tuple(tuple(round(step.engine_s, 6) for step in row) for row in measured),
                peak_memory_bytes=tuple(self._peaks[rank] for rank in range(self._cluster.n_ranks)),
                is_loss_finite=self._is_loss_finite,
                n_warmup=self._rule.n_warmup,
                n_skipped=self._skipped,
                is_settled=self._rule.is_settled,
                loader_period=self._rule.loader_period,
                process_peak_bytes=self._device_probe.process_peaks if self._device_probe else None,
                device_peak_bytes=self._device_probe.device_peaks if self._device_probe else None,
                power_w=told.power_w,
                energy_j=told.energy_j,
                throttling=told.throttling,
            )
        began = self._train_began or self._ended
        stacks = self._life.stack_lines() if self._life is not None else []
        return TrialResult(
            outcome=failure.outcome if failure else Outcome.COMPLETE if bound is None else Outcome.PRUNED,
            reason=failure.reason if failure else "; ".join(self._remarks(measurement)),
            measurement=measurement,
            bound_samples_per_s=bound if failure is None or is_cut else None,
            steps_bound_samples_per_s=None if failure else self._rule.steps_bound_samples_per_s,
            step_limit_s=self._limits.longest_step_s if is_cut else None,
            peak_memory_bytes=peak,
            rank_peaks_bytes=tuple(self._peaks[rank] for rank in range(self._cluster.n_ranks)),
            requested_bytes=failure.requested_bytes if failure else None,
            limit_bytes=self._limits.memory_bytes,
            wall_s=wall_s,
            phases_s={
                "start": began - self._started,
                "warmup": max(self._ended - began - measured_s, 0.0),
                "measure": measured_s,
                "teardown": teardown_s,
            },
            log_tail="\n".join([log_tail, *stacks]) if failure and not is_cut else "",
        )

    def _remarks(self, measurement: Measurement | None) -> Iterator[str]:
        """What is to be said of a trial that did not fail."""
        if self._rule.bound_samples_per_s is not None:
            yield f"ended early: slower than {rate(self._rule.bound_samples_per_s)}, which is below the best so far"
        elif not self._rule.is_settled and self._rule.n_finished > _FEW_STEPS:
            yield "step times had not settled at the last step"
        if not self._is_loss_finite:
            yield "the loss was not finite"
        if measurement is not None and measurement.unevenness:
            yield measurement.unevenness
        if measurement is not None and measurement.throttling:
            yield f"clocks were held down: {', '.join(measurement.throttling)}"
