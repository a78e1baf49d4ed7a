"""How long a rank may give no sign of life, and what is found out when it gives none for longer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bo_tuner.cluster import Cluster
from bo_tuner.config import TrainConfig
from bo_tuner.deadlines import PATIENCE, slowest_s
from bo_tuner.objectives.training.pulse import Pulses
from bo_tuner.objectives.training.stacks import Stack, stacks_of
from bo_tuner.objectives.training.work import Work
from bo_tuner.workload import Workload

__all__ = ["LEAST_S", "Patience", "SignsOfLife"]

LEAST_S = 60.0
"""A loaded machine, a slow disk, a first kernel that is loaded: none of them is a hang."""
_LONGEST_WORK_S = 600.0
"""Of a rank that compiles, without a mark."""
_LOOKS_AT_WORK = 12
"""At a silent rank, within the least silence: often enough that no compiler of some seconds is missed."""
_START_S_PER_PARAMETER = 4e-7
"""Building, sharding and copying to a device; five times what building takes on one slow core."""


class Patience:
    """Deadlines for silence: a floor, what the workload may take, and what the trials so far took, times ten."""

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        *,
        least_s: float = LEAST_S,
        longest_wait_s: float = 0.0,
        longest_work_s: float = _LONGEST_WORK_S,
        first_step_s: float | None = None,
    ) -> None:
        """Know nothing yet.

        Args:
            workload: What is trained.
            cluster: On what.
            least_s: No silence shorter than this is a hang.
            longest_wait_s: Seconds that the user's data may take to give a micro-batch; that is watched elsewhere.
            longest_work_s: Seconds that a rank may be at work, as compilers are, without a mark.
            first_step_s: Seconds of silence that are allowed before the first step is done, whatever they are spent on; None to follow
                from the workload.
        """
        self._workload = workload
        self._cluster = cluster
        self._least_s = least_s
        self._longest_wait_s = longest_wait_s
        self._longest_work_s = longest_work_s
        self._first_step_s = first_step_s
        self._longest_start_s = 0.0
        self._trained: list[tuple[int, float]] = []
        """Micro-batch size, and the longest silence of a trial while it trained."""

    def of_start(self) -> float:
        """Seconds of silence before training begins."""
        if self._first_step_s is not None:
            return self._first_step_s + self._longest_wait_s
        building_s = self._least_s + _START_S_PER_PARAMETER * self._workload.n_parameters
        return max(building_s, PATIENCE * self._longest_start_s) + self._longest_wait_s

    def of_training(self, config: TrainConfig, *, longest_s: float, n_steps: int) -> float:
        """Seconds of silence while steps are made.

        Args:
            config: What is trained.
            longest_s: Longest silence of this trial so far that ended.
            n_steps: Optimizer steps that every rank has finished.
        """
        if n_steps == 0 and self._first_step_s is not None:
            return self._first_step_s + self._longest_wait_s
        size = config.micro_batch_size
        # Time follows the micro-batch at most; what a small one took, it took for other reasons.
        earlier = [PATIENCE * silent_s * max(size / known, 1.0) for known, silent_s in self._trained]
        allowed_s = max([self._least_s, PATIENCE * longest_s, *earlier])
        if n_steps == 0 and not earlier:
            allowed_s = max(allowed_s, slowest_s(size, self._workload, self._cluster.device))
        return allowed_s + self._longest_wait_s

    @property
    def of_work_s(self) -> float:
        """Seconds without a mark of a rank that is at work all the same: what is compiled anew later may take as long as at first."""
        return self._longest_work_s if self._first_step_s is None else self._first_step_s

    @property
    def between_looks_s(self) -> float:
        """Between two looks at what silent ranks spend."""
        return self._least_s / _LOOKS_AT_WORK

    @property
    def more_time_s(self) -> float:
        """That a trial has beside its deadline, since the user said that its first step may be slow."""
        return self._first_step_s or 0.0

    def learn_start(self, longest_s: float) -> None:
        """The longest silence of a start that went well."""
        self._longest_start_s = max(self._longest_start_s, longest_s)

    def learn_training(self, config: TrainConfig, longest_s: float) -> None:
        """The longest silence of a trial that completed."""
        self._trained.append((config.micro_batch_size, longest_s))


class SignsOfLife:
    """The marks of one trial's ranks, and what is found out about a rank that makes none."""

    def __init__(
        self, pulses: Pulses, patience: Patience, config: TrainConfig, pids: Sequence[int], stack_files: Sequence[Path]
    ) -> None:
        """Watch the ranks of a trial.

        Args:
            pulses: Their marks.
            patience: How long they may make none.
            config: What they run.
            pids: Their processes, by rank.
            stack_files: Where each writes its stack to, by rank.
        """
        self._pulses = pulses
        self._patience = patience
        self._config = config
        self._pids = pids
        self._stack_files = stack_files
        self._work = [Work(pid) for pid in pids]
        self._worked_s = 0.0
        self._longest_start_s: float | None = None
        self._stacks: list[Stack] = []

    @property
    def more_time_s(self) -> float:
        """That the trial has beside its deadline: its first step may be slow, or it compiled."""
        return self._patience.more_time_s + self._worked_s

    def start_ended(self, now: float) -> None:
        """The first rank trains."""
        self._pulses.look(now)
        self._longest_start_s = self._pulses.longest_s
        self._pulses.forget(now)

    def silence(self, now: float, *, n_steps: int) -> str | None:
        """Look; which rank has been silent for too long, and where it stands, in one line; None when all is well.

        Args:
            now: Of `time.monotonic`.
            n_steps: Optimizer steps that every rank has finished.
        """
        self._pulses.look(now)
        self._look_at_work(now)
        ranks = range(len(self._pids))
        allowed_s = self._allowed_s(n_steps)
        silences_s = [self._pulses.silent_s(rank, now) for rank in ranks]
        unmarked_s = [self._pulses.unmarked_s(rank, now) for rank in ranks]
        is_silent = max(silences_s) > allowed_s
        is_over = max(unmarked_s) > max(allowed_s, self._patience.of_work_s)
        if not is_silent and not is_over:
            return None
        self._ask()
        compiling = [rank for rank in ranks if self._stacks[rank].is_compiling and self._work[rank].is_busy]
        when = " before its first step was done" if n_steps == 0 else ""
        option = " (--first-step-timeout)" if n_steps == 0 or is_over else ""
        if is_over and (compiling or not is_silent):
            culprit = max(
                compiling or ranks, key=lambda rank: (not self._stacks[rank].is_in_collective, unmarked_s[rank])
            )
            seconds, what = unmarked_s[culprit], "was at work and did not get on"
        elif compiling:
            self._excuse(max(silences_s), now)
            return None
        else:
            # Whoever waits in a collective waits for another, which may have made its last mark somewhat later.
            culprit = min(
                (rank for rank in ranks if silences_s[rank] > allowed_s / 2),
                key=lambda rank: (
                    not self._stacks[rank].is_stopped,
                    self._stacks[rank].is_in_collective,
                    -silences_s[rank],
                ),
            )
            seconds, what = silences_s[culprit], "gave no sign of life"
        return f"rank {culprit} {what} for {seconds:.0f} s{when}{option}: {self._stacks[culprit].where}"

    @property
    def n_micro_batches(self) -> int:
        """That the slowest rank has begun to train on."""
        return self._pulses.n_micro_batches

    def where(self) -> str:
        """Where each rank stands, in one line."""
        self._ask()
        return "; ".join(f"rank {rank}: {stack.where}" for rank, stack in enumerate(self._stacks))

    def stack_lines(self) -> list[str]:
        """The stacks for people; none when nobody was asked."""
        return [f"[stack of rank{rank}] {line}" for rank, stack in enumerate(self._stacks) for line in stack.lines()]

    def learn(self) -> None:
        """The trial went well: its silences were none to worry about."""
        if self._longest_start_s is not None:
            self._patience.learn_start(self._longest_start_s)
            self._patience.learn_training(self._config, self._pulses.longest_s)

    def _allowed_s(self, n_steps: int) -> float:
        if self._longest_start_s is None:
            return self._patience.of_start()
        return self._patience.of_training(self._config, longest_s=self._pulses.longest_s, n_steps=n_steps)

    def _look_at_work(self, now: float) -> None:
        """Child processes of a silent rank at work are a sign of life of it, and of all who may wait for it."""
        every_s = self._patience.between_looks_s
        for rank, work in enumerate(self._work):
            if self._pulses.unmarked_s(rank, now) < every_s:
                work.forget()
            else:
                work.look(now, every_s=every_s)
        worked_s = max(work.by_children_s for work in self._work)
        if worked_s > 0:
            self._excuse(worked_s, now)

    def _excuse(self, worked_s: float, now: float) -> None:
        self._worked_s += worked_s
        self._pulses.excuse(now)

    def _ask(self) -> None:
        self._stacks = stacks_of(self._pids, self._stack_files)
