"""The errors that callers may want to catch. Each text is one line: what must hold, what came, the way out."""

__all__ = [
    "BoTunerError",
    "ClusterError",
    "ConfigError",
    "CudaError",
    "DeviceBusyError",
    "DriverError",
    "LaunchError",
    "ModelError",
    "NothingFitsError",
    "StoreError",
    "StudyBusyError",
    "StudyMismatchError",
    "UnreadableStudyError",
]


class BoTunerError(Exception):
    """Base of all our errors."""

    exit_code = 1
    """What the command line exits with: 1 failed, 2 used wrongly."""


class ConfigError(BoTunerError, ValueError):
    """A value given by the user cannot be used."""

    exit_code = 2


class ClusterError(ConfigError):
    """The hardware asked for is not here."""


class DriverError(ClusterError):
    """The GPU driver, or a GPU, does not answer."""

    exit_code = 1

    def __init__(self, message: str, *, is_missing: bool = False, code: int | None = None) -> None:
        super().__init__(message)
        self.is_missing = is_missing
        """There is none."""
        self.code = code
        """NVML's (nvmlReturn_t), where it gave one."""


class CudaError(ClusterError):
    """The GPUs are here, and torch cannot use them."""

    exit_code = 1


class DeviceBusyError(BoTunerError):
    """A GPU is not free for the next trial: somebody else uses it, or it did not come back to its baseline."""

    def __init__(self, message: str, *, index: int, used_bytes: int, pids: tuple[int, ...]) -> None:
        super().__init__(message)
        self.index = index
        """As nvidia-smi counts."""
        self.used_bytes = used_bytes
        """Of the whole device."""
        self.pids = pids
        """Who holds it, as far as they can be seen."""


class ModelError(ConfigError):
    """The model is unknown, or cannot be built."""


class StudyMismatchError(ConfigError):
    """The study exists, for another workload, hardware or space."""


class StudyBusyError(BoTunerError):
    """Another process drives this study."""

    def __init__(self, message: str, *, host: str, pid: int) -> None:
        super().__init__(message)
        self.host = host
        self.pid = pid


class StoreError(BoTunerError):
    """The storage does not answer, refuses a write, or does not hold what was asked for."""


class UnreadableStudyError(StoreError):
    """What is stored of a study is damaged, or written by a newer version."""


class LaunchError(BoTunerError):
    """The processes that run trials cannot be started at all."""


class NothingFitsError(BoTunerError):
    """No trial completed, so there is no configuration to hand over."""
