"""A study as one HTML page: plotly inside, no network, light and dark, the answer first."""

from __future__ import annotations

import os
import tempfile
from datetime import datetime
from importlib import resources
from pathlib import Path

from bo_tuner.errors import StoreError
from bo_tuner.report.figures import study_figures
from bo_tuner.report.page import ReportedStudy, page_texts

__all__ = ["report_html", "write_report"]

_SECTIONS = {
    "throughput": (
        "Throughput and where memory ends",
        (
            "Above: samples/s of every complete trial; a line joins the fastest of a layout at each micro-batch. Below: a "
            "bar ends at the largest micro-batch that fitted, a cross did not fit, dots are unknown ground. Colour tells the "
            "ZeRO stage, shape the pipeline depth (pp), hollow and dotted that activations are recomputed (rc)."
        ),
    ),
    "memory": (
        "Peak memory against the limit",
        "Of the fullest rank. A cross is a trial that memory ended: it held so much by then, and needed more.",
    ),
    "history-trials": (
        "History over trials",
        "Every trial as it came, and the best so far. What gave no rate stands at 0.",
    ),
    "history-time": ("History over time", "The same over the time spent in trials: retries count, pauses do not."),
    "step-time": (
        "Step-time spread of the top configs",
        "Every measured step as its slowest rank saw it, against the median of its config.",
    ),
    "importances": (
        "Parameter importances",
        (
            "Share of each dimension in what parts the fastest trials from the others (PED-ANOVA). A hint, not a proof: it "
            "knows only the trials that ran."
        ),
    ),
}
"""Heading and caption of every figure."""


def write_report(study: ReportedStudy, path: Path | None = None) -> Path:
    """Write the page, whole or not at all.

    Args:
        study: What to tell.
        path: The file; None for STUDY.html in the current folder.

    Returns:
        The file.

    Raises:
        StoreError: The file cannot be written.
    """
    path = path or Path(f"{study.name.replace('/', '_')}.html")
    text = report_html(study)
    unfinished: Path | None = None
    try:
        if path.is_dir():
            raise IsADirectoryError(None, "it is a folder")
        handle, name = tempfile.mkstemp(dir=path.absolute().parent, prefix=".report-")
        unfinished = Path(name)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        unfinished.chmod(0o644)
        unfinished.replace(path)
    except OSError as error:
        if unfinished is not None:
            unfinished.unlink(missing_ok=True)
        raise StoreError(
            f"the report needs a file that can be written, and {path} cannot ({error.strerror}): choose another with --out"
        ) from error
    return path


def report_html(study: ReportedStudy, *, now: datetime | None = None) -> str:
    """The page.

    Args:
        study: What to tell.
        now: When that is; None for this moment.
    """
    import jinja2
    from plotly.offline import get_plotlyjs

    folder = resources.files("bo_tuner.report.templates")
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: folder.joinpath(name).read_text(encoding="utf-8")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("report.html").render(
        **page_texts(study, now=now or datetime.now()),
        figures=_figures(study),
        style=folder.joinpath("report.css").read_text(encoding="utf-8"),
        script=folder.joinpath("report.js").read_text(encoding="utf-8"),
        plotly_js=get_plotlyjs(),
    )


def _figures(study: ReportedStudy) -> dict[str, dict[str, str]]:
    """Title, caption and data of every figure; the page has the title as a heading, and room for the legend above only."""
    found: dict[str, dict[str, str]] = {}
    for name, figure in study_figures(study.records, n_ranks=study.manifest.cluster.n_ranks).items():
        title, caption = _SECTIONS[name]
        figure.update_layout(
            title=None,
            margin={"t": 16},
            legend={
                "orientation": "h",
                "x": 0,
                "xanchor": "left",
                "y": 1,
                "yanchor": "bottom",
                "entrywidth": 122,  # "ZeRO 1 pp2 gas2 rc"
            },
        )
        found[name] = {"title": title, "caption": caption, "data": str(figure.to_json())}  # plotly escapes "<" in it
    return found
