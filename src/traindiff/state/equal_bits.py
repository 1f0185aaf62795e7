"""Tensors of one name that have the same bits: both sides are read side by side, and need no summaries."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy as np

from traindiff.state.dtypes import TOO_LARGE, Bits, decoded, rounded
from traindiff.state.measured import MOST_THREADS, common_dtype
from traindiff.state.stored import SlabBuffers, StoredTensor

_BLOCK_BYTES = 1 << 18
"""Bytes that are compared at a time, so that what is made of them stays in the cache."""

Equality = Literal["unequal", "overflown", "rounded", "exact"]
"""The same bits in no common dtype; after rounding one side to the dtype of the other, which is too short for
some numbers, or is not; without rounding."""

Pair = tuple[StoredTensor, StoredTensor]


def can_be_equal(baseline: StoredTensor, candidate: StoredTensor) -> bool:
    """True if both have elements, in one shape, and the dtype of one of them holds all numbers of the other's."""
    if not (baseline.is_readable and candidate.is_readable and baseline.shape == candidate.shape):
        return False
    return common_dtype(baseline.dtype, candidate.dtype) is not None


def equalities(pairs: Sequence[Pair], progress: Callable[[int, int], None] = lambda _, __: None) -> list[Equality]:
    """Whether the two tensors of each pair have the same bits. Memory holds a slab of each side per thread.

    A pair is read until a slab differs.

    Args:
        pairs: Of each, `can_be_equal` holds.
        progress: Is told how many more bytes have been read, and how many more or fewer are to be read than was
            thought, which was all of both.

    Raises:
        CheckpointError: A file has ended.
    """
    pool = ThreadPoolExecutor(max_workers=min(MOST_THREADS, os.cpu_count() or 1))
    buffers = SlabBuffers(2)
    compared = [_Compared(*pair, buffers) for pair in pairs]
    try:
        tasks = [[pool.submit(one.compare, *slab) for slab in one.slabs()] for one in compared]
        for one, slabs in zip(compared, tasks, strict=True):
            left = one.num_bytes
            for task in slabs:
                progress(count := task.result(), 0)
                left -= count
            progress(0, -left)
    finally:
        pool.shutdown(cancel_futures=True)
    return [one.found() for one in compared]


class _Compared:
    """A pair, and whether its slabs were equal so far."""

    def __init__(self, baseline: StoredTensor, candidate: StoredTensor, buffers: SlabBuffers) -> None:
        dtype = common_dtype(baseline.dtype, candidate.dtype)
        self._long, self._short = (baseline, candidate) if candidate.dtype == dtype else (candidate, baseline)
        self._buffers = buffers
        self._is_equal = self._is_exact = True
        self._overflows = False
        self.num_bytes = baseline.num_bytes + candidate.num_bytes

    def slabs(self) -> list[tuple[int, int]]:
        """First and last row (excluded) of each slab."""
        return (self._short if self._short.in_one else self._long).slabs

    def compare(self, first: int, end: int) -> int:
        """Compare a slab, unless another one was unequal; returns the number of bytes that were read."""
        if not self._is_equal:
            return 0
        buffers = self._buffers.of_thread()
        long, short = self._long.slab(first, end, buffers[0]), self._short.slab(first, end, buffers[1])
        if self._long.dtype == self._short.dtype:
            self._is_equal &= _are_equal(long, short)
        else:
            step = _BLOCK_BYTES // long.itemsize
            for low in range(0, len(long), step):
                if not self._compare_rounded(long[low : low + step], short[low : low + step]):
                    self._is_equal = False
                    break
        return long.nbytes + short.nbytes

    def _compare_rounded(self, long: Bits, short: Bits) -> bool:
        if self._is_exact:
            self._is_exact = np.array_equal(rounded(decoded(short, self._short.dtype), self._long.dtype), long)
        if self._is_exact:
            return True
        values = decoded(long, self._long.dtype)
        if not np.array_equal(rounded(values, self._short.dtype), short):
            return False
        if not self._overflows:
            size = np.abs(values)
            self._overflows = bool(((size >= TOO_LARGE[self._short.dtype]) & (size < np.inf)).any())
        return True

    def found(self) -> Equality:
        """What all slabs say."""
        if not self._is_equal:
            return "unequal"
        return "exact" if self._is_exact else "overflown" if self._overflows else "rounded"


def _are_equal(baseline: Bits, candidate: Bits) -> bool:
    """True if two slabs have the same bits: eight bytes at a time, and then the rest."""
    first, second = baseline.view(np.uint8), candidate.view(np.uint8)
    end = len(first) - len(first) % 8
    for low in range(0, end, _BLOCK_BYTES):
        block = slice(low, min(low + _BLOCK_BYTES, end))
        if not np.array_equal(first[block].view(np.uint64), second[block].view(np.uint64)):
            return False
    return np.array_equal(first[end:], second[end:])
