"""The same numbers in other places: transposed, permuted, fused, padded. Decided from hashes of rows and of columns.

A row's hash is `sum over columns j of bits(x_j) * w_j mod 2^64` with odd pseudo-random weights w; a column's is the
same over rows. So the rows of a transposed tensor have the hashes of the tensor's columns, and what moves rows moves
hashes.
Rows are those of the tensor seen as a matrix with its last dim as columns; a vector has one column. A tensor with three
dims is a stack of matrices (of experts), and has the columns of each, one matrix after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations, product
from math import gcd, prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from traindiff.core.kernels.reference import splitmix64
from traindiff.core.maps.entries import Layout
from traindiff.state.dtypes import ITEM_BYTES, bits_type
from traindiff.state.measured import in_dtype
from traindiff.state.stored import StoredTensor

Hashes = NDArray[np.uint64]

_MOST_NAMED = 4
"""Of tensors that make up another one, so many are named."""


def _weights(first: int, count: int) -> Hashes:
    return splitmix64(np.arange(first, first + count, dtype=np.uint64) ^ np.uint64(0x5851F42D4C957F2D)) | np.uint64(1)


class Lines(NamedTuple):
    """Hashes of the rows of a tensor, and of its columns: none if these are not asked for."""

    rows: Hashes
    columns: Hashes = np.zeros(0, np.uint64)


def _of_elements(bits: NDArray[Any]) -> Hashes:
    """A number for each element, of which the last axis has the words."""
    block = bits.astype(np.uint64)
    words = block.shape[-1]
    return block[..., 0] if words == 1 else (block * _weights(1 << 60, words)).sum(axis=-1, dtype=np.uint64)


def hashes(tensor: StoredTensor, dtype: str) -> Lines:
    """Hashes of the rows and of the columns of a tensor, rounded to a dtype.

    Raises:
        CheckpointError: A file has ended.
    """
    columns = tensor.shape[-1] if len(tensor.shape) > 1 else 1
    rows = tensor.size // max(1, columns)
    matrices = num_matrices(tensor.shape)
    height = rows // max(1, matrices)
    of_rows, of_columns = np.zeros(rows, np.uint64), np.zeros((matrices, columns), np.uint64)
    across, place = _weights(0, columns), 0
    words = ITEM_BYTES[tensor.dtype] // bits_type(tensor.dtype).itemsize  # a complex128 is kept as 16 bytes
    with np.errstate(over="ignore"):
        for slab in tensor.slabs:
            bits = in_dtype(tensor.slab(*slab), tensor.dtype, dtype).reshape(-1, columns, words)
            first, most = 0, max(1, (1 << 18) // columns)
            while first < len(bits):
                matrix, row = divmod(place, height)
                count = min(most, height - row, len(bits) - first)
                several = 1
                if count == height:  # slabs have whole matrices
                    several = min(max(1, most // height), (len(bits) - first) // height)
                block = _of_elements(bits[first : first + several * count])
                of_rows[place : place + len(block)] = (block * across).sum(axis=1, dtype=np.uint64)
                stacked = block.reshape(several, count, columns) * _weights(row, count)[:, None]
                of_columns[matrix : matrix + several] += stacked.sum(axis=1, dtype=np.uint64)
                place += len(block)
                first += len(block)
    return Lines(of_rows, of_columns.reshape(-1))


def hash_as_row(tensor: StoredTensor, dtype: str) -> Hashes:
    """The hash of a vector as a row of a matrix.

    Raises:
        CheckpointError: A file has ended.
    """
    total = np.zeros(1, np.uint64)
    words = ITEM_BYTES[tensor.dtype] // bits_type(tensor.dtype).itemsize
    with np.errstate(over="ignore"):
        for first, end in tensor.slabs:
            block = _of_elements(in_dtype(tensor.slab(first, end), tensor.dtype, dtype).reshape(-1, words))
            total += (block * _weights(first, end - first)).sum(dtype=np.uint64)
    return total


def are_rows(parts: Sequence[tuple[int, ...]], whole: tuple[int, ...]) -> bool:
    """True if parts, given by their shapes, are vectors that are the rows of a matrix, or its columns."""
    return (
        len(whole) == 2
        and len(parts) > 1
        and len({*parts}) == 1
        and len(parts[0]) == 1
        and {len(parts), parts[0][0]} == {*whole}
    )


class KnownHashes:
    """Hashes of rows and columns, computed once for each tensor and dtype. Tensors must stay while it is used."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], Lines] = {}

    def of(self, tensor: StoredTensor, dtype: str) -> Lines:
        """Hashes of the rows and of the columns of a tensor, rounded to a dtype.

        Raises:
            CheckpointError: A file has ended.
        """
        key = (id(tensor), dtype)
        if key not in self._known:
            self._known[key] = hashes(tensor, dtype)
        return self._known[key]


