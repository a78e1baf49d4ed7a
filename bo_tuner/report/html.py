"""Pages that need nothing else, and a study as one: plotly inside, no network, light and dark, the answer first."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bo_tuner.errors import StoreError
from bo_tuner.report.figures import study_figures
from bo_tuner.report.page import ReportedStudy, page_texts

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["rendered", "report_html", "write_page", "write_report"]

_SECTIONS = {
    "pareto": (
        "Samples/s against peak memory",
        "Complete trials that fit; the line leads along the front: those that none beats in both. Memory is that of the fullest rank.",
    ),
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
        "Every trial as it came, and the best so far. What gave no value stands at 0.",
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


_LONGEST_NAME = 200
"""Bytes of a page's name without its ending; file systems take 255 of both."""


def write_report(study: ReportedStudy, path: Path | None = None) -> Path:
    """Write the page, whole or not at all.

    Args:
        study: What to tell.
        path: The file; None for STUDY.html in the current folder, cut where no file system takes so long a name.

    Returns:
        The file.

    Raises:
        StoreError: The file cannot be written.
    """
    name = study.name.replace("/", "_").encode()[:_LONGEST_NAME].decode(errors="ignore")
    path = path or Path(f"{name}.html")
    write_page(report_html(study), path)
    return path


def write_page(text: str, path: Path) -> None:
    """Write a page, whole or not at all.

    Raises:
        StoreError: The file cannot be written.
    """
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


def report_html(study: ReportedStudy, *, now: datetime | None = None) -> str:
    """The page.

    Args:
        study: What to tell.
        now: When that is; None for this moment.
    """
    figures = study_figures(study.records, n_ranks=study.manifest.cluster.n_ranks)
    told = {name: (*_SECTIONS[name], figure) for name, figure in figures.items()}
    return rendered("report.html", told, page_texts(study, now=now or datetime.now()))


def rendered(template: str, figures: Mapping[str, tuple[str, str, go.Figure]], texts: Mapping[str, Any]) -> str:
    """A page with all that it needs inside.

    Args:
        template: Its name.
        figures: Title, caption and figure by name.
        texts: What else the template asks for.
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
    return environment.get_template(template).render(
        **texts,
        figures={name: _figure(*told) for name, told in figures.items()},
        style=folder.joinpath("report.css").read_text(encoding="utf-8"),
        script=folder.joinpath("report.js").read_text(encoding="utf-8"),
        plotly_js=get_plotlyjs(),
    )


def _figure(title: str, caption: str, figure: go.Figure) -> dict[str, str]:
    """Title, caption and data; the page has the title as a heading, and room for the legend above only."""
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
    return {"title": title, "caption": caption, "data": str(figure.to_json())}  # plotly escapes "<" in it
