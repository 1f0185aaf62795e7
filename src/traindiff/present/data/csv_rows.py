"""Comma-separated values that every reader divides into the same rows, and in which no spreadsheet finds a formula.

A spreadsheet computes a cell that begins with one of a few characters, e.g. `=HYPERLINK(...)` as the name of a module.
So such a text gets a single quote in front, as OWASP's page on CSV injection says
(https://owasp.org/www-community/attacks/CSV_Injection). A semicolon or a tab inside a text begins a cell where a
spreadsheet divides rows there. Numbers are left as they are: they are no formulas.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from typing import IO, Any

_BEGINS = "[=+\\-@\uff1d\uff0b\uff0d\uff20]"
_PLACE = re.compile(f"^(?='*(?:[\t\r\n]|\\s*{_BEGINS}))|(?<=[;\t])(?='*{_BEGINS})")
_QUOTED_PLACE = re.compile(f"^'(?='*(?:[\t\r\n]|\\s*{_BEGINS}))|(?<=[;\t])'(?='*{_BEGINS})")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)


def defused(text: str) -> str:
    """A text as it is written into a cell: with a single quote wherever a formula would begin.

    Args:
        text: Any text; one of a number stays as it is.
    """
    return text if _NUMBER.fullmatch(text) else _PLACE.sub("'", text)


def restored(text: str) -> str:
    """The text that `defused` was given, from what it gave back."""
    return _QUOTED_PLACE.sub("", text)


class CsvRows:
    """A header, and then rows; each ends in a line feed.

    Args:
        file: Where they go.
        columns: Names of the columns, in order.
    """

    def __init__(self, file: IO[str], columns: Sequence[str]) -> None:
        self._writer = csv.writer(_Lines(file))
        self._columns = columns
        self._writer.writerow(columns)

    def write(self, row: Mapping[str, Any]) -> None:
        """Write a row; a column that it lacks is empty, and so is a cell that is None.

        Args:
            row: Cells by column; others are left out.
        """
        cells = (row.get(name) for name in self._columns)
        self._writer.writerow([defused(cell) if isinstance(cell, str) else cell for cell in cells])


class _Lines:
    """A file for `csv.writer`, in which each row ends in a line feed.

    `csv` quotes the carriage return in a cell only where rows end in one, and readers take it for the end of a row.

    Args:
        file: Where the rows go.
    """

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, row: str) -> int:
        """Write a row, which `csv` ends in a carriage return and a line feed."""
        return self._file.write(row.removesuffix("\r\n") + "\n")