def pairs_order(rows: int, heads: int) -> NDArray[np.intp]:
    """Rows in the order of interleaved rotary pairs, as indices into rows in the order of halves, per head.

    Row `2 i + j` of a head is row `j * d / 2 + i` there, for `i < d / 2` and `j` in 0, 1.
    """
    index = np.arange(rows).reshape(heads, 2, rows // heads // 2)
    return np.ascontiguousarray(index.transpose(0, 2, 1)).reshape(-1)


def _head_counts(rows: int) -> Iterator[int]:
    for size in range(4, min(rows, 1024) + 1, 2):
        if rows % size == 0:
            yield rows // size


def rotary_heads(given: Hashes, made: Hashes) -> int | None:
    """Heads whose rows go from halves to pairs in `made` (negative: back); 0 if rows stay; None if neither."""
    if np.array_equal(given, made):
        return 0
    if len(given) != len(made) or not len(given) or given[0] != made[0]:  # the first row stays in every such order
        return None
    for heads in _head_counts(len(given)):
        order = pairs_order(len(given), heads)
        if np.array_equal(given[order], made):
            return heads
        if np.array_equal(given, made[order]):
            return -heads
    return None


def layout_of(parts: Sequence[Lines], whole: Lines) -> Layout | None:
    """How parts make up a whole; None if no known layout does."""
    for joined, of_whole in _sides(parts, whole):
        given, made = [one[joined] for one in parts], whole[of_whole]
        orders = permutations(range(len(parts))) if len(parts) <= 3 else [tuple(range(len(parts)))]
        for order in orders:
            for groups in _group_counts([len(part) for part in given]):
                heads = _split(given, made, order, groups)
                if heads is not None:
                    join = "concat" if groups == 1 else "interleave"
                    return Layout(
                        join=join, groups=groups, transpose=joined != of_whole, columns=joined, heads=heads, order=order
                    )
    return None


def _sides(parts: Sequence[Lines], whole: Lines) -> Iterator[tuple[bool, bool]]:
    """Whether columns of the parts are joined, and whether to columns of the whole: each way in which counts agree."""
    for joined, of_whole in product((False, True), repeat=2):
        counts = [len(one[joined]) for one in parts]
        if all(counts) and sum(counts) == len(whole[of_whole]):
            yield joined, of_whole


def of_each(layout: Layout, count: int) -> Layout:
    """The layout of single tensors, from the one of stacks of so many: the first of each stack, the second, ...

    The tensors are counted stack after stack. The layout stays if stacks are cut elsewhere than between their tensors.
    """
    stacks = len(layout.order)
    apart = stacks > 1 and layout.groups == count
    if count == 1 or (layout.groups != 1 and not apart) or any(heads % count for heads in layout.heads):
        return layout
    places = [(place, one) for place in range(stacks) for one in range(count)]
    places = sorted(places, key=lambda place: place[1]) if apart else places
    return replace(
        layout, join="concat", groups=1,
        order=tuple(layout.order[place] * count + one for place, one in places),
        heads=tuple(layout.heads[place] // count for place, _ in places),
    )  # fmt: skip


def order_clause(parts: Sequence[Lines], whole: Lines) -> str:
    """A clause on the order in which parts lie in a whole in no known layout."""
    for joined, of_whole in _sides(parts, whole):
        known = {part[joined].tobytes(): number for number, part in enumerate(parts)}
        if len(known) == len(parts) and len({len(part[joined]) for part in parts}) == 1:
            order = [known.get(block.tobytes()) for block in whole[of_whole].reshape(len(parts), -1)]
            moved = [place for place, number in enumerate(order) if place != number]
            if None not in order and moved:
                first = moved[0]
                return f"in another order: place {first} of {len(parts)} has number {order[first]} of them"
    return "in an order that is not known"


def _group_counts(lengths: Sequence[int]) -> list[int]:
    common = gcd(*lengths)
    return [1] if len(lengths) == 1 else [one for one in range(1, common + 1) if common % one == 0]


def _split(parts: Sequence[Hashes], whole: Hashes, order: Sequence[int], groups: int) -> tuple[int, ...] | None:
    """Heads by part, if the whole has these parts in this order, in groups."""
    table = whole.reshape(groups, -1)
    first, found = 0, []
    for number in order:
        length = len(parts[number]) // groups
        heads = rotary_heads(parts[number], np.ascontiguousarray(table[:, first : first + length]).reshape(-1))
        if heads is None:
            return None
        found.append(heads)
        first += length
    return tuple(found)


def holds(layout: Layout, parts: Sequence[Lines], whole: Lines) -> bool:
    """True if parts make up a whole in a layout."""
    made, groups = [], layout.groups
    for number, heads in zip(layout.order, layout.heads, strict=True):
        given = parts[number][layout.columns]
        if len(given) % groups or (heads and len(given) % (2 * abs(heads))):
            return False
        if heads:
            order = pairs_order(len(given), abs(heads))
            given = given[order if heads > 0 else np.argsort(order)]
        made.append(given.reshape(groups, -1))
    return np.array_equal(np.concatenate(made, axis=1).reshape(-1), whole[layout.turns])


def moved_rows(baseline: Hashes, candidate: Hashes) -> str:
    """A clause on rows of one tensor that are in another order in the other; empty if they are not the same rows."""
    if len(baseline) != len(candidate) or not np.array_equal(np.sort(baseline), np.sort(candidate)):
        return ""
    rows = len(baseline)
    for count in range(2, min(rows, 4096) + 1):
        if rows % count:
            continue
        blocks = [block.tobytes() for block in baseline.reshape(count, -1)]
        others = [block.tobytes() for block in candidate.reshape(count, -1)]
        if len({*blocks}) == count and sorted(blocks) == sorted(others) and rows // count > 1:
            place = {block: number for number, block in enumerate(blocks)}
            moved = [number for number, block in enumerate(others) if place[block] != number]
            if len(moved) == 2 or count <= 64:
                first = moved[0]
                order = f"{len(moved)} of {count} blocks of {rows // count} {{}} are in another order"
                return f"{order}: block {first} is the baseline's block {place[others[first]]}"
    num = int(np.count_nonzero(baseline != candidate))
    return f"{num} of {rows} {{}} are in another order"


def repeated_rows(baseline: Hashes, candidate: Hashes) -> tuple[str, str]:
    """A kind and a clause on rows of the candidate that are other rows of the baseline, or zero; empty if neither."""
    apart = np.flatnonzero(baseline != candidate)
    if len(baseline) != len(candidate) or not len(apart) or len(apart) == len(baseline):
        return "", ""
    first, end = int(apart[0]), int(apart[-1]) + 1
    if end - first < 2 or len(apart) != end - first:
        return "", ""
    span = f"{{}} {first} to {end - 1} of {len(baseline)}"
    if not candidate[first:end].any():
        return "missing-shard", f"has zeros in {span}, and the baseline has not: a shard is missing"
    rows, length = baseline, end - first
    for start in range(0, len(rows) - length + 1, length if len(rows) % length == 0 else 1):
        if (
            start != first
            and rows[start] == candidate[first]
            and np.array_equal(rows[start : start + length], candidate[first:end])
        ):
            again = f"those of {start} to {start + length - 1}"
            return "repeated-shard", f"has in {span} {again} a second time: a shard is there twice"
    return "", ""


def padded(baseline: Hashes, candidate: Hashes) -> bool:
    """True if the longer of two begins with all rows of the shorter one."""
    count = min(len(baseline), len(candidate))
    return count > 0 and len(baseline) != len(candidate) and np.array_equal(baseline[:count], candidate[:count])


def num_matrices(shape: Sequence[int]) -> int:
    """How many matrices a tensor is a stack of: the length of the first of three dims; else 1."""
    return shape[0] if len(shape) == 3 else 1


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a tensor, as they are hashed."""
    return (prod(shape[:-1]), shape[-1]) if len(shape) > 1 else (prod(shape), 1)


def layout_text(layout: Layout, names: Sequence[str]) -> str:
    """A clause on a layout of one or several parts, e.g. `the rows of q, k and v, one after the other`."""
    told = []
    for number, heads in zip(layout.order, layout.heads, strict=True):
        if heads:
            way = "halves to interleaved pairs" if heads > 0 else "interleaved pairs to halves"
            lines = "columns" if layout.columns else "rows"
            told.append(f"{names[number]} with its {lines} from rotary {way} in {abs(heads)} heads")
        else:
            told.append(names[number])
    how = ""
    if len(told) > 1:
        how = ", one after the other" if layout.join == "concat" else f", interleaved in {layout.groups} groups"
    lines = "the columns of " if layout.columns else ""
    return f"{lines}{listed_names(told)}{how}{', transposed' if layout.transpose else ''}"


def listed_names(names: Sequence[str]) -> str:
    """Names of tensors in a sentence; of many, the first and the last one."""
    if len(names) > _MOST_NAMED:
        return f"{names[0]} to {names[-1]} ({len(names)} tensors)"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
