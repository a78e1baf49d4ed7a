"""How fast this machine's devices and links are, measured before the first trial."""

from bo_tuner.objectives.calibration.calibrate import calibrate
from bo_tuner.objectives.calibration.readings import LinkReading, Readings, WideReading

__all__ = ["LinkReading", "Readings", "WideReading", "calibrate"]
