"""Run the CPU kernel on a tensor."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from traindiff.core.kernels.cpu.layout import DTYPES, SIZE
from traindiff.core.kernels.cpu.module import add, frame
from traindiff.core.kernels.parts import parts_of, run_length, runs
from traindiff.core.kernels.torch_arrays import address
from traindiff.core.shards import Shard
from traindiff.core.summary import SUMMARY

NAMES = {getattr(torch, name): name for name in DTYPES if hasattr(torch, name)}
"""Dtypes that the kernel reads."""

SHORTEST_RUN = 48
"""Tensors with shorter contiguous runs are copied part by part: a run costs about as much as so many elements."""

_scratch = threading.local()


def reads(tensor: torch.Tensor) -> bool:
    """True if the kernel can read this tensor in place."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return plain and tensor.device.type == "cpu" and tensor.dtype in NAMES and not tensor.is_neg()


def summarize(tensor: torch.Tensor, shard: Shard) -> np.void:
    """The summary of a dense CPU tensor that `reads` accepts; see `traindiff.core.kernels.summarize`.

    One pass over its memory, without the interpreter lock. A strided tensor with short runs is
    copied part by part.
    """
    built = frame()
    state = _state()
    row = np.empty(1, SUMMARY)
    built.begin(state)
    if shard.size:
        _add(tensor, shard, state)
    built.finish(state, row.ctypes.data, shard.size)
    summary: np.void = row[0]
    return summary


def _add(tensor: torch.Tensor, shard: Shard, state: int) -> None:
    accumulate = add(NAMES[tensor.dtype])
    plan = _plan(shard)
    if plan.contiguous and tensor.is_contiguous():
        accumulate(address(tensor), 1, plan.size, 0, plan.start, 0, *plan.grid, state)
        return
    tensor = tensor.detach()
    if tensor.shape == shard.shape and run_length(*shard.axes(tensor.stride())) >= SHORTEST_RUN:
        _add_runs(tensor, shard, plan, accumulate, state)
        return
    for part, held in parts_of(tensor, shard):
        copy = part.contiguous()
        if copy.shape != held.shape:  # a flat range
            copy = copy.reshape(-1)
        _add_runs(copy, held, plan, accumulate, state)


def _add_runs(tensor: torch.Tensor, shard: Shard, plan: _Plan, accumulate: Callable[..., None], state: int) -> None:
    """Add the elements of a box, or of a flat range, run by run."""
    first, size, start = address(tensor), tensor.element_size(), shard.start
    for part in runs(*shard.axes(tensor.stride())):
        accumulate(
            first + size * part.memory, part.count, part.length, part.memory_step, start + part.index,
            part.index_step, *plan.grid, state,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Plan:
    """Values that follow from a shard; most shards come back in every step."""

    contiguous: bool
    size: int
    start: int
    grid: tuple[int, int, int]


@lru_cache(maxsize=1 << 14)
def _plan(shard: Shard) -> _Plan:
    grid = shard.grid
    return _Plan(shard.contiguous, shard.size, shard.start, (grid.columns, grid.row_block, grid.column_block))


def _state() -> int:
    """Address of the memory for this thread's state."""
    if not hasattr(_scratch, "address"):
        _scratch.state = np.zeros(SIZE // 8, dtype=np.int64)
        _scratch.address = _scratch.state.ctypes.data
    address: int = _scratch.address
    return address
