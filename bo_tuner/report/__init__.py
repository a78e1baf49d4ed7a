"""What people see of a study: the live progress, the result table, the report with its figures, the exported job."""

from bo_tuner.report.default import default_progress
from bo_tuner.report.export import write_job
from bo_tuner.report.figures import (
    dashboard_figures,
    history_figure,
    importance_figure,
    memory_figure,
    pareto_figure,
    step_time_figure,
    study_figures,
    throughput_figure,
)
from bo_tuner.report.html import report_html, write_report
from bo_tuner.report.page import ReportedStudy
from bo_tuner.report.progress import LineProgress, SilentProgress
from bo_tuner.report.shared import SharedProgress
from bo_tuner.report.summary import study_to_dict, summary_text, trials_table

__all__ = [
    "LineProgress",
    "ReportedStudy",
    "SharedProgress",
    "SilentProgress",
    "dashboard_figures",
    "default_progress",
    "history_figure",
    "importance_figure",
    "memory_figure",
    "pareto_figure",
    "report_html",
    "step_time_figure",
    "study_figures",
    "study_to_dict",
    "summary_text",
    "throughput_figure",
    "trials_table",
    "write_job",
    "write_report",
]
