"""Tables for one launch of many tensors, which are valid as long as the tensors stay where they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from traindiff.core.kernels.gpu.launch import INTERPRETED, TABLE_HEAD
from traindiff.core.kernels.gpu.layout import DTYPES, Dtype
from traindiff.core.kernels.gpu.plan import KernelPiece, Planned, plan
from traindiff.core.kernels.torch_arrays import address
from traindiff.core.shards import Shard


def reads(tensor: torch.Tensor) -> bool:
    """True if the kernel can read this tensor: a plain one on a GPU, of one of `layout.DTYPES`.

    In Triton's interpreter: on the CPU. Complex tensors, and lazily negated ones, are read after
    `torch_arrays.as_real`.
    """
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    home = "cpu" if INTERPRETED else "cuda"
    return plain and tensor.device.type == home and tensor.dtype in DTYPES and not tensor.is_neg()


def in_order(tensor: torch.Tensor, shard: Shard) -> torch.Tensor:
    """The tensor with its elements in row-major order, in the shard's shape. Copies a strided one."""
    tensor = tensor.contiguous()
    return tensor if tensor.shape == shard.shape else tensor.reshape(-1)  # a flat range


def pieces(tensor: torch.Tensor, shard: Shard, elements_per_part: int) -> tuple[Planned, ...]:
    """The pieces of a tensor that `in_order` gave."""
    return plan(shard, tensor.stride(), elements_per_part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The pieces that one launch summarizes, all of one dtype.

    Attributes:
        dtype: Of their elements.
        box: Whether any has several runs.
        table: int64 (pieces, TABLE_HEAD and the fields of `KernelPiece`), on the device.
        programs: int64 (programs, 2), on the device: piece and part of each program.
    """

    dtype: Dtype
    box: bool
    table: torch.Tensor
    programs: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Tensors that are summarized together. Slots and partial summaries are counted from the table's first.

    Attributes:
        groups: The launches.
        merges: (slot, first partial summary, number of them) of each tensor that needs merging.
        num_partials: Partial summaries that it needs.
    """

    groups: tuple[Group, ...]
    merges: tuple[tuple[int, int, int], ...]
    num_partials: int


def make_table(
    tensors: Sequence[tuple[torch.Tensor, Shard, int]], device: torch.device, elements_per_part: int
) -> Table:
    """The table of contiguous tensors, each with its shard and slot. Copied to the device without waiting.

    Of one dtype there is one launch, or two where some are parts of a larger tensor with gaps between.
    """
    entries: dict[tuple[Dtype, bool], list[list[int]]] = {}
    merges: list[tuple[int, int, int]] = []
    num_partials = 0
    for tensor, shard, slot in tensors:
        ordered = in_order(tensor, shard)
        planned = pieces(ordered, shard, elements_per_part)
        programs = sum(piece.parts for piece in planned)
        first = num_partials if programs > 1 else -1
        if programs > 1:
            merges.append((slot, first, programs))
            num_partials += programs
        for piece in planned:
            start = address(ordered) + piece.offset * tensor.element_size()
            entry = [start, piece.parts, slot, first, *piece.piece]
            entries.setdefault((DTYPES[tensor.dtype], piece.box), []).append(entry)
            first += piece.parts if programs > 1 else 0
    groups = []
    for (dtype, box), rows in entries.items():
        table = np.array(rows, dtype=np.int64)
        programs_of_table = to_device(_programs(table), device)
        groups.append(Group(dtype=dtype, box=box, table=to_device(table, device), programs=programs_of_table))
    return Table(groups=tuple(groups), merges=tuple(merges), num_partials=num_partials)


def to_device(numbers: NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """A copy of the numbers on the device, through pinned memory: nothing waits."""
    host = torch.from_numpy(numbers)
    if device.type != "cuda":
        return host.clone()
    return host.pin_memory().to(device, non_blocking=True)


def _programs(table: NDArray[np.int64]) -> NDArray[np.int64]:
    """(piece, part) of every program, int64 (programs, 2)."""
    assert table.shape[1] == len(TABLE_HEAD) + len(KernelPiece._fields)
    parts = table[:, TABLE_HEAD.index("parts")]
    piece = np.repeat(np.arange(len(table)), parts)
    part = np.arange(len(piece)) - np.repeat(np.cumsum(parts) - parts, parts)
    return np.stack([piece, part], axis=1)
