"""Reads the files of TOML that users give: maps, and accepted differences."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from typing import Any

from traindiff.core.site import printable
from traindiff.core.untrusted.folder import Folder
from traindiff.errors import ConfigError, Problem, TraindiffError

MOST_TOML_BYTES = 1 << 20
"""Limit for the size of a file of accepted differences, or of a map."""


def toml_of(path: str | os.PathLike[str], option: str) -> Mapping[str, Any]:
    """The content of a file of TOML.

    Raises:
        ConfigError: It is missing, too large, or not TOML.
        OSError: It may not be read.
    """
    text = os.fspath(path)
    folder, name = os.path.split(text)

    def refuse(_: str, what: str) -> TraindiffError:
        return unusable(text, option, f"cannot be read: {what}.")

    try:
        data = Folder.of(folder or ".", refuse=refuse).read(name, limit=MOST_TOML_BYTES)
        return tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise unusable(text, option, f"is not TOML: {error}.") from None


def unusable(path: str, option: str, what: str) -> ConfigError:
    """The error for such a file; `what` is a sentence that the file begins."""
    fix = "Give a file as `traindiff explain maps` describes it."
    return ConfigError(option, [Problem(where=f"{option} {printable(path)}", what=what, fix=fix)])
