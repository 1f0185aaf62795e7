"""Maps: which tensors and modules of the baseline are which of the candidate, and in which layout."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from traindiff.core.maps.toml_files import toml_of, unusable
from traindiff.core.site import printable
from traindiff.core.untrusted.demands import FLAG, TEXT, Unmet, listed, one_of, shaped, whole
from traindiff.errors import ConfigError

PLACE = "{n}"
"""Stands for the number of a layer in the names of an entry: the same number in all of them."""

PLACES = (PLACE, "{m}")
"""The second one is for the number of an expert."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the tensors of one side become one tensor of the other side.

    Attributes:
        join: `concat` or `interleave` (of the groups of all parts: the first of each, the second of each, ...).
        groups: Number of groups for `interleave`.
        transpose: Whether the joined rows are the columns of the whole.
        heads: By part: number of heads whose rows go from rotary halves to interleaved pairs; negative for the other
            way; 0 for rows that stay.
        order: By part: its place among the names that were given.
    """

    join: str = "concat"
    groups: int = 1
    transpose: bool = False
    heads: tuple[int, ...] = (0,)
    order: tuple[int, ...] = (0,)

    @property
    def is_plain(self) -> bool:
        """True if one tensor is the other, unchanged."""
        return len(self.order) == 1 and not self.transpose and not any(self.heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An entry of a map: tensors of one side that make up one of the other.

    Attributes:
        baseline: Names in the baseline, with `{n}` for the number of a layer.
        candidate: Names in the candidate, likewise. One of the two lists has one name.
        layout: How the several make up the one.
        is_module: Whether the names are of modules that return the same, not of tensors.
        is_optional: Whether its tensors may be missing: a map that traindiff has knows several variants of a layout.
    """

    baseline: tuple[str, ...]
    candidate: tuple[str, ...]
    layout: Layout
    is_module: bool = False
    is_optional: bool = False

    def expanded(self, baseline: Collection[str], candidate: Collection[str]) -> Iterator[tuple[list[str], list[str]]]:
        """The names of the entry for each layer that has all of them on both sides."""
        for numbers in self._numbers(baseline):
            here, there = ([_at(name, numbers) for name in side] for side in (self.baseline, self.candidate))
            if all(name in baseline for name in here) and all(name in candidate for name in there):
                yield here, there

    def _numbers(self, names: Collection[str]) -> list[dict[str, str]]:
        """The numbers for which the first name of the baseline is there, by place."""
        first = self.baseline[0]
        places = [place for place in PLACES if place in first]
        if not places:
            return [{}]
        expression = re.escape(first)
        for number, place in enumerate(places):
            once, again = rf"(?P<p{number}>\d{{1,18}})", rf"(?P=p{number})"
            expression = expression.replace(re.escape(place), once, 1).replace(re.escape(place), again)
        pattern = re.compile(expression)
        found = (pattern.fullmatch(name) for name in names)
        return [dict(zip(places, match.groups(), strict=True)) for match in found if match]


def _at(name: str, numbers: Mapping[str, str]) -> str:
    for place, number in numbers.items():
        name = name.replace(place, number)
    return name


_NAMES = {"baseline": listed(TEXT, least=1), "candidate": listed(TEXT, least=1)}

_TENSOR = shaped(
    _NAMES,
    {
        "join": one_of(("concat", "interleave")),
        "groups": whole(1, 1 << 20),
        "transpose": FLAG,
        "heads": listed(whole(-(1 << 20), 1 << 20)),
    },
)
_MODULE = shaped({"baseline": TEXT, "candidate": TEXT}, {})

_KEYS = frozenset({"baseline", "candidate", "join", "groups", "transpose", "heads"})


def entries_of(path: str | os.PathLike[str]) -> list[Entry]:
    """The entries of a file: tables `[[tensor]]` and `[[module]]`.

    Raises:
        ConfigError: The file cannot be used; the message names the entry.
    """
    where = os.fspath(path)
    content = toml_of(path, "--map")
    tensors, modules = content.get("tensor", []), content.get("module", [])
    if not (isinstance(tensors, list) and isinstance(modules, list)) or not (tensors or modules):
        raise unusable(where, "--map", "has no table [[tensor]].")
    if extra := sorted({*content} - {"tensor", "module"}):
        raise unusable(where, "--map", f'has "{printable(extra[0])}", which is not known.')
    found = [_entry(entry, f"entry {number + 1}", where) for number, entry in enumerate(tensors)]
    return found + [_module(entry, f"module {number + 1}", where) for number, entry in enumerate(modules)]


def _refused(where: str, place: str, what: str) -> ConfigError:
    return unusable(where, "--map", f"cannot be used in {place}: {what}.")


def _entry(content: Any, place: str, where: str) -> Entry:
    try:
        _TENSOR(content, "")
    except Unmet as unmet:
        raise _refused(where, place, str(unmet)) from None
    if extra := sorted({*content} - _KEYS):
        raise _refused(where, place, f'"{printable(extra[0])}" is not known')
    baseline, candidate = tuple(content["baseline"]), tuple(content["candidate"])
    parts = max(len(baseline), len(candidate))
    if min(len(baseline), len(candidate)) != 1:
        raise _refused(where, place, "either the baseline or the candidate must be a single tensor")
    if len({*baseline}) + len({*candidate}) != len(baseline) + len(candidate):
        raise _refused(where, place, "a name is there twice")
    heads = tuple(content.get("heads", (0,) * parts))
    if len(heads) != parts:
        raise _refused(where, place, f"heads has {len(heads)} numbers, and there are {parts} tensors")
    for number in PLACES:
        if len({number in name for name in (*baseline, *candidate)}) > 1:
            raise _refused(where, place, f"{number} is in some of its names only")
    join, groups = content.get("join", "concat"), content.get("groups", 1)
    if (join == "interleave") != (groups > 1):
        raise _refused(where, place, 'groups belongs to join = "interleave", and is more than 1 there')
    layout = Layout(
        join=join, groups=groups, transpose=content.get("transpose", False), heads=heads, order=tuple(range(parts))
    )
    return Entry(baseline=baseline, candidate=candidate, layout=layout)


def _module(content: Any, place: str, where: str) -> Entry:
    try:
        _MODULE(content, "")
    except Unmet as unmet:
        raise _refused(where, place, str(unmet)) from None
    if extra := sorted({*content} - {"baseline", "candidate"}):
        raise _refused(where, place, f'"{printable(extra[0])}" is not known')
    names = content["baseline"], content["candidate"]
    for number in PLACES:
        if len({number in name for name in names}) > 1:
            raise _refused(where, place, f"{number} is in one of its names only")
    return Entry(baseline=names[:1], candidate=names[1:], layout=Layout(), is_module=True)


def as_toml(entry: Entry) -> str:
    """An entry as a file has it."""
    if entry.is_module:
        return f"[[module]]\nbaseline = {_text(entry.baseline[0])}\ncandidate = {_text(entry.candidate[0])}\n"
    lines = ["[[tensor]]"]
    for key, names in (("baseline", entry.baseline), ("candidate", entry.candidate)):
        lines.append(f"{key} = [{', '.join(_text(name) for name in names)}]")
    layout = entry.layout
    if layout.join == "interleave":
        lines += ['join = "interleave"', f"groups = {layout.groups}"]
    if layout.transpose:
        lines.append("transpose = true")
    if any(layout.heads):
        lines.append(f"heads = [{', '.join(map(str, layout.heads))}]")
    return "\n".join(lines) + "\n"


def _text(name: str) -> str:
    escaped = name.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
