"""The summary of an array in plain NumPy and float64: the definition that faster kernels must match.

Every function takes and returns uint64 arrays and wraps modulo 2^64.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traindiff.core.shards import BUCKETS, Shard
from traindiff.core.summary import SKETCH_SIZE, empty

U64 = NDArray[np.uint64]

BLOCK = 64
"""Consecutive global indices that share one hash: a block; the place in it is the lane."""

GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
WEIGHT_SEED = 0x243F6A8885A308D3  # pi, hexadecimal digits 1 to 16
SIGN_SEED = 0x13198A2E03707344  # pi, hexadecimal digits 17 to 32
XOR_32 = 0x85EBCA6B
ODD_32 = 0x9E3779B1


def splitmix64(value: Any) -> U64:
    """The finalizer of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): a bijection that mixes all 64 bits."""
    with np.errstate(over="ignore"):
        z = np.asarray(value, dtype=np.uint64) + np.uint64(GOLDEN)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(MIX_1)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX_2)
        return np.asarray(z ^ (z >> np.uint64(31)))


LANE_WEIGHTS: U64 = (splitmix64(np.arange(1, BLOCK + 1)) >> np.uint64(32)) | np.uint64(0x80000001)
"""64 odd numbers in [2^31, 2^32). A product with 32 bits of data never overflows 64."""


def block_weights(block: Any) -> U64:
    """Odd 64-bit weight of each block of the fingerprint; its top 6 bits rotate the sketch."""
    return np.asarray(splitmix64(np.asarray(block, dtype=np.uint64) ^ np.uint64(WEIGHT_SEED)) | np.uint64(1))


def block_signs(block: Any) -> U64:
    """64 sign bits per block: bit `lane` set means that the element enters the sketch negated."""
    return splitmix64(np.asarray(block, dtype=np.uint64) ^ np.uint64(SIGN_SEED))


def multiset_hash(bits: Any, *, wide: bool) -> U64:
    """Hash of each element's bits alone, to be summed.

    Args:
        bits: Raw bits, zero-extended to 64; folded by `fold` where `wide`.
        wide: Whether the elements have 64 bits.
    """
    bits = np.asarray(bits, dtype=np.uint64)
    with np.errstate(over="ignore"):
        if wide:
            z = bits * np.uint64(MIX_1)
            return np.asarray((z ^ (z >> np.uint64(32))) * np.uint64(MIX_2))
        v = (bits * np.uint64(ODD_32)) & np.uint64(0xFFFFFFFF)
        v = v ^ (v >> np.uint64(16))
        return np.asarray((bits ^ np.uint64(XOR_32)) * v)


def fold(bits: U64) -> U64:
    """`bits ^ (bits >> 32)`: a bijection that gives round 64-bit numbers low bits that differ.

    Without it the bits of 1.0 and 2.0 in float64 differ by 2^52 only, and a difference of weights
    divisible by 2^12, one in 4,096, would hide that they had changed places.
    """
    return np.asarray(bits ^ (bits >> np.uint64(32)))


_CHUNK = 512 * BLOCK


def summarize_array(
    values: NDArray[np.generic], bits: NDArray[np.unsignedinteger], shard: Shard, *, tiny: float
) -> np.void:
    """Summary of one array.

    Args:
        values: The elements in row-major order, one axis, any real dtype; converted to float64 in
            chunks.
        bits: The same elements as unsigned integers of their own width, one axis.
        shard: Which elements of the global tensor these are; `shard.size` of them.
        tiny: Smallest normal number of the elements' dtype. 0 marks a dtype without fractions
            (integers, bool), of which only counts, extremes and fingerprints are kept.

    Returns:
        One element of dtype `SUMMARY`. Neither input is changed.
    """
    summary = empty(1)
    row: np.void = summary[0]
    for span, index in _chunks(shard):
        with np.errstate(invalid="ignore", over="ignore", under="ignore"):
            x = values[span].astype(np.float64)
            raw = bits[span].astype(np.uint64)
            weight, signs, runs = _per_block(index // np.uint64(BLOCK))
            _count(row, x, tiny=tiny)
            _hash(row, x, raw, np.repeat(weight, runs), index, wide=bits.itemsize == 8)
            if tiny:
                finite = np.where(np.isfinite(x), x, 0.0)
                _sketch(row, finite, index, np.repeat(weight >> np.uint64(58), runs), np.repeat(signs, runs))
                _moments(row, finite, index, shard)
    return row


def _chunks(shard: Shard) -> Iterator[tuple[slice, U64]]:
    """Spans of the local elements with their global indices."""
    whole = None if shard.contiguous else _box_indices(shard)
    for first in range(0, shard.size, _CHUNK):
        span = slice(first, min(first + _CHUNK, shard.size))
        if whole is not None:
            yield span, whole[span]
        else:
            yield span, np.arange(shard.start + span.start, shard.start + span.stop, dtype=np.uint64)


def _box_indices(shard: Shard) -> U64:
    shape, _, strides = shard.axes((0,) * len(shard.shape))
    index = np.full((), shard.start, dtype=np.uint64)
    for length, step in zip(shape, strides, strict=True):
        index = index[..., None] + np.arange(length, dtype=np.uint64) * np.uint64(step)
    return index.reshape(-1)


def _count(row: np.void, x: NDArray[np.float64], *, tiny: float) -> None:
    size = np.abs(x)
    finite = size < np.inf
    row["count"] += x.size
    row["nan"] += np.count_nonzero(np.isnan(x))
    row["positive_infinity"] += np.count_nonzero(x == np.inf)
    row["negative_infinity"] += np.count_nonzero(x == -np.inf)
    row["zero"] += np.count_nonzero(x == 0)
    row["negative"] += np.count_nonzero(x < 0)
    row["subnormal"] += np.count_nonzero((size < tiny) & (x != 0))
    row["minimum"] = np.min(x, initial=row["minimum"], where=finite)
    row["maximum"] = np.max(x, initial=row["maximum"], where=finite)
    row["smallest"] = np.min(size, initial=row["smallest"], where=finite & (x != 0))


def _per_block(block: U64) -> tuple[U64, U64, NDArray[np.int64]]:
    """Weight, signs and run length of each run of equal `block`; indices ascend, so runs are blocks."""
    first = np.flatnonzero(np.diff(block, prepend=block[:1] + np.uint64(1)))
    runs = np.diff(first, append=len(block))
    return block_weights(block[first]), block_signs(block[first]), runs


def _hash(row: np.void, x: NDArray[np.float64], raw: U64, weight: U64, index: U64, *, wide: bool) -> None:
    folded = fold(raw) if wide else raw
    weight = weight * LANE_WEIGHTS[index % np.uint64(BLOCK)]
    kind = np.isnan(x) * np.uint64(1) + (x == np.inf) * np.uint64(2) + (x == -np.inf) * np.uint64(3)
    row["fingerprint"] += np.sum(weight * folded, dtype=np.uint64)
    row["multiset"] += np.sum(multiset_hash(folded, wide=wide), dtype=np.uint64)
    row["nonfinite"] += np.sum(weight * kind, dtype=np.uint64)


def _sketch(row: np.void, x: NDArray[np.float64], index: U64, rotation: U64, signs: U64) -> None:
    lane = index % np.uint64(BLOCK)
    negated = (signs >> lane) & np.uint64(1)
    bucket = (lane + rotation) % np.uint64(SKETCH_SIZE)
    row["sketch"] += np.bincount(bucket.astype(np.intp), np.where(negated == 1, -x, x), SKETCH_SIZE)


def _moments(row: np.void, x: NDArray[np.float64], index: U64, shard: Shard) -> None:
    grid = shard.grid
    row_bucket = (index // np.uint64(grid.columns * grid.row_block) % np.uint64(BUCKETS)).astype(np.intp)
    column_bucket = (index % np.uint64(grid.columns) // np.uint64(grid.column_block)).astype(np.intp)
    squares, size = x * x, np.abs(x)
    row["sum"] += x.sum()
    row["sum_of_squares"] += squares.sum()
    row["row_squares"] += np.bincount(row_bucket, squares, BUCKETS)
    row["column_squares"] += np.bincount(column_bucket, squares, BUCKETS)
    np.maximum.at(row["row_largest"], row_bucket, size)
    np.maximum.at(row["column_largest"], column_bucket, size)
