"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from bo_tuner.text import json_text

__all__ = ["AsJson", "Debug", "Storage", "StudyName", "print_json"]

Storage = Annotated[
    str | None,
    typer.Option(help="Database URL, as Optuna takes it.", show_default="SQLite in ./bo_tuner_studies"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")]
StudyName = Annotated[str, typer.Argument(metavar="STUDY", help="Name of the study; `bo-tuner list` shows them.")]


def print_json(data: Any) -> None:
    """One JSON document on stdout."""
    print(json_text(data))
