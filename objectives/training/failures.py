"""Why a rank failed: decided in the rank by class and message of the exception, and by exit codes outside it."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from pathlib import Path

from bo_tuner.outcome import Outcome
from bo_tuner.text import gib

__all__ = ["RankFailure", "ending_of", "kernel_oom_kills", "of_exception", "of_exit"]

_CPU_REFUSAL = re.compile(
    r"DefaultCPUAllocator: (?:can't|not enough|couldn't)[^:]*(?:: you tried to allocate (\d+) bytes)?"
)
"""torch has no class for a refusal on the CPU: a plain RuntimeError carries this text."""
_CUDA_REQUEST = re.compile(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
_CUDA_ROUNDING_BYTES = 6 * 2**20
"""torch tells the size of a request in hundredths, of GiB too."""
_CUDA_LIBRARY_REFUSALS = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory", "Cuda failure 2 'out of memory'")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """The end of one rank, and what it says about the trial."""

    outcome: Outcome
    reason: str
    requested_bytes: int | None = None
    """Size of the request that was refused."""


def of_exception(error: BaseException, *, phase: str, cap_bytes: int | None = None) -> RankFailure:
    """Judge an exception that ended a rank.

    Args:
        error: The exception itself.
        phase: `model`, `initialize`, `data` or `train`: what the rank was doing. What DeepSpeed refuses while it is initialised
            says that the config is illegal for it.
        cap_bytes: Our cap on the CUDA allocator, where one is set; a refusal that it explains is GUARDED.
    """
    import torch

    from bo_tuner.objectives.training.job import JobError

    text = _one_line(error)
    if isinstance(error, JobError):
        return RankFailure(outcome=Outcome.FAILED, reason=text)
    if isinstance(error, torch.OutOfMemoryError):
        requested = _cuda_request(text)
        would_hold = torch.cuda.memory_reserved() + (requested or 0) + _CUDA_ROUNDING_BYTES
        over_cap = cap_bytes is not None and would_hold > cap_bytes
        outcome = Outcome.GUARDED if over_cap else Outcome.OOM
        return RankFailure(outcome=outcome, reason=_short(text), requested_bytes=requested)
    if isinstance(error, MemoryError):
        return RankFailure(outcome=Outcome.OOM, reason=f"Python was refused memory: {_short(text)}")
    if isinstance(error, RuntimeError):
        refusal = _CPU_REFUSAL.search(text)
        if refusal:
            requested = int(refusal.group(1)) if refusal.group(1) else None
            size = f" of {gib(requested)}" if requested else ""
            return RankFailure(
                outcome=Outcome.OOM, reason=f"the allocator refused a request{size}", requested_bytes=requested
            )
        if any(mark in text for mark in _CUDA_LIBRARY_REFUSALS):
            return RankFailure(outcome=Outcome.OOM, reason=_short(text))
    if phase == "initialize" and isinstance(error, AssertionError | ValueError | NotImplementedError):
        return RankFailure(outcome=Outcome.REJECTED, reason=f"DeepSpeed refuses it: {_short(text)}")
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return RankFailure(
        outcome=Outcome.FAILED, reason=f"{type(error).__name__} in {phase}: {_short(text)}{_short(notes)}"
    )


def of_exit(code: int, *, rank: int, n_oom_kills: int) -> RankFailure:
    """Judge a rank that ended without a word.

    Args:
        code: Its exit code; a negative one is the signal that ended it.
        rank: Which one.
        n_oom_kills: Processes that the kernel killed for memory since the trial began.
    """
    if code == -signal.SIGKILL and n_oom_kills > 0:
        return RankFailure(
            outcome=Outcome.HOST_OOM, reason=f"the kernel killed rank {rank}: the machine is out of memory"
        )
    return RankFailure(outcome=Outcome.FAILED, reason=f"rank {rank} {ending_of(code)}")


def ending_of(code: int) -> str:
    """What an exit code says of a process that ended without a word; a negative one is the signal that ended it."""
    if code >= 0:
        return f"ended with exit code {code} and said nothing"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def kernel_oom_kills() -> int:
    """How many processes the kernel has killed for memory since boot; 0 where it does not count them."""
    for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
        if line.startswith("oom_kill "):
            return int(line.split()[1])
    return 0


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _short(text: str, limit: int = 240) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _cuda_request(text: str) -> int | None:
    found = _CUDA_REQUEST.search(text)
    return int(float(found.group(1)) * _UNITS[found.group(2)]) if found else None
