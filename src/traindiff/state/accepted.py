"""Intended differences: names and reasons from a file of TOML. They are listed, not judged."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from traindiff.core.site import printable
from traindiff.core.untrusted.folder import Folder
from traindiff.errors import ConfigError, Problem, TraindiffError
from traindiff.state.comparison import Relation

MOST_TOML_BYTES = 1 << 20
"""Limit for the size of a file of accepted differences, or of a map."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """An intended difference.

    Attributes:
        name: Glob over names of tensors.
        reason: Why it is intended.
    """

    name: str
    reason: str


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
    fix = "Give a file as docs/weights.md describes it."
    return ConfigError("weights", [Problem(where=f"{option} {printable(path)}", what=what, fix=fix)])


def accepted_of(path: str | os.PathLike[str]) -> list[Accepted]:
    """The accepted differences of a file: tables `[[accept]]` with `name` and `reason`.

    Raises:
        ConfigError: The file cannot be used.
    """
    content = toml_of(path, "--accept")
    entries = content.get("accept")
    where = os.fspath(path)
    if not isinstance(entries, list) or not entries:
        raise unusable(where, "--accept", "has no table [[accept]].")
    found = []
    for number, entry in enumerate(entries):
        name, reason = (entry.get(key) if isinstance(entry, dict) else None for key in ("name", "reason"))
        if not (isinstance(name, str) and name and isinstance(reason, str) and reason.strip()):
            raise unusable(where, "--accept", f"has an entry without name or reason: number {number + 1}.")
        if extra := sorted({*entry} - {"name", "reason"}):
            raise unusable(where, "--accept", f'has "{printable(extra[0])}" in entry {number + 1}, which is unknown.')
        found.append(Accepted(name=name, reason=printable(reason.strip())))
    return found


def with_accepted(relations: Sequence[Relation], accepted: Sequence[Accepted]) -> tuple[list[Relation], list[str]]:
    """The relations, of which differences that an entry names are accepted; and a note on each entry without any."""
    used: set[int] = set()
    found = []
    for one in relations:
        match = None
        if one.word in ("differs", "only"):
            names = (*one.candidate, *one.baseline)
            match = next(
                (
                    number
                    for number, entry in enumerate(accepted)
                    if any(fnmatchcase(name, entry.name) for name in names)
                ),
                None,
            )
        if match is None:
            found.append(one)
            continue
        used.add(match)
        found.append(replace(one, word="accepted", message=f"{one.message} (accepted: {accepted[match].reason})"))
    notes = [
        f'Warning: nothing that differs is named "{entry.name}", as --accept says it may ({entry.reason}).'
        for number, entry in enumerate(accepted)
        if number not in used
    ]
    return found, notes
