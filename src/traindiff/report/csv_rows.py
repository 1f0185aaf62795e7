"""Comma-separated values that every reader divides into the same rows, and in which no spreadsheet finds a formula."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from typing import IO, Any

from traindiff.csv_cells import defused


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
