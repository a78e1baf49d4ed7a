"""The GPUs as their driver sees them, and whether torch can use them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bo_tuner.cluster import Cluster
from bo_tuner.cuda import cuda_trouble
from bo_tuner.doctor.finding import Finding, fail, ok, warn
from bo_tuner.errors import ClusterError, DriverError
from bo_tuner.nvml import Device, Nvml
from bo_tuner.objectives.memory import IDLE_BYTES
from bo_tuner.text import count, gib

__all__ = ["Driver", "Gpu", "cuda", "gpu_findings", "read_driver", "sick_driver", "torch_build"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One device of this machine."""

    index: int
    name: str = ""
    memory_bytes: int = 0
    used_bytes: int = 0
    pids: tuple[int, ...] = ()
    """Processes that compute on it; empty too where a container hides them."""
    is_visible: bool
    """CUDA_VISIBLE_DEVICES leaves it to us."""
    silent_because: str = ""
    """Why it does not answer; empty where it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """The NVIDIA driver and its devices."""

    version: str
    cuda: tuple[int, int]
    """The newest CUDA that it runs."""
    gpus: tuple[Gpu, ...]
    visible: tuple[int, ...] = ()
    """Indices of those left to us, in the order of ranks."""


def read_driver() -> Driver | None:
    """Ask NVML; None where there is no driver.

    Raises:
        DriverError: There is one, and it does not answer.
    """
    try:
        with Nvml() as nvml:
            try:
                shown = {device.index: device for device in nvml.visible()}
            except ClusterError:  # told as what is wrong with the devices of a study
                shown = dict[int, Device]()
                hidden = set[int]()
            else:
                hidden = set(range(nvml.n_devices)) - shown.keys()
            gpus = tuple(
                _read(nvml, index, shown.get(index), is_visible=index not in hidden) for index in range(nvml.n_devices)
            )
            return Driver(version=nvml.version, cuda=nvml.cuda, gpus=gpus, visible=tuple(shown))
    except DriverError as error:
        if error.is_missing:
            return None
        raise DriverError(f"its library is here, and the driver does not answer ({error})") from error


def _read(nvml: Nvml, index: int, shown: Device | None, *, is_visible: bool) -> Gpu:
    """One GPU, or of a divided one the instance that is shown."""
    try:
        device = shown or nvml.device(index)
        return Gpu(
            index=index,
            name=device.name,
            memory_bytes=device.total_bytes,
            used_bytes=device.used_bytes() or 0,
            pids=tuple(process.pid for process in device.processes() or () if process.is_compute),
            is_visible=is_visible,
        )
    except DriverError as error:
        return Gpu(index=index, is_visible=is_visible, silent_because=str(error))


def sick_driver(reason: str, *, wants_gpu: bool) -> Finding:
    """A driver that does not answer; trials then run with `--device cpu` only."""
    mend = "nvidia-smi tells more; after an update of the driver reboot, or reload its kernel modules"
    return (fail if wants_gpu else warn)("gpu driver", reason, mend)


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
    if gpu.silent_because:
        mend = "leave it out: CUDA_VISIBLE_DEVICES names those to use; nvidia-smi and dmesg tell more, and a reboot may mend it"
        return warn(name, gpu.silent_because, mend)
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


def cuda(cluster: Cluster) -> Finding:
    """Whether torch really computes on each GPU."""
    trouble = cuda_trouble(cluster)
    if trouble is not None:
        return fail("cuda", trouble.found, trouble.mend)
    return ok("cuda", f"torch computes on {count(cluster.n_ranks, 'GPU')}")
