"""`Verdict`: which rank failed first, and how.

A rank that dies takes its peers' collectives with it, and their "connection closed by peer" may be heard before its own end is
noticed. So nothing is decided at the first sign: a short while is waited for earlier failures, and longer where all that is
known are errors that must have a cause elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bo_tuner.objectives.training.failures import UNHEARD, RankFailure, of_exit, with_kills
from bo_tuner.outcome import Outcome

__all__ = ["Verdict"]

_GRACE_S = 0.25
"""After a cause is known, for one that is older and was told later."""
_LONGEST_GRACE_S = 5.0
"""After an error that is the consequence of another, for that other; and after a rank hung up, for its exit. A process that
holds much memory, or writes a core dump, takes its time to end."""


class Verdict:
    """Collects the signs of failure of one trial's ranks."""

    def __init__(self, *, n_ranks: int, n_oom_kills: Callable[[], int]) -> None:
        """Begin with none.

        Args:
            n_ranks: World size.
            n_oom_kills: Processes that the kernel has killed for memory since the trial began.
        """
        self._n_ranks = n_ranks
        self._n_oom_kills = n_oom_kills
        self._told: dict[int, tuple[float, RankFailure]] = {}
        self._exits: dict[int, tuple[float, int]] = {}
        self._hung_up: dict[int, float] = {}
        self._cause_known_at: float | None = None

    @property
    def is_pending(self) -> bool:
        """There is a sign of failure, so that whatever happens now came later."""
        return bool(self._told or self._exits or self._hung_up)

    def told(self, rank: int, message: Mapping[str, Any]) -> None:
        """A rank says why it ends: the fields of `RankFailure`, and `at`, the moment by the clock that all ranks share."""
        failure = RankFailure(
            outcome=Outcome(message["outcome"]),
            reason=f"rank {rank}: {message['reason']}",
            requested_bytes=message["requested_bytes"],
            is_consequence=message["is_consequence"],
        )
        self._told.setdefault(rank, (message["at"], failure))

    def exited(self, rank: int, code: int, *, now: float) -> None:
        """A rank has ended; may be said again and again."""
        self._exits.setdefault(rank, (now, code))

    def hung_up(self, rank: int, *, now: float) -> None:
        """A rank's channel is closed, as it is soon before its end is known; may be said again and again."""
        self._hung_up.setdefault(rank, now)

    def decide(self, now: float) -> RankFailure | None:
        """The first failure, once an earlier one can no longer be expected; None until then.

        Args:
            now: Of `time.monotonic`, like all times here.
        """
        if not self.is_pending:
            return None
        causes = self._causes(now)
        first_sign = min(self._signs())
        if not any(failure.is_consequence is False for _, failure in causes):
            is_over = self._is_all_known or now - first_sign > _LONGEST_GRACE_S
        else:
            self._cause_known_at = self._cause_known_at or now
            is_over = self._is_all_known or now - self._cause_known_at > _GRACE_S
        if not causes or not is_over:
            return None
        return min(causes, key=lambda cause: (cause[1].is_consequence, cause[0]))[1]

    def _signs(self) -> list[float]:
        moments = [*(at for at, _ in self._told.values()), *(at for at, _ in self._exits.values())]
        return [*moments, *self._hung_up.values()]

    @property
    def _is_all_known(self) -> bool:
        """Every rank has said why it ends, or has ended with nothing left to read from it."""
        return all(
            rank in self._told or (rank in self._exits and rank in self._hung_up) for rank in range(self._n_ranks)
        )

    def _causes(self, now: float) -> list[tuple[float, RankFailure]]:
        """What every rank that failed says of it, with the moment."""
        causes = [(at, with_kills(told, n_oom_kills=self._n_oom_kills())) for at, told in self._told.values()]
        for rank, (at, code) in self._exits.items():
            if rank in self._told:
                continue
            if code == UNHEARD:
                failure = self._lost(rank, "and ended")
            else:
                failure = of_exit(code, rank=rank, n_oom_kills=self._n_oom_kills())
            causes.append((min(at, self._hung_up.get(rank, at)), failure))
        for rank, at in self._hung_up.items():
            if rank not in self._told and rank not in self._exits and now - at > _LONGEST_GRACE_S:
                causes.append((at, self._lost(rank, "and lives on")))
        return causes

    @staticmethod
    def _lost(rank: int, and_then: str) -> RankFailure:
        reason = f"rank {rank} lost its connection to the supervisor {and_then}: its code may close files that it did not open"
        return RankFailure(outcome=Outcome.FAILED, reason=reason)
