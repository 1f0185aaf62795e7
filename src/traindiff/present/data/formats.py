"""The formats in which verdicts are written for other programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import IO, Any

Writer = Callable[[Any, IO[str]], None]
"""Writes the result of `compare`, `check` or `verify` as text to a file."""

FORMATS: Mapping[str, str] = {
    "json": "traindiff.present.data.as_json",
    "csv": "traindiff.present.data.as_csv",
    "markdown": "traindiff.present.data.as_markdown",
    "junit": "traindiff.present.data.as_junit",
}
"""By the name that `--format` takes: the module whose `write` writes it, imported when it is asked for."""


def writer(name: str) -> Writer:
    """What writes a format of `FORMATS`."""
    write: Writer = import_module(FORMATS[name]).write
    return write
