"""Elements of a global tensor, put together from the parts that ranks and micro-batches recorded of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traindiff.shards import Shard

Load = Callable[[], NDArray[Any] | None]
"""Reads the elements of a part; None where they were not kept."""


def elements_of(wanted: Shard, parts: Sequence[tuple[Shard, Load]]) -> NDArray[Any] | None:
    """The elements of `wanted`, in its shape; None if the parts do not have all of them.

    Args:
        wanted: Of the same global tensor.
        parts: Parts of it, in any order; they may overlap, and hold the same elements where they do.
    """
    for shard, load in parts:
        if (shard.shape, shard.offset, shard.spacing) == (wanted.shape, wanted.offset, wanted.spacing):
            found = load()
            return None if found is None else found.reshape(wanted.shape)
    shape = _whole_shape([wanted, *(shard for shard, _ in parts)])
    if shape is None:
        return None
    values: NDArray[Any] | None = None
    known = np.zeros(shape, dtype=bool)
    for shard, load in parts:
        if _at(known, shard).all():
            continue  # a copy
        found = load()
        if found is None:
            return None
        if values is None:
            values = np.zeros(shape, dtype=found.dtype)
        _put(values, shard, found)
        _put(known, shard, np.True_)
    if values is None or not _at(known, wanted).all():
        return None
    return _at(values, wanted).reshape(wanted.shape)


def _whole_shape(shards: Sequence[Shard]) -> tuple[int, ...] | None:
    """Shape of the global tensor, with as many rows as there are; None if these are parts of different tensors."""
    inner = {shard.global_shape[1:] if shard.batched else shard.global_shape for shard in shards}
    if len(inner) != 1 or len({shard.batched for shard in shards}) != 1:
        return None
    if not shards[0].batched:
        return inner.pop()
    return (max(int(_rows(shard)[-1]) + 1 if shard.shape[0] else 0 for shard in shards), *inner.pop())


def _rows(shard: Shard) -> NDArray[np.int64]:
    """Which rows of the global tensor the rows of a box are."""
    rows = np.arange(shard.shape[0])
    if shard.spacing is not None:
        together, apart = shard.spacing
        rows = rows // together * apart + rows % together
    return rows + shard.offset[0]


def _index(shard: Shard) -> tuple[Any, ...]:
    boxes = [slice(first, first + length) for first, length in zip(shard.offset, shard.shape, strict=True)]
    return tuple(boxes) if shard.spacing is None else (_rows(shard), *boxes[1:])


def _is_flat(shard: Shard) -> bool:
    return len(shard.shape) != len(shard.global_shape)


def _at(whole: NDArray[Any], shard: Shard) -> NDArray[Any]:
    if _is_flat(shard):
        return whole.reshape(-1)[shard.offset[0] : shard.offset[0] + shard.shape[0]]
    return np.asarray(whole[_index(shard)])


def _put(whole: NDArray[Any], shard: Shard, values: Any) -> None:
    if _is_flat(shard):
        whole.reshape(-1)[shard.offset[0] : shard.offset[0] + shard.shape[0]] = values
    else:
        whole[_index(shard)] = np.reshape(values, shard.shape) if np.ndim(values) else values
