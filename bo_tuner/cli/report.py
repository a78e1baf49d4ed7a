"""`bo-tuner report`: a study as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bo_tuner.cli.options import AsJson, Debug, Storage, StudyName, print_json
from bo_tuner.cli.studies import open_study
from bo_tuner.report import ReportedStudy, write_report
from bo_tuner.report.page import begun

__all__ = ["report"]


def report(
    study: StudyName,
    out: Annotated[Path | None, typer.Option(help="File to write.", show_default="STUDY.html")] = None,
    storage: Storage = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write a study as one HTML page, which needs no network.

    Works for a finished study and for one that runs. Prints the file.
    """
    store, manifest = open_study(study, storage)
    stop = store.last_stop()
    records = store.records()
    file = write_report(
        ReportedStudy(
            name=study,
            records=records,
            manifest=manifest,
            spent=store.spent(records),
            budget=stop.get("budget", ""),
            stop_reason=stop.get("reason", ""),
            storage_url=None if store.location.is_default else store.location.shown_url,
            folder=store.folder,
            started=begun(store.study),
        ),
        out,
    )
    if as_json:
        print_json({"study": study, "file": str(file)})
    else:
        print(file)
