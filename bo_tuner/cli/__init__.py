"""The command line."""

from bo_tuner.cli.main import main

__all__ = ["main"]
