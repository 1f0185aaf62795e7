"""Results for other programs: JSON, CSV, Markdown, JUnit XML, and the tools that plot scalars."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from typing import IO, Any

FORMATS = ("json", "csv", "markdown", "junit")
"""The names that `--format` takes."""

Writer = Callable[[Any, IO[str]], None]
"""Writes the result of `compare`, `check` or `verify` as text to a file."""


def writer(name: str) -> Writer:
    """The function that writes one of `FORMATS`. Its module is imported when it is asked for."""
    if name == "json":
        return write_json
    write: Writer = import_module(f"traindiff.present.data.as_{name}").write
    return write


def write_json(result: Any, file: IO[str]) -> None:
    """The JSON object of a result that has a schema (traindiff explain json), indented, with a line feed at its end."""
    json.dump(result.to_json(), file, indent=2, allow_nan=False)
    file.write("\n")
