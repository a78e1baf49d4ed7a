"""How long a rank may give no sign of life, and what is found out when it gives none for longer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bo_tuner.cluster import Cluster
from bo_tuner.config import TrainConfig
from bo_tuner.deadlines import PATIENCE, slowest_s
from bo_tuner.objectives.training.pulse import Pulses
from bo_tuner.objectives.training.stacks import Stack, stacks_of
from bo_tuner.workload import Workload

__all__ = ["LEAST_S", "Patience", "SignsOfLife"]

LEAST_S = 60.0
"""A loaded machine, a slow disk, a first kernel that is compiled: none of them is a hang."""
_START_S_PER_PARAMETER = 4e-7
"""Building, sharding and copying to a device; five times what building takes on one slow core."""


class Patience:
    """Deadlines for silence: a floor, what the workload may take, and what the trials so far took, times ten."""

    def __init__(
        self, workload: Workload, cluster: Cluster, *, least_s: float = LEAST_S, longest_wait_s: float = 0.0
    ) -> None:
        """Know nothing yet.

        Args:
            workload: What is trained.
            cluster: On what.
            least_s: No silence shorter than this is a hang.
            longest_wait_s: Seconds that the user's data may take to give a micro-batch; that is watched elsewhere.
        """
        self._workload = workload
        self._cluster = cluster
        self._least_s = least_s
        self._longest_wait_s = longest_wait_s
        self._longest_start_s = 0.0
        self._trained: list[tuple[int, float]] = []
        """Micro-batch size, and the longest silence of a trial while it trained."""

    def of_start(self) -> float:
        """Seconds of silence before the first step."""
        building_s = self._least_s + _START_S_PER_PARAMETER * self._workload.n_parameters
        return max(building_s, PATIENCE * self._longest_start_s) + self._longest_wait_s

    def of_training(self, config: TrainConfig, *, longest_s: float, n_steps: int) -> float:
        """Seconds of silence while steps are made.

        Args:
            config: What is trained.
            longest_s: Longest silence of this trial so far that ended.
            n_steps: Optimizer steps that every rank has finished.
        """
        size = config.micro_batch_size
        # Time follows the micro-batch at most; what a small one took, it took for other reasons.
        earlier = [PATIENCE * silent_s * max(size / known, 1.0) for known, silent_s in self._trained]
        allowed_s = max([self._least_s, PATIENCE * longest_s, *earlier])
        if n_steps == 0 and not earlier:
            allowed_s = max(allowed_s, slowest_s(size, self._workload, self._cluster.device))
        return allowed_s + self._longest_wait_s

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
        self._longest_start_s: float | None = None
        self._stacks: list[Stack] = []

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
        allowed_s = self._allowed_s(n_steps)
        silences_s = [self._pulses.silent_s(rank, now) for rank in range(len(self._pids))]
        if max(silences_s) <= allowed_s:
            return None
        self._ask()
        # Whoever waits in a collective waits for another, which may have made its last mark somewhat later.
        silent = [rank for rank, silent_s in enumerate(silences_s) if silent_s > allowed_s / 2]
        culprit = min(
            silent,
            key=lambda rank: (
                not self._stacks[rank].is_stopped,
                self._stacks[rank].is_in_collective,
                -silences_s[rank],
            ),
        )
        seconds = silences_s[culprit]
        return f"rank {culprit} gave no sign of life for {seconds:.0f} s: {self._stacks[culprit].where}"

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

    def _ask(self) -> None:
        self._stacks = stacks_of(self._pids, self._stack_files)
