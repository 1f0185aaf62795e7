"""Run the CPU kernel on many tensors at once: what it is told of them is put together beforehand."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from traindiff.core.kernels.cpu import memory
from traindiff.core.kernels.cpu.module import each
from traindiff.core.shards import Shard


def is_one_stretch(shard: Shard) -> bool:
    """True if a tensor that holds this shard, and is contiguous in memory, can be in a `Table`."""
    plan = memory.plan_of(shard)
    return plan.contiguous and plan.size > 0


class Table:
    """Tensors that are summarized in one call for each dtype. Each of them is one stretch of memory.

    Args:
        tensors: Their dtypes, as torch spells them, and their shards, for which `is_one_stretch` holds; None for a row
            that is left as it is.
    """

    def __init__(self, tensors: Sequence[tuple[str, Shard] | None]) -> None:
        # The plans own what `_runs` points to.
        self._plans = [None if one is None else memory.plan_of(one[1]) for one in tensors]
        self._runs = np.array([0 if plan is None else plan.run_address for plan in self._plans], dtype=np.int64)
        dtypes = [None if one is None else one[0] for one in tensors]
        self._places = {
            dtype: np.array([row for row, one in enumerate(dtypes) if one == dtype], dtype=np.int64)
            for dtype in dict.fromkeys(dtypes)
            if dtype is not None
        }
        runs = int(self._runs.ctypes.data)
        self._calls = [(each(dtype), runs, int(rows.ctypes.data), len(rows)) for dtype, rows in self._places.items()]

    def summarize(self, addresses: array[int], summaries: int) -> None:
        """Write the summaries of all tensors, without the interpreter lock.

        Args:
            addresses: Of their first elements, as 64-bit words: one for each row.
            summaries: The address of the first row.
        """
        state, first = memory.state(), addresses.buffer_info()[0]
        for call, runs, rows, count in self._calls:
            call(first, runs, rows, count, state, summaries)
