"""Maps of checkpoints: tensors are put together as a map says; and a map is proposed from what a comparison found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from traindiff.core.maps.entries import PLACE, Entry, Layout, as_toml
from traindiff.core.maps.toml_files import unusable
from traindiff.core.site import printable
from traindiff.state.arrangements import are_rows, matrix_shape, num_matrices, pairs_order
from traindiff.state.comparison import Relation, WeightsComparison, numbers, skeleton
from traindiff.state.dtypes import ITEM_BYTES, Bits, bits_type
from traindiff.state.stored import StoredTensor


def mapped(
    entries: Sequence[Entry], baseline: Mapping[str, StoredTensor], candidate: Mapping[str, StoredTensor]
) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor], list[str]]:
    """Both sides, after putting tensors together as a map says, under the other side's names; notes on unused entries.

    Raises:
        ConfigError: Tensors that an entry names do not fit together, or two get one name.
    """
    sides = dict(baseline), dict(candidate)
    made: tuple[dict[str, StoredTensor], dict[str, StoredTensor]] = {}, {}
    notes = []
    for number, entry in enumerate(entries):
        if entry.is_module:
            continue
        used = False
        for names in entry.expanded(*sides):
            used = True
            side = 0 if len(names[1]) == 1 else 1  # the side whose tensors make up the other's
            (name,) = names[1 - side]
            parts = [sides[side].pop(part) for part in names[side]]
            made[side][name] = _joined(
                parts, (baseline, candidate)[1 - side][name], entry.layout_of(len(parts)), number + 1
            )
            made[1 - side][name] = sides[1 - side].pop(name)
        if not used and not entry.is_optional:
            shown = printable(entry.baseline[0])
            notes.append(f"Warning: entry {number + 1} of the map ({shown}) names tensors that are not there.")
    for own, new in zip(sides, made, strict=True):
        if twice := sorted(own.keys() & new.keys()):
            what = f"does not say which tensor {twice[0]} is, and gives its name to another one."
            raise unusable("", "--map", what)
        own.update(new)
    return sides[0], sides[1], notes


def _joined(parts: Sequence[StoredTensor], whole: StoredTensor, layout: Layout, number: int) -> StoredTensor:
    """The tensor that parts make up by an entry.

    Raises:
        ConfigError: The parts do not fit together, or only their summaries are known.
    """
    made = joined(parts, whole, layout)
    if made is None:
        if unread := [part.name for part in parts if not part.is_readable]:
            what = f"puts {unread[0]} together with others, or moves its rows: a recording has only summaries of it."
            raise unusable(f"entry {number}", "--map", f"{what} Compare saved weights, or leave this entry out.")
        told = ", ".join(f"{part.name} {list(part.shape)} ({part.dtype})" for part in parts)
        why = ""
        if len({part.dtype for part in parts}) > 1:
            why = " Parts must have one dtype."
        elif layout.columns and any(len(part.shape) not in (2, 3) for part in parts):
            why = " Only matrices, and stacks of matrices, have columns: leave columns out for biases."
        what = f"does not fit: {told} do not make up {whole.name} {list(whole.shape)}.{why}"
        raise unusable(f"entry {number}", "--map", what)
    return made


def joined(parts: Sequence[StoredTensor], whole: StoredTensor, layout: Layout) -> StoredTensor | None:
    """The tensor that parts make up, in the shape of the whole. Its elements are read when asked for.

    None if the parts do not fit together, or only their summaries are known.
    """
    if layout.is_plain:
        return parts[0]
    rows, columns = matrix_shape(whole.shape)
    matrices = num_matrices(whole.shape)
    length, width = (matrices * columns, rows // max(1, matrices)) if layout.turns else (rows, columns)
    shapes = _shapes(parts, whole)
    if layout.columns:
        shapes = [_turned_shape(part.shape) for part in parts]
    fits = (
        (not layout.columns or all(len(part.shape) in (2, 3) for part in parts))
        and sum(shape[0] for shape in shapes) == length
        and all(shape[1] == width for shape in shapes)
        and all(_moved_rows(shape, layout) % (layout.groups * abs(layout.blocks)) == 0 for shape in shapes)
        and all(
            not heads or shape[0] % (2 * abs(heads)) == 0 for heads, shape in zip(layout.heads, shapes, strict=True)
        )
    )
    if not fits or len({part.dtype for part in parts}) > 1 or not all(part.is_readable for part in parts):
        return None

    def memory(first: int, end: int) -> Bits:
        made = _made(parts, layout, whole).reshape(whole.rows, -1)
        return np.ascontiguousarray(made[first:end])

    return StoredTensor(
        name=" + ".join(one.name for one in parts), dtype=parts[0].dtype, shape=whole.shape, role=whole.role,
        memory=memory, in_one=True, made_of=tuple(parts),
    )  # fmt: skip


def _shapes(parts: Sequence[StoredTensor], whole: StoredTensor) -> list[tuple[int, int]]:
    """Rows and columns of the parts."""
    shapes = [part.shape for part in parts]
    return [(1, part.size) for part in parts] if are_rows(shapes, whole.shape) else [*map(matrix_shape, shapes)]


def _turned_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Columns of all matrices of a tensor, and the length of each."""
    rows, columns = matrix_shape(shape)
    return num_matrices(shape) * columns, rows // max(1, num_matrices(shape))


