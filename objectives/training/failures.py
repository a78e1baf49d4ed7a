"""Why a rank failed: decided in the rank by class and message of the exception itself, and by exit codes outside it."""

from __future__ import annotations

import errno
import re
import signal
from dataclasses import dataclass, replace

from bo_tuner.outcome import Outcome
from bo_tuner.text import gib

__all__ = ["UNHEARD", "RankFailure", "ending_of", "of_exception", "of_exit", "with_kills"]

UNHEARD = 76
"""The exit code of a rank that could not say why it ends (EX_PROTOCOL of sysexits.h)."""

_CPU_REFUSAL = re.compile(
    r"DefaultCPUAllocator: (?:can't|not enough|couldn't)[^:]*(?:: you tried to allocate (\d+) bytes)?"
)
"""torch has no class for a refusal on the CPU: a plain RuntimeError carries this text."""
_CUDA_REQUEST = re.compile(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
_CUDA_ROUNDING_BYTES = 6 * 2**20
"""torch tells the size of a request in hundredths, of GiB too."""
_CUDA_REFUSAL = re.compile(
    r"(?:(?:CUDA|HIP)(?: driver)? error|Triton Error \[(?:CUDA|HIP)\]): out of memory"
    r"|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|hipErrorOutOfMemory"
    r"|(?:CUBLAS|CUDNN|CUSOLVER|CUSPARSE|HIPBLAS)_STATUS_(?:\w+_)?ALLOC(?:ATION)?_FAILED|CUFFT_ALLOC_FAILED"
    r"|(?:Cuda|HIP) failure (?:\d+ )?'out of memory'|Failed to CUDA (?:calloc|malloc)"
)
"""In the words of the CUDA runtime, the driver (which expandable segments ask) and Triton; by the names of their codes, as bindings
for Python tell them; of the math libraries, cuDNN 9 among them; of NCCL of three generations. Triton's OutOfResources is none: it
speaks of a kernel's shared memory."""
_WRAPPED_REFUSAL = re.compile(r"\b(?:CUDA|HIP) out of memory\. Tried to allocate")
"""Of torch's allocator, whose error a compiler may wrap in another."""
_SYSTEM_REFUSAL = re.compile(r"unable to mmap \d+ bytes .*: Cannot allocate memory \(12\)")
"""torch, where it maps a file or memory that a data loader's worker shares."""
_KILLED_WORKER = re.compile(r"DataLoader worker \(pid \d+\) is killed by signal: Killed")
_MAY_LACK_MEMORY = re.compile(
    r"(?:CUBLAS|CUDNN|CUSOLVER|CUSPARSE|HIPBLAS)_STATUS_NOT_INITIALIZED"
    r"|(?:Unable to find a valid cuDNN algorithm|(?:FIND|GET) was unable to find an engine)"
)
"""What a library says that cannot make its handle, and of a convolution for which no algorithm works: for lack of memory, or for
another reason, such as a kernel that failed before."""
_NEARLY_FULL_BYTES = 512 * 2**20
"""Our own choice: a handle fits into it many times, with its workspace (32 MiB on Hopper, cuBLAS's documentation)."""
_LOST_PEER = re.compile(r"gloo/\S+\.cc:\d+\]")
"""gloo, too, raises a plain RuntimeError, which begins with the place in its source: a peer hung up, or did not answer."""
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """The end of one rank, and what it says about the trial."""

    outcome: Outcome
    reason: str
    requested_bytes: int | None = None
    """Size of the request that was refused."""
    is_consequence: bool = False
    """A collective broke, as it does when another rank has ended: the cause is there, if it can be found."""


def of_exception(
    error: BaseException, *, phase: str, cap_bytes: int | None = None, free_bytes: int | None = None
) -> RankFailure:
    """Judge an exception that ended a rank.

    Args:
        error: The exception itself.
        phase: `model`, `initialize`, `data` or `train`: what the rank was doing. What DeepSpeed refuses while it is initialised
            says that the config is illegal for it.
        cap_bytes: Our cap on the CUDA allocator, where one is set; a refusal that it explains is GUARDED.
        free_bytes: Free on the rank's GPU when it failed, where that is known.
    """
    import torch

    from bo_tuner.objectives.training.job import JobError

    text = _one_line(error)
    if isinstance(error, JobError):
        return RankFailure(outcome=Outcome.FAILED, reason=text)
    if isinstance(error, SystemExit):
        return RankFailure(outcome=Outcome.FAILED, reason=_short(f"its code calls exit({text}) in {phase}"))
    if isinstance(error, torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and _WRAPPED_REFUSAL.search(text)):
        requested = _cuda_request(text)
        would_hold = torch.cuda.memory_reserved() + (requested or 0) + _CUDA_ROUNDING_BYTES
        over_cap = cap_bytes is not None and would_hold > cap_bytes
        outcome = Outcome.GUARDED if over_cap else Outcome.OOM
        return RankFailure(outcome=outcome, reason=_short(text), requested_bytes=requested)
    if isinstance(error, MemoryError):
        return RankFailure(outcome=Outcome.OOM, reason=f"Python was refused memory: {_short(text)}".removesuffix(": "))
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return RankFailure(outcome=Outcome.OOM, reason=f"the system refused memory: {_short(text)}")
    if isinstance(error, RuntimeError):
        refusal = _CPU_REFUSAL.search(text)
        if refusal:
            requested = int(refusal.group(1)) if refusal.group(1) else None
            size = f" of {gib(requested)}" if requested else ""
            return RankFailure(
                outcome=Outcome.OOM, reason=f"the allocator refused a request{size}", requested_bytes=requested
            )
        if _SYSTEM_REFUSAL.search(text):
            return RankFailure(outcome=Outcome.OOM, reason=f"the system refused memory: {_short(text)}")
        if _CUDA_REFUSAL.search(text):
            return RankFailure(outcome=Outcome.OOM, reason=_short(text))
        if _MAY_LACK_MEMORY.search(text) and free_bytes is not None and free_bytes < _NEARLY_FULL_BYTES:
            reason = f"with {gib(free_bytes)} free on the GPU: {_short(text)}"
            return RankFailure(outcome=Outcome.OOM, reason=reason)
    if phase == "initialize" and isinstance(error, AssertionError | ValueError | NotImplementedError):
        return RankFailure(outcome=Outcome.REJECTED, reason=f"DeepSpeed refuses it: {_short(text)}")
    is_consequence = isinstance(error, torch.distributed.DistError) or (
        isinstance(error, RuntimeError) and _LOST_PEER.search(text) is not None
    )
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return RankFailure(
        outcome=Outcome.FAILED,
        reason=f"{type(error).__name__} in {phase}: {_short(text)}{_short(notes)}",
        is_consequence=is_consequence,
    )


def with_kills(failure: RankFailure, *, n_oom_kills: int) -> RankFailure:
    """What a rank said of its end, where the kernel killed processes for memory meanwhile: its data loader's worker may be one."""
    if n_oom_kills == 0 or not _KILLED_WORKER.search(failure.reason):
        return failure
    reason = f"the kernel killed a worker of a data loader, since the machine is out of memory, or its control group is: {failure.reason}"
    return replace(failure, outcome=Outcome.HOST_OOM, reason=_short(reason))


def of_exit(code: int, *, rank: int, n_oom_kills: int) -> RankFailure:
    """Judge a rank that ended without a word.

    Args:
        code: Its exit code; a negative one is the signal that ended it.
        rank: Which one.
        n_oom_kills: Processes that the kernel killed for memory where the ranks run, since the trial began.
    """
    if code == -signal.SIGKILL and n_oom_kills > 0:
        return RankFailure(
            outcome=Outcome.HOST_OOM,
            reason=f"the kernel killed rank {rank}: the machine is out of memory, or its control group is",
        )
    return RankFailure(outcome=Outcome.FAILED, reason=f"rank {rank} {ending_of(code)}")


def ending_of(code: int) -> str:
    """What an exit code says of a process that ended without a word; a negative one is the signal that ended it."""
    if code == 0:
        return "ended with exit code 0 before it was done: its code calls exit"
    if code > 0:
        return f"ended with exit code {code} and said nothing"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    # Shared memory is handed out when it is touched: where there is none left, that is how a process learns of it.
    return f"was ended by {name}" + ("; is /dev/shm full?" if code == -signal.SIGBUS else "")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _short(text: str, limit: int = 240) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _cuda_request(text: str) -> int | None:
    found = _CUDA_REQUEST.search(text)
    return int(float(found.group(1)) * _UNITS[found.group(2)]) if found else None
