"""Tables for one launch of many tensors, wherever these lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from traindiff.core.kernels.gpu.launch import INTERPRETED, TABLE_HEAD
from traindiff.core.kernels.gpu.layout import DTYPES, Dtype
from traindiff.core.kernels.gpu.plan import KernelPiece, Planned, plan
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
        tensors: int64 (pieces,): the tensor that each is of.
        offsets: int64 (pieces,): its first element, in bytes after the tensor's.
    """

    dtype: Dtype
    box: bool
    table: torch.Tensor
    programs: torch.Tensor
    tensors: NDArray[np.int64]
    offsets: NDArray[np.int64]


Placed = tuple[torch.dtype, Shard, tuple[int, ...]]
"""What is known of a contiguous tensor: its dtype, its shard, and the strides of what `in_order` gives of it."""


def placed(tensor: torch.Tensor, shard: Shard) -> Placed | None:
    """What is known of a tensor; None if it is not contiguous."""
    return (tensor.dtype, shard, in_order(tensor, shard).stride()) if tensor.is_contiguous() else None


class Table:
    """Contiguous tensors that are summarized together, wherever they lie; copied to the device without waiting.

    Of one dtype there is one launch, or two where some are parts of a larger tensor with gaps between.

    Args:
        tensors: What is known of each; None for a row that is left as it is.
        device: Their device.
        elements_per_part: Elements per program of a launch, about.

    Attributes:
        groups: The launches. Slots and partial summaries are counted from the table's first.
        merges: int64 (tensors that need merging, 3): slot, first partial summary, number of them.
        num_partials: Partial summaries that it needs.
    """

    def __init__(self, tensors: Sequence[Placed | None], device: torch.device, elements_per_part: int) -> None:
        entries: dict[tuple[Dtype, bool], list[list[int]]] = {}
        merges: list[tuple[int, int, int]] = []
        self.num_partials = 0
        for slot, one in enumerate(tensors):
            if one is None:
                continue
            dtype, shard, strides = one
            planned = plan(shard, strides, elements_per_part)
            programs = sum(piece.parts for piece in planned)
            first = self.num_partials if programs > 1 else -1
            if programs > 1:
                merges.append((slot, first, programs))
                self.num_partials += programs
            for piece in planned:
                entry = [piece.offset * dtype.itemsize, piece.parts, slot, first, *piece.piece]
                entries.setdefault((DTYPES[dtype], piece.box), []).append(entry)
                first += piece.parts if programs > 1 else 0
        self.merges = np.array(merges, dtype=np.int64).reshape(-1, 3)
        self.groups = [_group(*key, np.array(rows, dtype=np.int64), device) for key, rows in entries.items()]
        self._device = device
        self._addresses: NDArray[np.int64] | None = None  # of the tensors, when `_there` was made
        self._there: list[torch.Tensor] = []

    def addresses(self, tensors: NDArray[np.int64], drop: Callable[[torch.Tensor], None]) -> list[torch.Tensor]:
        """The addresses of the pieces of each group, on the device. They travel only if a tensor has moved.

        Args:
            tensors: Addresses of the first elements of the tensors.
            drop: Called with those of before, which kernels may still be reading.
        """
        if self._addresses is None or not np.array_equal(tensors, self._addresses):
            for before in self._there:
                drop(before)
            self._there = [to_device(tensors[one.tensors] + one.offsets, self._device) for one in self.groups]
            self._addresses = tensors
        return self._there


def _group(dtype: Dtype, box: bool, rows: NDArray[np.int64], device: torch.device) -> Group:  # noqa: FBT001
    table = np.ascontiguousarray(rows[:, 1:])
    return Group(
        dtype=dtype, box=box, table=to_device(table, device), programs=to_device(_programs(table), device),
        tensors=table[:, TABLE_HEAD.index("slot")], offsets=rows[:, 0],
    )  # fmt: skip


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
