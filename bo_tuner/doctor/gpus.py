"""The GPUs as their driver sees them, and whether torch can use them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bo_tuner.doctor.finding import Finding, fail, ok, warn
from bo_tuner.errors import DriverError
from bo_tuner.nvml import Nvml
from bo_tuner.objectives.memory import IDLE_BYTES
from bo_tuner.text import count, gib

__all__ = ["Driver", "Gpu", "gpu_findings", "read_driver", "sick_driver", "torch_build"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One device of this machine."""

    index: int
    name: str
    memory_bytes: int
    used_bytes: int
    pids: tuple[int, ...]
    """Processes that compute on it; empty too where a container hides them."""
    is_visible: bool
    """CUDA_VISIBLE_DEVICES leaves it to us."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """The NVIDIA driver and its devices."""

    version: str
    cuda: tuple[int, int]
    """The newest CUDA that it runs."""
    gpus: tuple[Gpu, ...]


def read_driver() -> Driver | None:
    """Ask NVML; None where there is no driver.

    Raises:
        DriverError: There is one, and it does not answer.
    """
    try:
        with Nvml() as nvml:
            shown = {device.index for device in nvml.visible()}
            gpus = tuple(
                Gpu(
                    index=device.index,
                    name=device.name,
                    memory_bytes=device.total_bytes,
                    used_bytes=device.used_bytes() or 0,
                    pids=tuple(process.pid for process in device.processes() or () if process.is_compute),
                    is_visible=device.index in shown,
                )
                for device in nvml.devices
            )
            return Driver(version=nvml.version, cuda=nvml.cuda, gpus=gpus)
    except DriverError as error:
        if error.is_missing:
            return None
        raise DriverError(f"its library is here, and the driver does not answer ({error})") from error


def sick_driver(reason: str, *, must_be_there: bool) -> Finding:
    """A driver that does not answer; trials then run on the CPU unless `--device cuda` was said."""
    mend = "nvidia-smi tells more; after an update of the driver reboot, or reload its kernel modules"
    return (fail if must_be_there else warn)("gpu driver", reason, mend)


def gpu_findings(driver: Driver | None, *, must_be_there: bool) -> Iterator[Finding]:
    """The driver, and a line a GPU.

    Args:
        driver: From `read_driver`.
        must_be_there: `--device cuda` was said.
    """
    if driver is None or not driver.gpus:
        found = "no NVIDIA driver" if driver is None else f"{driver.version}, and it shows no GPU"
        if must_be_there:
            mend = "install the NVIDIA driver; in a container: docker run --gpus all ...; or use --device cpu"
            yield fail("gpu driver", found, mend)
        else:
            yield ok("gpu driver", f"{found}: trials run on the CPU")
        return
    version = ".".join(map(str, driver.cuda))
    yield ok("gpu driver", f"{driver.version}, runs CUDA up to {version}", driver=driver.version, cuda=version)
    for gpu in driver.gpus:
        yield _gpu(gpu)


def _gpu(gpu: Gpu) -> Finding:
    name = f"gpu {gpu.index}"
    details = {"name": gpu.name, "memory_bytes": gpu.memory_bytes, "used_bytes": gpu.used_bytes, "pids": list(gpu.pids)}
    found = f"{gpu.name}, {gib(gpu.memory_bytes)}"
    if not gpu.is_visible:
        return ok(name, f"{found}, hidden by CUDA_VISIBLE_DEVICES", **details)
    if gpu.used_bytes <= IDLE_BYTES:
        return ok(name, found, **details)
    who = f" by process {', '.join(map(str, gpu.pids))}" if gpu.pids else " by processes that cannot be seen from here"
    mend = (
        f"end {'it' if len(gpu.pids) == 1 else 'them'}, or leave this GPU out: CUDA_VISIBLE_DEVICES names those to use"
    )
    return warn(name, f"{found}, {gib(gpu.used_bytes)} of it used{who}", mend, **details)


def torch_build(driver: Driver | None, *, version: str, cuda: str | None, wants_gpu: bool) -> Finding:
    """Whether the installed torch can use the GPUs.

    Within one major version of CUDA an older driver runs newer builds (NVIDIA, CUDA Compatibility, "Minor Version
    Compatibility").

    Args:
        driver: From `read_driver`.
        version: Of torch.
        cuda: That torch was built for; None for none.
        wants_gpu: Trials are to run on GPUs where there are any.
    """
    name = "torch"
    built = f"{version}, built {f'for CUDA {cuda}' if cuda else 'without CUDA'}"
    n_gpus = len(driver.gpus) if driver else 0
    if not wants_gpu or not driver or not n_gpus:
        return ok(name, built, version=version, cuda=cuda)
    newest = ".".join(map(str, driver.cuda))
    if cuda is None:
        mend = f"install a CUDA build of torch, for CUDA {newest} or older; or tune on the CPU with --device cpu"
        return fail(name, f"{built}, on a machine with {count(n_gpus, 'GPU')}", mend, version=version, cuda=cuda)
    if int(cuda.split(".")[0]) > driver.cuda[0]:
        mend = f"update the driver, or install a torch that is built for CUDA {newest} or older"
        return fail(name, f"{built}; the driver runs CUDA up to {newest}", mend, version=version, cuda=cuda)
    return ok(name, built, version=version, cuda=cuda)
