"""`Line`: a line of a table in CSV, whose cells are read as what they must be; `read_lines` gives those of a file."""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from bo_tuner.errors import ConfigError
from bo_tuner.text import count

__all__ = ["CellError", "Line", "Remarks", "read_lines"]

_Value = TypeVar("_Value")
_SEPARATORS = ",;\t|"
_WHOLE = "a whole number of at least 1"
_OFF = ("", "0", "no", "off", "none", "false")
_BLANK = ("", "nan", "na", "n/a", "none", "null", "-")
"""What stands in the place of a number that is not known."""


class CellError(ConfigError):
    """A cell cannot be what its column is for."""

    def __init__(self, message: str, *, line: int, column: str) -> None:
        super().__init__(f"line {line}: {message}")
        self.column = column


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Cells by column."""

    number: int
    """Of the file, where it ends; 1 is the header."""
    cells: Mapping[str, str]
    """By column, in lower case; blanks are single ones."""
    n_cells_too_many: int
    """Beyond the header: a separator within a cell without quotes, so that no cell can be trusted."""

    def text(self, column: str) -> str:
        """Empty where the table has no such column, too."""
        return self.cells.get(column, "")

    def is_set(self, column: str) -> bool:
        """The cell says neither no nor nothing."""
        return self.text(column).lower() not in _OFF

    def positive(self, column: str) -> float | None:
        """A finite number above 0; None where the cell is blank.

        Raises:
            CellError: It is something else.
        """
        return self._number(column, "a number above 0")

    def whole(self, column: str) -> int | None:
        """A whole number of at least 1, also as `2.0`; None where the cell is blank.

        Raises:
            CellError: It is something else.
        """
        value = self._number(column, _WHOLE)
        if value is not None and not value.is_integer():
            raise self.wrong(column, _WHOLE)
        return None if value is None else int(value)

    def needed(self, column: str) -> int:
        """As `whole`, of a cell that must not be blank.

        Raises:
            CellError: It is, or is no such number.
        """
        value = self.whole(column)
        if value is None:
            raise self.wrong(column, _WHOLE)
        return value

    def wrong(self, column: str, must_be: str) -> CellError:
        """What to raise of a cell."""
        return CellError(
            f"{column} must be {must_be}; got {self.text(column) or 'nothing'}", line=self.number, column=column
        )

    def _number(self, column: str, must_be: str) -> float | None:
        text = self.text(column)
        if text.lower() in _BLANK:
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise self.wrong(column, must_be)
        return value


class Remarks:
    """What was left out or supposed: of each kind how many lines, and the first of them in full."""

    def __init__(self) -> None:
        """Nothing yet."""
        self._first: dict[tuple[str, str], CellError] = {}
        self._n: Counter[tuple[str, str]] = Counter()

    def add(self, kind: str, error: CellError) -> None:
        """Take note.

        Args:
            kind: What became of the line, as in "left out".
            error: Why.
        """
        key = kind, error.column
        self._first.setdefault(key, error)
        self._n[key] += 1

    def known(self, line: Line, column: str, of: Callable[[Line, str], _Value | None]) -> _Value | None:
        """What a line does without: None also where the cell cannot be read, which is noted.

        Args:
            line: That may have it.
            column: Where.
            of: `Line.positive` or `Line.whole`.
        """
        try:
            return of(line, column)
        except CellError as error:
            self.add(f"whose {column} does not count", error)
            return None

    @property
    def texts(self) -> tuple[str, ...]:
        """A sentence for each kind and column."""
        return tuple(
            f"{count(self._n[kind, column], 'line')} {kind}: {'' if self._n[kind, column] == 1 else 'first '}{error}"
            for (kind, column), error in self._first.items()
        )


def read_lines(path: Path) -> list[Line]:
    """All lines below the header that hold anything. The separator is what the header has most of: comma, semicolon, tab or bar.

    Raises:
        ConfigError: The file cannot be read, is not in UTF-8 or no CSV, or names a column twice.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except UnicodeDecodeError as error:
        n_before = error.object.count(b"\n", 0, error.start)
        raise ConfigError(f"{path} cannot be read: line {n_before + 1} is not in UTF-8") from error
    header = text.partition("\n")[0]
    reader = csv.reader(
        io.StringIO(text, newline=""), delimiter=max(_SEPARATORS, key=header.count), skipinitialspace=True, strict=True
    )
    return list(_below_header(reader, path))


def _below_header(reader: Iterator[list[str]], path: Path) -> Iterator[Line]:
    columns: list[str] = []
    number = 0
    try:
        for cells in reader:
            number = reader.line_num  # type: ignore[attr-defined]  # of a reader of csv
            stripped = [" ".join(cell.split()) for cell in cells]
            if not columns:
                columns = [cell.lower() for cell in stripped]
                twice = [name for name, n in Counter(filter(None, columns)).items() if n > 1]
                if twice:
                    raise ConfigError(f"{path} must name each column once; line {number} has {twice[0]} twice")
            elif any(stripped):
                yield Line(
                    number=number,
                    cells=dict(itertools.zip_longest(columns, stripped[: len(columns)], fillvalue="")),
                    n_cells_too_many=sum(map(bool, stripped[len(columns) :])),
                )
    except csv.Error as error:
        raise ConfigError(f"{path} cannot be read: after line {number}: {error}") from error
