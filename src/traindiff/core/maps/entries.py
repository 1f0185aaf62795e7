"""Maps: which tensors and modules of the baseline are which of the candidate, and in which layout."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from traindiff.core.maps.toml_files import toml_of, unusable
from traindiff.core.site import printable
from traindiff.core.untrusted.demands import FLAG, TEXT, Unmet, listed, one_of, shaped, whole
from traindiff.errors import ConfigError

PLACE = "{n}"
"""Stands for the number of a layer in the names of an entry: the same number in all of them."""

STACKED = "{m}"
"""Stands for the number of an expert. In the names of one side only, all experts make up one tensor."""

PLACES = (PLACE, STACKED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the tensors of one side become one tensor of the other side.

    Attributes:
        join: `concat` or `interleave` (of the groups of all parts: the first of each, the second of each, ...).
        groups: Number of groups for `interleave`.
        transpose: Whether the joined rows are the columns of the whole: of each matrix, if it is a stack of matrices
            (three dims). Of joined columns, whether they are its rows.
        columns: Whether the columns of the parts are joined, side by side, and not their rows. Parts are matrices then.
        heads: By part: number of heads whose rows (columns, if these are joined) go from rotary halves to interleaved
            pairs; negative for the other way; 0 for rows that stay.
        order: By part: its place among the names that were given.
        blocks: Of one part, blocks one after the other that become groups of all of them, e.g. 3 for queries, keys and
            values that become heads; the part is transposed before. Negative for the other way, from groups to blocks;
            the result is transposed then.
    """

    join: str = "concat"
    groups: int = 1
    transpose: bool = False
    columns: bool = False
    heads: tuple[int, ...] = (0,)
    order: tuple[int, ...] = (0,)
    blocks: int = 1

    @property
    def is_plain(self) -> bool:
        """True if one tensor is the other, unchanged."""
        return len(self.order) == 1 and not self.transpose and not self.moves_rows

    @property
    def turns(self) -> bool:
        """True if what is joined are the columns of the whole."""
        return self.transpose != self.columns

    @property
    def moves_rows(self) -> bool:
        """True if rows of a part, or columns, change places."""
        return any(self.heads) or self.blocks != 1


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

    @property
    def is_stack(self) -> bool:
        """True if the tensors of all experts of one side are one tensor of the other side."""
        return (STACKED in self.baseline[0]) != (STACKED in self.candidate[0])

    def layout_of(self, count: int) -> Layout:
        """The layout of so many tensors that make up one: of a stack, there are as many as there are experts."""
        return replace(self.layout, heads=(0,) * count, order=tuple(range(count))) if self.is_stack else self.layout

    def expanded(self, baseline: Collection[str], candidate: Collection[str]) -> Iterator[tuple[list[str], list[str]]]:
        """The names of the entry for each layer that has all of them on both sides."""
        if self.is_stack:
            yield from self._stacked(baseline, candidate)
            return
        for numbers in _numbers(self.baseline[0], baseline):
            here, there = ([_at(name, numbers) for name in side] for side in (self.baseline, self.candidate))
            if all(name in baseline for name in here) and all(name in candidate for name in there):
                yield here, there

    def _stacked(self, baseline: Collection[str], candidate: Collection[str]) -> Iterator[tuple[list[str], list[str]]]:
        """The names of all experts of each layer, in the order of their numbers, which have no gaps."""
        turned = STACKED not in self.baseline[0]
        (one,), (whole,) = (self.candidate, self.baseline) if turned else (self.baseline, self.candidate)
        parts, wholes = (candidate, baseline) if turned else (baseline, candidate)
        layers: dict[str, dict[int, str]] = {}
        for numbers in _numbers(one, parts):
            layers.setdefault(_at(whole, numbers), {})[int(numbers[STACKED])] = _at(one, numbers)
        for name, experts in layers.items():
            if name in wholes and experts.keys() == {*range(len(experts))}:
                names = [experts[number] for number in range(len(experts))]
                yield ([name], names) if turned else (names, [name])


def _numbers(first: str, names: Collection[str]) -> list[dict[str, str]]:
    """The numbers for which a name of an entry is there, by place."""
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
        "columns": FLAG,
        "heads": listed(whole(-(1 << 20), 1 << 20)),
        "blocks": whole(-(1 << 10), 1 << 10),
    },
)
_MODULE = shaped({"baseline": TEXT, "candidate": TEXT}, {})

_KEYS = frozenset({"baseline", "candidate", "join", "groups", "transpose", "columns", "heads", "blocks"})


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
        stacks = number == STACKED and parts == 1
        if not stacks and len({number in name for name in (*baseline, *candidate)}) > 1:
            raise _refused(where, place, f"{number} is in some of its names only")
    blocks, columns = content.get("blocks", 1), content.get("columns", False)
    alone = parts == 1 and content.get("join") == "interleave" and not (any(heads) or columns)
    if blocks != 1 and (blocks in (-1, 0) or not alone):
        raise _refused(
            where, place, 'blocks belongs to join = "interleave" of a single tensor without heads or columns'
        )
    join, groups = content.get("join", "concat"), content.get("groups", 1)
    if (join == "interleave") != (groups > 1):
        raise _refused(where, place, 'groups belongs to join = "interleave", and is more than 1 there')
    layout = Layout(
        join=join, groups=groups, transpose=content.get("transpose", False), columns=columns, heads=heads,
        order=tuple(range(parts)), blocks=blocks,
    )  # fmt: skip
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
    if layout.columns:
        lines.append("columns = true")
    if layout.blocks != 1:
        lines.append(f"blocks = {layout.blocks}")
    if any(layout.heads):
        lines.append(f"heads = [{', '.join(map(str, layout.heads))}]")
    return "\n".join(lines) + "\n"


def _text(name: str) -> str:
    escaped = name.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
