"""Maps: which tensors of the baseline are which of the candidate, and in which layout. Read, applied and proposed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from traindiff.core.site import printable
from traindiff.core.untrusted.demands import FLAG, TEXT, Unmet, listed, one_of, shaped, whole
from traindiff.errors import ConfigError
from traindiff.state.accepted import toml_of, unusable
from traindiff.state.arrangements import Layout, matrix_shape, pairs_order
from traindiff.state.comparison import Relation, WeightsComparison, numbers, skeleton
from traindiff.state.dtypes import Bits, bits_type
from traindiff.state.stored import StoredTensor

PLACE = "{n}"
"""Stands for the number of a layer in the names of an entry: the same number in all of them."""

_ENTRY = shaped(
    {"baseline": listed(TEXT, least=1), "candidate": listed(TEXT, least=1)},
    {
        "join": one_of(("concat", "interleave")),
        "groups": whole(1, 1 << 20),
        "transpose": FLAG,
        "heads": listed(whole(-(1 << 20), 1 << 20)),
    },
)
_KEYS = frozenset({"baseline", "candidate", "join", "groups", "transpose", "heads"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An entry of a map: tensors of one side that make up one of the other.

    Attributes:
        baseline: Names in the baseline, with `{n}` for the number of a layer.
        candidate: Names in the candidate, likewise. One of the two lists has one name.
        layout: How the several make up the one.
    """

    baseline: tuple[str, ...]
    candidate: tuple[str, ...]
    layout: Layout


def map_of(path: str | os.PathLike[str]) -> list[Entry]:
    """The entries of a file: tables `[[tensor]]`.

    Raises:
        ConfigError: The file cannot be used; the message names the entry.
    """
    where = os.fspath(path)
    content = toml_of(path, "--map")
    entries = content.get("tensor")
    if not isinstance(entries, list) or not entries:
        raise unusable(where, "--map", "has no table [[tensor]].")
    return [_entry(entry, number + 1, where) for number, entry in enumerate(entries)]


def _entry(content: Any, number: int, where: str) -> Entry:
    def refused(what: str) -> ConfigError:
        return unusable(where, "--map", f"cannot be used in entry {number}: {what}.")

    try:
        _ENTRY(content, "")
    except Unmet as unmet:
        raise refused(str(unmet)) from None
    if extra := sorted({*content} - _KEYS):
        raise refused(f'"{printable(extra[0])}" is not known')
    baseline, candidate = tuple(content["baseline"]), tuple(content["candidate"])
    parts = max(len(baseline), len(candidate))
    if min(len(baseline), len(candidate)) != 1:
        raise refused("either the baseline or the candidate must be a single tensor")
    heads = tuple(content.get("heads", (0,) * parts))
    if len(heads) != parts:
        raise refused(f"heads has {len(heads)} numbers, and there are {parts} tensors")
    if len({PLACE in name for name in (*baseline, *candidate)}) > 1:
        raise refused(f"{PLACE} is in some of its names only")
    join, groups = content.get("join", "concat"), content.get("groups", 1)
    if (join == "interleave") != (groups > 1):
        raise refused('groups belongs to join = "interleave", and is more than 1 there')
    layout = Layout(
        join=join, groups=groups, transpose=content.get("transpose", False), heads=heads, order=tuple(range(parts))
    )
    return Entry(baseline=baseline, candidate=candidate, layout=layout)


def mapped(
    entries: Sequence[Entry], baseline: Mapping[str, StoredTensor], candidate: Mapping[str, StoredTensor]
) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor], list[str]]:
    """Both sides, after putting tensors together as a map says, under the other side's names; notes on unused entries.

    Raises:
        ConfigError: Tensors that an entry names do not fit together.
    """
    first, second = dict(baseline), dict(candidate)
    notes = []
    for number, entry in enumerate(entries):
        used = False
        for here, there in _expanded(entry, first, second):
            used = True
            if len(there) == 1:  # the baseline's make up the candidate's
                made = _joined([first.pop(name) for name in here], second[there[0]], entry.layout, number + 1)
                first[there[0]] = made
            else:
                made = _joined([second.pop(name) for name in there], first[here[0]], entry.layout, number + 1)
                second[here[0]] = made
        if not used:
            shown = printable(entry.baseline[0])
            notes.append(f"Warning: entry {number + 1} of the map ({shown}) names tensors that are not there.")
    return first, second, notes


def _expanded(
    entry: Entry, baseline: Mapping[str, StoredTensor], candidate: Mapping[str, StoredTensor]
) -> Iterator[tuple[list[str], list[str]]]:
    """Names of an entry for each layer that has all of them."""
    if PLACE not in entry.baseline[0]:
        layers: list[str] = [""]
    else:
        pattern = re.compile(re.escape(entry.baseline[0]).replace(re.escape(PLACE), r"(\d{1,18})"))
        layers = [match[1] for name in baseline if (match := pattern.fullmatch(name))]
    for layer in layers:
        here = [name.replace(PLACE, layer) for name in entry.baseline]
        there = [name.replace(PLACE, layer) for name in entry.candidate]
        if all(name in baseline for name in here) and all(name in candidate for name in there):
            yield here, there


