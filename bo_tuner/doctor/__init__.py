"""`bo-tuner doctor`: is this machine fit to run trials, and if not, what mends it."""

from bo_tuner.doctor.examination import examine
from bo_tuner.doctor.finding import Finding, Status

__all__ = ["Finding", "Status", "examine"]
