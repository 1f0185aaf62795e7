"""Results for other programs: JSON, CSV, Markdown, JUnit XML, and the tools that plot scalars."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
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
    """The JSON object of a result that has a schema (traindiff explain json), indented, with a line feed at its end.

    Nothing is written if the result cannot be encoded.
    """
    file.write(json_text(result.to_json(), indent=2) + "\n")


def json_text(content: Any, *, indent: int | None = None) -> str:
    """JSON values as text, in which numbers that are not finite are `null`: JSON has none."""
    return json.dumps(_finite(content), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    """The same value, with None for each number that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(one) for name, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, (list, tuple)) else value
