"""Run the CPU kernel on a NumPy array, which any framework can give of its tensors."""

from __future__ import annotations

from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traindiff.core.kernels.cpu import memory
from traindiff.core.kernels.cpu.layout import DTYPES
from traindiff.core.shards import Shard


def reads(array: NDArray[Any], dtype: str = "") -> bool:
    """True if the kernel can read this array in place: row-major, of one of its dtypes, in this machine's byte order.

    bfloat16, which NumPy does not have, is a dtype with this name that another package has registered, or `dtype`.
    """
    return array.flags.c_contiguous and array.dtype.isnative and (dtype or array.dtype.name) in DTYPES


def summarize(array: NDArray[Any], shard: Shard, dtype: str = "") -> np.void:
    """The summary of an array that `reads` accepts; see `traindiff.core.kernels.summarize_array`.

    One pass over its memory, without the interpreter lock.
    """
    plan, name = memory.plan_of(shard), dtype or array.dtype.name
    if plan.contiguous and plan.size:
        return memory.run_summary(name, array.ctypes.data, plan)
    state = memory.begin()
    if plan.size:
        strides = [*accumulate(reversed(shard.shape[1:]), mul, initial=1)][::-1]
        memory.add_runs(name, array.ctypes.data, shard, strides, plan, state)
    return memory.finish(state, plan.size)
