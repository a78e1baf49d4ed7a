"""The errors that callers may want to catch. Each text is one line: what must hold, what came, the way out."""

__all__ = [
    "BoTunerError",
    "ClusterError",
    "ConfigError",
    "LaunchError",
    "ModelError",
    "NothingFitsError",
    "StoreError",
    "StudyBusyError",
    "StudyMismatchError",
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


class LaunchError(BoTunerError):
    """The processes that run trials cannot be started at all."""


class NothingFitsError(BoTunerError):
    """No trial completed, so there is no configuration to hand over."""
