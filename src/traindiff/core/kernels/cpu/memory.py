"""Run the CPU kernel on memory, given by its address: whose memory it is, and of which framework, does not matter.

`run_summary` is the summary of one stretch of memory, in one call. Of anything else: `begin` a summary, add elements to
it by `add_runs`, and `finish` it, all on one thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from traindiff.core.kernels.cpu.layout import DTYPES, SIZE
from traindiff.core.kernels.cpu.module import add, frame, whole
from traindiff.core.kernels.parts import runs
from traindiff.core.shards import Shard
from traindiff.core.summary import SUMMARY

_BLOCK = 32
"""Summaries whose memory is taken at once. One that is kept keeps the block: 37 kB."""


class _Scratch(threading.local):
    """What a thread computes in, and where its next summary goes."""

    def __init__(self) -> None:
        self._memory = np.zeros(SIZE // 8, dtype=np.int64)
        self.state: int = self._memory.ctypes.data
        self.used = _BLOCK

    def next_row(self) -> int:
        """The place in `block` of the next summary, whose memory begins at `first + row * SUMMARY.itemsize`."""
        row = self.used
        if row == _BLOCK:
            self.block = np.empty(_BLOCK, SUMMARY)
            self.first: int = self.block.ctypes.data
            row = 0
        self.used = row + 1
        return row


_scratch = _Scratch()
_ROW_BYTES = SUMMARY.itemsize


@dataclass(frozen=True, slots=True)
class Plan:
    """Values that follow from a shard; most shards come back in every step.

    Attributes:
        contiguous: Whether its elements are one run of global indices.
        size: Number of elements.
        start: Global index of the first one.
        grid: Columns of the profiles, and how many rows and columns are in a bucket.
        run: All of it as one stretch of memory; see `traindiff.core.kernels.cpu.module.RUN`.
        run_address: Of `run`, in memory.
    """

    contiguous: bool
    size: int
    start: int
    grid: tuple[int, int, int]
    run: NDArray[np.int64] = field(compare=False)
    run_address: int


@lru_cache(maxsize=1 << 14)
def plan_of(shard: Shard) -> Plan:
    """The plan of a shard."""
    grid, size, start = shard.grid, shard.size, shard.start
    columns = (grid.columns, grid.row_block, grid.column_block)
    run = np.array([1, size, 0, start, 0, *columns, size], dtype=np.int64)
    return Plan(shard.contiguous, size, start, columns, run, run.ctypes.data)


_same: dict[int, tuple[Shard, Plan]] = {}
"""Plans by id of a shard, which is held: to ask for the same object again is quicker than for an equal one."""

_MOST_SAME = 1 << 14


def plan_of_same(shard: Shard) -> Plan:
    """`plan_of`, for shards that come again as the same object."""
    found = _same.get(id(shard))
    if found is None:
        if len(_same) >= _MOST_SAME:
            _same.clear()
        found = _same[id(shard)] = shard, plan_of(shard)
    return found[1]


def state() -> int:
    """The address of the memory in which this thread computes."""
    return _scratch.state


def begin() -> int:
    """Begin a summary; returns the address of its state, of which each thread has one."""
    state = _scratch.state
    frame().begin(state)
    return state


def write_summary(dtype: str, address: int, plan: Plan, summary: int) -> None:
    """`run_summary`, written to an address."""
    whole(dtype)(address, plan.run_address, _scratch.state, summary)


def writer(dtype: str, plan: Plan) -> Callable[[int, int], None]:
    """`write_summary` for one dtype and plan: given the address of the elements, and that of the summary."""
    write, scratch = whole(dtype), _scratch

    def write_row(address: int, summary: int) -> None:
        write(address, plan.run_address, scratch.state, summary)

    return write_row


def run_summary(dtype: str, address: int, plan: Plan) -> np.void:
    """The summary of a contiguous shard that is not empty, and whose elements are one stretch of memory."""
    scratch = _scratch
    row = scratch.next_row()
    whole(dtype)(address, plan.run_address, scratch.state, scratch.first + row * _ROW_BYTES)
    summary: np.void = scratch.block[row]
    return summary


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
    row = _scratch.next_row()
    frame().finish(state, _scratch.first + row * _ROW_BYTES, size)
    summary: np.void = _scratch.block[row]
    return summary
