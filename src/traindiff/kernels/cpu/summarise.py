"""Run the CPU kernel on a tensor."""

from __future__ import annotations

import threading

import numpy as np
import torch
from numpy.typing import NDArray

from traindiff.errors import UnsupportedTensorError
from traindiff.kernels.cpu.module import Kernel, kernel
from traindiff.kernels.cpu.runs import run_length, runs
from traindiff.kernels.cpu.state import SIZE
from traindiff.shard import Shard
from traindiff.summary import empty

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float64: "float64"}
"""Dtypes that the kernel reads."""

SHORTEST_RUN = 48
"""Tensors whose contiguous runs are shorter are copied first: each run costs as much as these elements."""

_scratch = threading.local()


def reads(tensor: torch.Tensor) -> bool:
    """Whether the kernel can read this tensor where it is."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return plain and tensor.device.type == "cpu" and tensor.dtype in DTYPES and not tensor.is_neg()


def summarise(tensor: torch.Tensor, shard: Shard) -> np.void:
    """The summary of a dense CPU tensor of one of `DTYPES`; see `traindiff.kernels.summarise`.

    One pass over its memory, without the interpreter lock. A strided tensor with short runs is
    copied first.
    """
    built = kernel()
    state = _state()
    summary = empty(1)
    address = state.ctypes.data
    built.begin(address)
    if shard.size:
        _add(built, tensor.detach(), shard, address)
    built.finish(address, summary.ctypes.data)
    summary["count"] = shard.size
    only: np.void = summary[0]
    return only


def _add(built: Kernel, tensor: torch.Tensor, shard: Shard, state: int) -> None:
    add = built.add[DTYPES[tensor.dtype]]
    grid = (shard.grid.columns, shard.grid.row_block, shard.grid.column_block)
    if tensor.is_contiguous() and shard.contiguous:
        add(_address(tensor), 1, shard.size, 0, shard.start, 0, *grid, state)
        return
    if tensor.shape != shard.shape:  # a flat range
        tensor = tensor.reshape(-1)
    index = shard.strides if len(shard.shape) == len(shard.global_shape) else (1,)
    if run_length(shard.shape, tensor.stride(), index) < SHORTEST_RUN:
        tensor = tensor.contiguous()
    address, size = _address(tensor), tensor.element_size()
    for part in runs(shard.shape, tensor.stride(), index):
        start = address + size * part.memory
        first = shard.start + part.index
        add(start, part.count, part.length, part.memory_step, first, part.index_step, *grid, state)


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError as error:  # fake tensors, and those inside a transform of torch.func
        raise UnsupportedTensorError(f"its elements cannot be read: {error}") from error


def _state() -> NDArray[np.int64]:
    """Memory for the state, one per thread."""
    held: NDArray[np.int64] | None = getattr(_scratch, "state", None)
    if held is None:
        held = _scratch.state = np.zeros(SIZE // 8, dtype=np.int64)
    return held