def _moved_rows(shape: tuple[int, int], layout: Layout) -> int:
    """How many rows of a part change places: those of the transposed part, if it is transposed before."""
    return shape[1] if layout.blocks > 1 and layout.transpose else shape[0]


def _made(parts: Sequence[StoredTensor], layout: Layout, whole: StoredTensor) -> Bits:
    """The elements of a whole, all of them in memory. If it is turned, each of its matrices is."""
    groups, matrices = [], num_matrices(whole.shape)
    for part, heads, (rows, columns) in zip(parts, layout.heads, _shapes(parts, whole), strict=True):
        words = ITEM_BYTES[part.dtype] // bits_type(part.dtype).itemsize
        matrix = part.slab(0, part.rows).reshape(rows, columns, words)
        if layout.columns:
            stacked = matrix.reshape(num_matrices(part.shape), -1, columns, words).swapaxes(1, 2)
            rows, columns = _turned_shape(part.shape)  # noqa: PLW2901
            matrix = stacked.reshape(rows, columns, words)
        if layout.blocks != 1:
            return _regrouped(matrix, layout)
        if heads > 0:
            matrix = matrix[pairs_order(rows, heads)]
        elif heads < 0:
            matrix = matrix[np.argsort(pairs_order(rows, -heads))]
        groups.append(matrix.reshape(layout.groups, rows // layout.groups, columns, words))
    made = np.concatenate(groups, axis=1).reshape(sum(one.shape[0] * one.shape[1] for one in groups), columns, words)
    if not layout.turns:
        return made
    return made.reshape(matrices, len(made) // max(1, matrices), columns, words).swapaxes(1, 2)


def _regrouped(matrix: Bits, layout: Layout) -> Bits:
    """The rows of a single part, from blocks to groups of all of them, or back."""
    if layout.blocks > 1:
        matrix = matrix.swapaxes(0, 1) if layout.transpose else matrix
        split = matrix.reshape(layout.blocks, layout.groups, -1, *matrix.shape[1:])
        return split.swapaxes(0, 1).reshape(matrix.shape)
    split = matrix.reshape(layout.groups, -layout.blocks, -1, *matrix.shape[1:])
    found = split.swapaxes(0, 1).reshape(matrix.shape)
    return found.swapaxes(0, 1) if layout.transpose else found


def write_map(result: WeightsComparison, path: Path) -> int:
    """Write the map that the relations of a comparison suggest; returns the number of its entries.

    Raises:
        ConfigError: The file cannot be written.
    """
    ways: dict[tuple[tuple[str, ...], tuple[str, ...]], Counter[str]] = {}
    for entry in _proposed(result.relations):
        ways.setdefault((entry.baseline, entry.candidate), Counter())[as_toml(entry)] += 1
    # an entry is for all layers: of a layer that several layouts fit, that of the others is taken
    entries = [found.most_common(1)[0][0] for found in ways.values()]
    head = (
        "# Which tensors of the baseline are which of the candidate, as their contents suggest "
        "(traindiff explain weights.md).\n"
    )
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
        if layout is None and not (
            one.kind in ("renamed", "cast", "bits") and len(one.baseline) == len(one.candidate) == 1
        ):
            continue
        layout = layout or Layout()
        parts = one.baseline if len(one.candidate) == 1 else one.candidate
        if len(parts) == len(layout.order):
            parts = tuple(parts[number] for number in layout.order)
        elif layout.order != tuple(range(len(layout.order))) or any(layout.heads) or layout.groups > 1:
            continue  # stacks of experts in an order of their own
        else:
            layout = replace(layout, heads=(0,) * len(parts), order=tuple(range(len(parts))))
        sides = (parts, one.candidate) if len(one.candidate) == 1 else (one.baseline, parts)
        names = [*sides[0], *sides[1]]
        layers = {numbers(name) for name in names}
        if len(layers) == 1 and len(next(iter(layers))) == 1:
            sides = tuple(tuple(skeleton(name).replace("*", PLACE) for name in side) for side in sides)  # type: ignore[assignment]
        yield Entry(baseline=sides[0], candidate=sides[1], layout=layout)
