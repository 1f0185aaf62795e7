"""Run the CPU kernel on a tensor."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from traindiff.core.kernels.cpu import memory
from traindiff.core.kernels.cpu.layout import DTYPES
from traindiff.core.kernels.parts import parts_of, run_length
from traindiff.core.kernels.rows import Rows
from traindiff.core.kernels.torch_arrays import address
from traindiff.core.shards import Shard
from traindiff.errors import UnsupportedTensorError

NAMES = {getattr(torch, name): name for name in DTYPES if hasattr(torch, name)}
"""Dtypes that the kernel reads."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)

SHORTEST_RUN = 48
"""Tensors with shorter contiguous runs are copied part by part: a run costs about as much as so many elements."""


def reads(tensor: torch.Tensor) -> bool:
    """True if the kernel can read this tensor in place."""
    if type(tensor) not in _PLAIN or tensor.dtype not in NAMES or not tensor.is_cpu:
        return False
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_neg()


def summarize(tensor: torch.Tensor, shard: Shard) -> np.void:
    """The summary of a dense CPU tensor that `reads` accepts; see `traindiff.core.kernels.summarize`.

    One pass over its memory, without the interpreter lock. A strided tensor with short runs is
    copied part by part.
    """
    name, plan = NAMES[tensor.dtype], memory.plan_of(shard)
    if plan.contiguous and plan.size and tensor.is_contiguous():
        return memory.run_summary(name, address(tensor), plan)
    state = memory.begin()
    if plan.size:
        _add(tensor, name, shard, plan, state)
    return memory.finish(state, plan.size)


def add_to(rows: Rows, tensor: torch.Tensor, shard: Shard) -> int:
    """Add the summary of a tensor to rows, the shortest way, if the tensor is one stretch of memory.

    Returns:
        The address of its row; 0, and nothing is added, for any other tensor.
    """
    plan = _plan_of_stretch(tensor, shard)
    if plan is None:
        return 0
    try:
        first = address(tensor)
    except UnsupportedTensorError:
        return 0
    place = rows.place()
    memory.write_summary(NAMES[tensor.dtype], first, plan, place)
    return place


def writer(tensor: torch.Tensor, shard: Shard) -> Callable[[int, int], None] | None:
    """A function that writes the summary of any tensor that looks like this one, given two addresses.

    Returns:
        The function, which takes the address of the first element and that of the row; None if the tensor is not one
        stretch of memory.
    """
    plan = _plan_of_stretch(tensor, shard)
    return None if plan is None else memory.writer(NAMES[tensor.dtype], plan)


def _plan_of_stretch(tensor: torch.Tensor, shard: Shard) -> memory.Plan | None:
    """The plan of a tensor that is one stretch of memory; None for any other."""
    if not (reads(tensor) and tensor.is_contiguous()):
        return None
    plan = memory.plan_of_same(shard)
    return plan if plan.contiguous and plan.size else None


def _add(tensor: torch.Tensor, name: str, shard: Shard, plan: memory.Plan, state: int) -> None:
    tensor = tensor.detach()
    if tensor.shape == shard.shape and run_length(*shard.axes(tensor.stride())) >= SHORTEST_RUN:
        memory.add_runs(name, address(tensor), shard, tensor.stride(), plan, state)
        return
    for part, held in parts_of(tensor, shard):
        copy = part.contiguous()
        if copy.shape != held.shape:  # a flat range
            copy = copy.reshape(-1)
        memory.add_runs(name, address(copy), held, copy.stride(), plan, state)
