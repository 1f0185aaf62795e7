"""Differences that the user sets aside: accepted ones, with reasons from a file of TOML, and ignored sites."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from traindiff.core.maps.toml_files import toml_of, unusable
from traindiff.core.site import ROOT, label, printable
from traindiff.errors import ConfigError, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """A difference that is set aside.

    Attributes:
        name: Glob over names of tensors, modules and parameters.
        reason: Why it is intended; empty for an ignored site, which needs no reason.
    """

    name: str
    reason: str

    @property
    def is_ignored(self) -> bool:
        """True for an ignored site."""
        return not self.reason

    def names(self, texts: Iterable[str]) -> bool:
        """True if it names something that has these names, e.g. `h.[0-3].*`, or a slot such as `output[0]`."""
        globs = (self.name, self.name.replace("[", "[[]"))
        return any(fnmatchcase(text, glob) for text in texts for glob in globs)


def names_of(path: str, slot: str) -> tuple[str, str]:
    """The names of a site: its path, and path and slot."""
    return path or ROOT, label(path, slot)


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
            if entry.names(texts):
                self.used.add(number)
                return entry
        return None

    def unused(self) -> list[str]:
        """A warning for each accepted difference that is none."""
        return [
            f'Warning: nothing that differs is named "{entry.name}", as --accept says it may ({entry.reason}).'
            for number, entry in enumerate(self.entries)
            if number not in self.used and not entry.is_ignored
        ]


NONE_ACCEPTED = AcceptedDifferences()
"""No difference is accepted."""


def accepted_of(path: str | os.PathLike[str] | None, ignore: str | Iterable[str] | None = None) -> AcceptedDifferences:
    """The accepted differences of a file, and ignored sites.

    Args:
        path: File of tables `[[accept]]` with `name` and `reason`; None for none.
        ignore: Globs over sites: a path, or a path and a slot.

    Raises:
        ConfigError: The file cannot be used, or a glob is not one.
    """
    ignored = ignored_of(ignore, asked_by="compare(...)", consequence="nothing was compared")
    if path is None:
        return AcceptedDifferences(entries=tuple(ignored))
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
    return AcceptedDifferences(entries=(*ignored, *found))


def ignored_of(ignore: str | Iterable[str] | None, *, asked_by: str, consequence: str) -> list[Accepted]:
    """Ignored sites.

    Args:
        ignore: Globs over sites: a path, or a path and a slot.
        asked_by: The call, as messages name it.
        consequence: What was not done if a glob is wrong.

    Raises:
        ConfigError: A glob is not one.
    """
    globs: list[Any]
    try:
        globs = [ignore] if isinstance(ignore, str) else list(ignore or ())
    except TypeError:
        globs = [ignore]
    for one in globs:
        if not isinstance(one, str) or not one.strip():
            fix = 'Write a path, or a path and a slot, e.g. ignore="transformer.h.3.*".'
            problem = Problem(where=f"ignore={one!r}"[:120], what="is no glob over sites.", fix=fix)
            raise ConfigError(asked_by, [problem], consequence=consequence)
    return [Accepted(name=one, reason="") for one in globs]
