"""Run the CPU kernel on memory, given by its address: whose memory it is, and of which framework, does not matter.

`begin` a summary, add elements to it by `add_run` or `add_runs`, and `finish` it, all on one thread.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from traindiff.core.kernels.cpu.layout import DTYPES, SIZE
from traindiff.core.kernels.cpu.module import add, frame
from traindiff.core.kernels.parts import runs
from traindiff.core.shards import Shard
from traindiff.core.summary import SUMMARY

_scratch = threading.local()


@dataclass(frozen=True, slots=True)
class Plan:
    """Values that follow from a shard; most shards come back in every step.

    Attributes:
        contiguous: Whether its elements are one run of global indices.
        size: Number of elements.
        start: Global index of the first one.
        grid: Columns of the profiles, and how many rows and columns are in a bucket.
    """

    contiguous: bool
    size: int
    start: int
    grid: tuple[int, int, int]


@lru_cache(maxsize=1 << 14)
def plan_of(shard: Shard) -> Plan:
    """The plan of a shard."""
    grid = shard.grid
    return Plan(shard.contiguous, shard.size, shard.start, (grid.columns, grid.row_block, grid.column_block))


def begin() -> int:
    """Begin a summary; returns the address of its state, of which each thread has one."""
    if not hasattr(_scratch, "address"):
        _scratch.state = np.zeros(SIZE // 8, dtype=np.int64)
        _scratch.address = _scratch.state.ctypes.data
    state: int = _scratch.address
    frame().begin(state)
    return state


def add_run(dtype: str, address: int, plan: Plan, state: int) -> None:
    """Add all elements of a contiguous shard, which are one stretch of memory."""
    add(dtype)(address, 1, plan.size, 0, plan.start, 0, *plan.grid, state)


def add_runs(dtype: str, address: int, shard: Shard, strides: Sequence[int], plan: Plan, state: int) -> None:
    """Add the elements of a box, or of a flat range, run by run.

    Args:
        dtype: One of `DTYPES`.
        address: Of the first element.
        shard: Which elements there are; it may be a part of the one that `plan` was made of.
        strides: Those in memory, in elements, one per axis of the shard.
        plan: Of the whole.
        state: What `begin` returned.
    """
    accumulate, itemsize, start = add(dtype), DTYPES[dtype].bits // 8, shard.start
    for part in runs(*shard.axes(strides)):
        accumulate(
            address + itemsize * part.memory, part.count, part.length, part.memory_step, start + part.index,
            part.index_step, *plan.grid, state,
        )  # fmt: skip


def finish(state: int, size: int) -> np.void:
    """The summary, of `size` elements."""
    row = np.empty(1, SUMMARY)
    frame().finish(state, row.ctypes.data, size)
    summary: np.void = row[0]
    return summary