def _joined(parts: Sequence[StoredTensor], whole_one: StoredTensor, layout: Layout, number: int) -> StoredTensor:
    """The tensor that parts make up, in the shape of the whole. Its elements are read when asked for.

    Raises:
        ConfigError: The parts do not fit together, or only their summaries are known.
    """
    rows, columns = matrix_shape(whole_one.shape)
    length, width = (columns, rows) if layout.transpose else (rows, columns)
    shapes = [matrix_shape(part.shape) for part in parts]
    plain = layout.is_plain
    fits = plain or (
        sum(shape[0] for shape in shapes) == length
        and all(shape[1] == width and shape[0] % layout.groups == 0 for shape in shapes)
        and all(
            not heads or shape[0] % (2 * abs(heads)) == 0 for heads, shape in zip(layout.heads, shapes, strict=True)
        )
    )
    one_dtype = len({part.dtype for part in parts}) == 1 and all(part.is_readable for part in parts)
    if not fits or not (one_dtype or plain):
        told = ", ".join(f"{part.name} {list(part.shape)} ({part.dtype})" for part in parts)
        raise unusable(
            f"entry {number}", "--map", f"does not fit: {told} do not make up {whole_one.name} {list(whole_one.shape)}."
        )
    part = parts[0]
    if plain:
        return StoredTensor(
            name=part.name, dtype=part.dtype, shape=part.shape, parts=part.parts, role=part.role, memory=part.memory,
            summary=part.summary,
        )  # fmt: skip

    def memory(first: int, end: int) -> Bits:
        made = _made(parts, layout).reshape(whole_one.rows, -1)
        return np.ascontiguousarray(made[first:end])

    name = " + ".join(one.name for one in parts)
    return StoredTensor(
        name=name, dtype=part.dtype, shape=whole_one.shape, role=whole_one.role, memory=memory, in_one=True
    )


def _made(parts: Sequence[StoredTensor], layout: Layout) -> Bits:
    """The elements of a whole, all of them in memory."""
    groups = []
    for part, heads in zip(parts, layout.heads, strict=True):
        rows, columns = matrix_shape(part.shape)
        words = prod(part.shape) and part.num_bytes // bits_type(part.dtype).itemsize // part.size
        matrix = part.slab(0, part.rows).reshape(rows, columns * max(1, words))
        if heads > 0:
            matrix = matrix[pairs_order(rows, heads)]
        elif heads < 0:
            matrix = matrix[np.argsort(pairs_order(rows, -heads))]
        groups.append(matrix.reshape(layout.groups, rows // layout.groups, -1))
    made = np.concatenate(groups, axis=1).reshape(-1, groups[0].shape[-1])
    return made.T if layout.transpose else made


def write_map(result: WeightsComparison, path: Path) -> int:
    """Write the map that the relations of a comparison suggest; returns the number of its entries.

    Raises:
        ConfigError: The file cannot be written.
    """
    entries = list(dict.fromkeys(map(_as_toml, _proposed(result.relations))))
    head = "# Which tensors of the baseline are which of the candidate, as their contents suggest (docs/weights.md).\n"
    try:
        path.write_text("\n".join([head, *entries]), encoding="utf-8")
    except OSError as error:
        raise unusable(str(path), "--propose", f"cannot be written: {error.strerror}.") from None
    return len(entries)


def _proposed(relations: Sequence[Relation]) -> Iterator[Entry]:
    for one in relations:
        layout = one.layout
        if not one.baseline or not one.candidate or one.kind == "moved":
            continue
        if layout is None and one.baseline == one.candidate:
            continue
        if layout is None and not (one.kind in ("renamed", "cast") and len(one.baseline) == len(one.candidate) == 1):
            continue
        layout = layout or Layout()
        parts = one.baseline if len(one.candidate) == 1 else one.candidate
        if len(parts) == len(layout.order):
            parts = tuple(parts[number] for number in layout.order)
        elif layout.order != tuple(range(len(layout.order))) or any(layout.heads) or layout.groups > 1:
            continue  # stacks of experts in an order of their own
        else:
            layout = Layout(transpose=layout.transpose, heads=(0,) * len(parts), order=tuple(range(len(parts))))
        sides = (parts, one.candidate) if len(one.candidate) == 1 else (one.baseline, parts)
        names = [*sides[0], *sides[1]]
        layers = {numbers(name) for name in names}
        if len(layers) == 1 and len(next(iter(layers))) == 1:
            sides = tuple(tuple(skeleton(name).replace("*", PLACE) for name in side) for side in sides)  # type: ignore[assignment]
        yield Entry(baseline=sides[0], candidate=sides[1], layout=layout)


def _as_toml(entry: Entry) -> str:
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
