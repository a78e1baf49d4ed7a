"""Writes the reference of the command line into its page, from the commands themselves."""

from __future__ import annotations

from typing import Any

import typer

_MARK = "<!-- the commands -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """MkDocs calls this for every page before it is rendered."""
    return markdown.replace(_MARK, reference()) if _MARK in markdown else markdown


def reference() -> str:
    """Every command with its arguments and options, in Markdown."""
    from bo_tuner.cli.main import app

    group: Any = typer.main.get_command(app)
    return "\n\n".join(_command(name, command) for name, command in group.commands.items())


def _command(name: str, command: Any) -> str:
    rows = ["| option | meaning | default |", "| --- | --- | --- |", *map(_row, command.params)]
    return "\n\n".join([f"## {name}", str(command.help), "\n".join(rows)])


def _row(param: Any) -> str:
    spelled = param.metavar if param.param_type_name == "argument" else ", ".join(param.opts)
    return f"| `{spelled}` | {param.help} | {_default(param)} |"


def _default(param: Any) -> str:
    if isinstance(param.show_default, str):
        return str(param.show_default)
    return "" if param.required or param.default in (None, False) else f"`{param.default}`"
