"""What people see of a study: the live progress, the result table, the exported job."""

from bo_tuner.report.default import default_progress
from bo_tuner.report.export import write_job
from bo_tuner.report.progress import LineProgress, SilentProgress
from bo_tuner.report.shared import SharedProgress
from bo_tuner.report.summary import study_to_dict, summary_text, trials_table

__all__ = [
    "LineProgress",
    "SharedProgress",
    "SilentProgress",
    "default_progress",
    "study_to_dict",
    "summary_text",
    "trials_table",
    "write_job",
]
