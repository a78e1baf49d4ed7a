"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from bo_tuner.text import json_text

__all__ = ["AsJson", "Data", "Debug", "Dimensions", "MemoryReserve", "Storage", "StudyName", "names_in", "print_json"]

Storage = Annotated[
    str | None,
    typer.Option(help="Database URL, as Optuna takes it.", show_default="SQLite in ./bo_tuner_studies"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")]
Data = Annotated[
    str | None,
    typer.Option(help="FILE.py:FUNCTION that returns a data set or loader.", show_default="random samples"),
]
Dimensions = Annotated[
    list[str] | None,
    typer.Option(
        help="Also try: NAME=VALUE,VALUE:PATH of a DeepSpeed key, FILE.py:FUNCTION that returns Dimensions, or the NAME of one of an installed package; may be repeated.",
        show_default="none",
    ),
]
MemoryReserve = Annotated[
    str | None,
    typer.Option(help="Instead: memory of each device that stays free, as in 2GiB.", show_default="8 %"),
]
StudyName = Annotated[str, typer.Argument(metavar="STUDY", help="Name of the study; `bo-tuner list` shows them.")]


def names_in(text: str) -> tuple[str, ...]:
    """Names that commas part."""
    return tuple(name.strip() for name in text.split(","))


def print_json(data: Any) -> None:
    """One JSON document on stdout."""
    print(json_text(data))
