"""Results for other programs: JSON, CSV, Markdown, JUnit XML, and the tools that plot scalars."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from typing import IO, Any, Protocol

FORMATS = ("json", "csv", "markdown", "junit")
"""The names that `--format` takes."""

Writer = Callable[[Any, IO[str]], None]
"""Writes the result of `compare`, `check` or `verify` as text to a file."""


class HasJson(Protocol):
    """A result that has a schema of its own (docs/json.md)."""

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values."""


def writer(name: str) -> Writer:
    """The function that writes one of `FORMATS`. Its module is imported when it is asked for."""
    if name == "json":
        return write_json
    write: Writer = import_module(f"traindiff.present.data.as_{name}").write
    return write


def write_json(result: HasJson, file: IO[str]) -> None:
    """One JSON object, indented, with a line feed at its end."""
    json.dump(result.to_json(), file, indent=2, allow_nan=False)
    file.write("\n")
