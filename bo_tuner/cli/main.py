"""`bo-tuner`: results to stdout, talk to stderr, errors in one line; exit code 0 done, 1 failed, 2 used wrongly."""

from __future__ import annotations

import signal
import sys
import traceback
from importlib import metadata
from types import FrameType
from typing import Annotated

import typer

from bo_tuner.cli.dashboard import dashboard
from bo_tuner.cli.doctor import doctor
from bo_tuner.cli.plan import plan
from bo_tuner.cli.report import report
from bo_tuner.cli.studies import export, list_studies, show
from bo_tuner.cli.tune import tune
from bo_tuner.cli.watch import watch
from bo_tuner.errors import BoTunerError

__all__ = ["main"]

app = typer.Typer(
    help="Find the fastest training configuration that fits, by short real training steps.",
    add_completion=False,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(metadata.version("bo_tuner"))
        raise typer.Exit


app.command()(tune)
app.command()(plan)
app.command()(watch)
app.command()(show)
app.command()(report)
app.command()(export)
app.command()(dashboard)
app.command(name="list")(list_studies)
app.command()(doctor)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    given = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        code = app(args=given, prog_name="bo-tuner", standalone_mode=False)
        return int(code or 0)
    except BoTunerError as error:
        return _fail(str(error), error.exit_code, debug="--debug" in given)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:
        return 1  # the reader of our output has had enough
    except typer.TyperException as error:
        message = f"{error.format_message()}{_what_came(error, given)} (bo-tuner --help tells more)"
        return _fail(message, 2, debug="--debug" in given)
    except Exception as error:  # noqa: BLE001  # the last resort: one line, and --debug for the rest
        if "--debug" in given:
            traceback.print_exc()
        return _fail(f"unexpected {type(error).__name__}: {error} (--debug shows where)", 1, debug=False)


def _what_came(error: typer.TyperException, given: list[str]) -> str:
    """The value of the option that `error` is about, which Typer's own text leaves out."""
    for option in getattr(getattr(error, "param", None), "opts", []):
        for word, after in zip(given, [*given[1:], ""], strict=True):
            if word == option:
                return f"; got {after!r}"
            if word.startswith(f"{option}="):
                return f"; got {word.removeprefix(f'{option}=')!r}"
    return ""


def _fail(message: str, code: int, *, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return code


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
