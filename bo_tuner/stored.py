"""Reading back what a study keeps, though another version of bo_tuner wrote it."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from dataclasses import fields
from typing import Any

from bo_tuner.errors import UnreadableStudyError

__all__ = ["known_fields", "must_be_readable"]


def known_fields(cls: type, data: Mapping[str, Any]) -> dict[str, Any]:
    """What of stored data a dataclass has a field for; a newer version's fields are left out."""
    return {field.name: data[field.name] for field in fields(cls) if field.name in data}


@contextlib.contextmanager
def must_be_readable(what: str) -> Generator[None]:
    """Turn what goes wrong with stored data into an error that names it.

    Args:
        what: As in `trial 3`.

    Raises:
        UnreadableStudyError: It is damaged, or says what this version does not know.
    """
    try:
        yield
    except UnreadableStudyError as error:
        raise UnreadableStudyError(f"{what}: {error}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        told = f"{error} is missing" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise UnreadableStudyError(
            f"{what} cannot be read ({told}), being damaged or written by a newer bo_tuner: upgrade, or start another study with --study"
        ) from error
