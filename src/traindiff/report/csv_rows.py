"""Comma-separated values that every reader divides into the same rows."""

from __future__ import annotations

from typing import IO


class Lines:
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
