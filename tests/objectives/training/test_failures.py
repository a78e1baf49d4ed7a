"""What ended a rank is judged by the exception itself, and by exit codes."""

from __future__ import annotations

import errno
import signal

import pytest
import torch

from bo_tuner.objectives.training.failures import of_exception, of_exit, with_kills
from bo_tuner.outcome import Outcome

GIB = 2**30


def test_a_real_refusal_of_the_cpu_allocator_is_oom_with_its_size() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50, dtype=torch.uint8)
    failure = of_exception(caught.value, phase="train")
    assert failure.outcome is Outcome.OOM
    assert failure.requested_bytes == 2**50


def test_a_cuda_refusal_is_oom_with_its_size() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of ...")
    failure = of_exception(error, phase="train")
    assert failure.outcome is Outcome.OOM
    assert failure.requested_bytes == 2.5 * GIB


def test_a_cuda_refusal_that_our_cap_explains_is_guarded() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB.")
    assert of_exception(error, phase="train", cap_bytes=2 * GIB).outcome is Outcome.GUARDED
    assert of_exception(error, phase="train", cap_bytes=3 * GIB).outcome is Outcome.OOM
    just_over = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")  # 2.004, rounded by torch
    assert of_exception(just_over, phase="train", cap_bytes=2 * GIB + 2**21).outcome is Outcome.GUARDED


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("unable to mmap 40960 bytes from file </torch_12_3>: Cannot allocate memory (12)"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasLtCreate(&handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
        RuntimeError("CUDA error: CUSPARSE_STATUS_ALLOC_FAILED when calling `cusparseCreate(handle)`"),
        RuntimeError("[CUDA_ERROR_OUT_OF_MEMORY] out of memory"),
        RuntimeError("HIP error: out of memory"),
        RuntimeError("CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`"),
        RuntimeError("InductorError: OutOfMemoryError: HIP out of memory. Tried to allocate 20.00 MiB."),
        torch.distributed.DistBackendError("Last error: HIP failure 2 'out of memory'"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        torch.distributed.DistBackendError("NCCL error ... ncclUnhandledCudaError ... Cuda failure 2 'out of memory'"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("NCCL Error 1: unhandled cuda error ... Cuda failure 2 'out of memory'"),
        torch.distributed.DistBackendError(
            "ncclUnhandledCudaError ... Last error: Failed to CUDA calloc async 608 bytes"
        ),
        RuntimeError("CUDA driver error: out of memory"),
        torch.AcceleratorError("CUDA error: out of memory Search for `cudaErrorMemoryAllocation' in ..."),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"),
        RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"),
    ],
)
def test_allocation_failures_of_python_and_of_libraries_are_oom(error: Exception) -> None:
    assert of_exception(error, phase="train").outcome is Outcome.OOM


def test_a_refusal_that_a_compiler_wrapped_keeps_its_size() -> None:
    error = RuntimeError("OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has ...")
    failure = of_exception(error, phase="train")
    assert (failure.outcome, failure.requested_bytes) == (Outcome.OOM, GIB)
    assert of_exception(error, phase="train", cap_bytes=GIB // 2).outcome is Outcome.GUARDED


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
        "Unable to find a valid cuDNN algorithm to run convolution",
        "GET was unable to find an engine to execute this computation",
    ],
)
def test_what_a_library_does_without_memory_and_otherwise_is_lack_of_memory_only_where_the_gpu_was_nearly_full(
    text: str,
) -> None:
    error = RuntimeError(text)
    full = of_exception(error, phase="train", free_bytes=GIB // 16)
    assert full.outcome is Outcome.OOM
    assert full.reason == f"with 64 MiB free on the GPU: {text}"
    assert of_exception(error, phase="train", free_bytes=40 * GIB).outcome is Outcome.FAILED
    assert of_exception(error, phase="train").outcome is Outcome.FAILED


def test_a_worker_of_a_data_loader_ran_out_of_memory_only_where_the_kernel_killed_something_for_it() -> None:
    killed = of_exception(RuntimeError("DataLoader worker (pid 12) is killed by signal: Killed. "), phase="data")
    assert with_kills(killed, n_oom_kills=0) == killed
    found = with_kills(killed, n_oom_kills=1)
    assert found.outcome is Outcome.HOST_OOM
    assert found.reason.startswith("the kernel killed a worker of a data loader, since the machine is out of memory")
    other = of_exception(RuntimeError("DataLoader worker (pid 12) is killed by signal: Aborted. "), phase="data")
    assert with_kills(other, n_oom_kills=1) == other


@pytest.mark.parametrize("error", [AssertionError("no"), ValueError("no"), NotImplementedError("no")])
def test_a_refusal_while_deepspeed_is_initialised_is_rejected_and_elsewhere_a_failure(error: Exception) -> None:
    assert of_exception(error, phase="initialize").outcome is Outcome.REJECTED
    assert of_exception(error, phase="train").outcome is Outcome.FAILED


def test_code_that_calls_exit_is_told_as_that() -> None:
    assert of_exception(SystemExit(0), phase="train").reason == "its code calls exit(0) in train"


@pytest.mark.parametrize(
    "error",
    [
        ValueError("the dataset is out of memory bounds"),
        RuntimeError("my replay memory is out of memory slots"),
        RuntimeError("out of memory"),
        RuntimeError("Failed to allocate a name for the run"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"),
        KeyError("CUDA error: out of memory"),
        RuntimeError(
            "out of resource: shared memory, Required: 264192, Hardware limit: 232448. Reducing block sizes may help."
        ),
        RuntimeError(
            "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's workers are out of "
            "shared memory. Please try to raise your shared memory limit."
        ),
        RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)"),
        torch.distributed.DistBackendError(
            "NCCL error: ncclSystemError ... Error while creating shared memory segment /dev/shm/nccl-1: No space left on device"
        ),
    ],
)
def test_a_text_that_mentions_memory_is_not_taken_for_a_refusal(error: Exception) -> None:
    failure = of_exception(error, phase="train")
    assert failure.outcome is Outcome.FAILED
    assert failure.reason.startswith(f"{type(error).__name__} in train: ")


def test_a_long_message_is_one_short_line() -> None:
    failure = of_exception(ValueError("first line\nsecond " + "x" * 1000), phase="train")
    assert "\n" not in failure.reason
    assert len(failure.reason) < 300


@pytest.mark.parametrize(
    ("code", "n_oom_kills", "outcome", "text"),
    [
        (-signal.SIGKILL, 1, Outcome.HOST_OOM, "the kernel killed rank 1"),
        (-signal.SIGKILL, 0, Outcome.FAILED, "SIGKILL"),
        (-signal.SIGBUS, 1, Outcome.FAILED, "SIGBUS; is /dev/shm full?"),
        (-signal.SIGSEGV, 1, Outcome.FAILED, "SIGSEGV"),
        (-64, 0, Outcome.FAILED, "SIGRTMAX"),
        (3, 0, Outcome.FAILED, "ended with exit code 3 and said nothing"),
        (0, 0, Outcome.FAILED, "ended with exit code 0 before it was done: its code calls exit"),
    ],
)
def test_a_silent_end_is_judged_by_its_code(code: int, n_oom_kills: int, outcome: Outcome, text: str) -> None:
    failure = of_exit(code, rank=1, n_oom_kills=n_oom_kills)
    assert failure.outcome is outcome
    assert text in failure.reason


@pytest.mark.parametrize(
    ("error", "is_consequence"),
    [
        (RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"), True),
        (torch.distributed.DistBackendError("NCCL error: remote process exited or there was a network error"), True),
        (torch.distributed.DistNetworkError("Connection reset by peer"), True),
        (RuntimeError("Connection closed by peer"), False),
        (ConnectionResetError("Connection reset by peer"), False),
    ],
)
def test_a_broken_collective_is_the_consequence_of_something_else(error: Exception, is_consequence: bool) -> None:
    failure = of_exception(error, phase="train")
    assert failure.outcome is Outcome.FAILED
    assert failure.is_consequence is is_consequence
