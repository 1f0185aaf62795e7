"""What one rank holds of a sharded model in memory: of the other side, the same elements are read."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod

import numpy as np

from traindiff.core.shards import Region, Shard
from traindiff.core.site import printable
from traindiff.errors import CheckpointError
from traindiff.state.comparison import Relation
from traindiff.state.dtypes import Bits, bits_type
from traindiff.state.stored import StoredTensor

Tensors = dict[str, StoredTensor]


def cut_to_held(
    baseline: Mapping[str, StoredTensor], candidate: Mapping[str, StoredTensor]
) -> tuple[Tensors, Tensors, list[Relation], list[str]]:
    """Both sides, after cutting tensors to the part that this rank holds of the other side's, by the same names.

    Also relations for tensors of other global shapes, which are left out, and notes.

    Raises:
        CheckpointError: Both sides are sharded, each in another way, or one has summaries alone.
    """
    first, second = dict(baseline), dict(candidate)
    found: list[Relation] = []
    for name, one in baseline.items():
        other = candidate.get(name)
        if other is None or one.held == other.held:
            continue
        if one.held is not None and other.held is not None:
            raise CheckpointError(
                f"{printable(name)} is sharded on both sides, and this rank holds other elements of the two. Save one "
                "of the two, and compare the other one with the files."
            )
        if not (one.is_readable and other.is_readable):
            raise CheckpointError(
                f"of {printable(name)}, this rank holds a part, and the other side has only summaries of the whole. "
                "Compare with saved weights."
            )
        shapes = _global_shape(one), _global_shape(other)
        if shapes[0] != shapes[1]:
            found.append(
                Relation(
                    word="differs", kind="shape", role=other.role, baseline=(one.name,), candidate=(other.name,),
                    message=f"has the shape {list(shapes[1])}; the baseline's is {list(shapes[0])}",
                    evidence={"shapes": [list(shape) for shape in shapes]},
                )
            )  # fmt: skip
            del first[name], second[name]
        elif one.held is None:
            assert other.held is not None
            first[name] = _cut(one, other.held)
        else:
            second[name] = _cut(other, one.held)
    return first, second, found, [*_notes("baseline", baseline), *_notes("candidate", candidate)]


def _global_shape(tensor: StoredTensor) -> tuple[int, ...]:
    if tensor.held is None:
        return tensor.shape
    return tensor.held.global_shape if isinstance(tensor.held, Shard) else tensor.held.shape


def _notes(side: str, tensors: Mapping[str, StoredTensor]) -> list[str]:
    count = sum(one.held is not None for one in tensors.values())
    if not count:
        return []
    return [
        f"The {side} is sharded: of {count} of its {len(tensors)} tensors, only the elements that this rank holds are "
        "compared, and shapes and rows are those of its part. Compare on every rank to compare all."
    ]


def _cut(tensor: StoredTensor, held: Region | Shard) -> StoredTensor:
    """A part of a tensor, read when asked for."""
    shape = held.shape if isinstance(held, Shard) else held.local_shape
    memory = partial(_range, tensor, held) if isinstance(held, Shard) else partial(_box, tensor, held)
    return StoredTensor(name=tensor.name, dtype=tensor.dtype, shape=shape, role=tensor.role, memory=memory, held=held)


def _words(tensor: StoredTensor) -> int:
    """Integers of `bits_type` in an element: more than one for elements of 16 bytes."""
    return tensor.num_bytes // max(1, tensor.size) // bits_type(tensor.dtype).itemsize or 1


def _range(tensor: StoredTensor, held: Shard, first: int, end: int) -> Bits:
    """Elements of a flat range."""
    inner, words = max(1, prod(tensor.shape[1:])), _words(tensor)
    low, high = held.offset[0] + first, held.offset[0] + end
    rows = low // inner, -(-high // inner)
    start = low - rows[0] * inner
    return tensor.slab(*rows)[start * words : (start + high - low) * words]


def _box(tensor: StoredTensor, held: Region, first: int, end: int) -> Bits:
    """Rows of a region, counted in the local tensor."""
    if not held.shape:
        return tensor.slab(0, 1)
    found, place = [], 0
    for offset, length in held.ranges[0]:
        low, high = max(first - place, 0), min(end - place, length)
        if low < high:
            found.append(tensor.slab(offset + low, offset + high).reshape(high - low, *tensor.shape[1:], -1))
        place += length
    block = np.concatenate(found)
    for dim, ranges in enumerate(held.ranges[1:], 1):
        if ranges != ((0, held.shape[dim]),):
            block = block.take(np.concatenate([np.arange(low, low + length) for low, length in ranges]), axis=dim)
    return np.ascontiguousarray(block).reshape(-1)
