"""A verdict as JSON (docs/json.md)."""

from __future__ import annotations

import json
from typing import IO, Any, Protocol


class HasJson(Protocol):
    """A result that has a schema of its own."""

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values."""


def write(result: HasJson, file: IO[str]) -> None:
    """One object, indented, with a line feed at its end."""
    json.dump(result.to_json(), file, indent=2, allow_nan=False)
    file.write("\n")
