"""Intended differences: names and reasons from a file of TOML. They are listed, not judged."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from traindiff.core.maps.toml_files import toml_of, unusable
from traindiff.core.site import printable


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """An intended difference.

    Attributes:
        name: Glob over names of tensors, modules and parameters.
        reason: Why it is intended.
    """

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedDifferences:
    """The accepted differences of a file, and which of them something had.

    Attributes:
        entries: In the order of the file.
        used: Numbers of the entries that named a difference so far.
    """

    entries: Sequence[Accepted] = ()
    used: set[int] = field(default_factory=set)

    def of(self, names: Iterable[str]) -> Accepted | None:
        """The first entry that matches one of the names of a difference; None if there is none."""
        texts = tuple(names)
        for number, entry in enumerate(self.entries):
            if any(fnmatchcase(text, entry.name) for text in texts):
                self.used.add(number)
                return entry
        return None

    def unused(self) -> list[str]:
        """A warning for each entry that named no difference."""
        return [
            f'Warning: nothing that differs is named "{entry.name}", as --accept says it may ({entry.reason}).'
            for number, entry in enumerate(self.entries)
            if number not in self.used
        ]


NONE_ACCEPTED = AcceptedDifferences()
"""No difference is accepted."""


def accepted_of(path: str | os.PathLike[str] | None) -> AcceptedDifferences:
    """The accepted differences of a file: tables `[[accept]]` with `name` and `reason`; none without a file.

    Raises:
        ConfigError: The file cannot be used.
    """
    if path is None:
        return NONE_ACCEPTED
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
    return AcceptedDifferences(entries=tuple(found))
