"""Marks of parameters: cheap numbers that change if any bit of a parameter does."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterator, Sequence
from typing import Any
from weakref import ReferenceType, ref

import numpy as np
import torch
from torch import Tensor

from traindiff.core.kernels.registry import WORDS
from traindiff.core.kernels.torch_arrays import is_freed
from traindiff.core.shards import Piece

_LANES = 64
_SHORT_BYTES = 4096


def mark_of(tensor: Tensor) -> bytes | None:
    """The bytes of a short tensor, or sums of a longer one's 64-bit words, in 64 lanes; None if it cannot be read.

    A changed element changes a mark. Elements that change places within a lane do not.

    Args:
        tensor: Any shape and dtype. Only its part on this rank counts. Tensors on other devices than the CPU, which
            reading would have to wait for, tensors of other classes, such as fake ones, and freed ones have no mark.
    """
    local: Tensor = tensor.detach()
    local = local.to_local() if hasattr(local, "to_local") else local
    if type(local) is not Tensor or local.device.type != "cpu" or local.layout != torch.strided or local.is_nested:
        return None
    if is_freed(local):
        return None
    local = local.contiguous()  # held until its memory has been read
    size, address = local.nbytes, local.data_ptr()
    if size <= _SHORT_BYTES:
        return ctypes.string_at(address, size) if size else b""
    rows, rest = divmod(size, 8 * _LANES)
    return _column_sums(address, rows) + ctypes.string_at(address + size - rest, rest)


def _column_sums(address: int, rows: int) -> bytes:
    """Sums of 64-bit words in `_LANES` columns, by the CPU kernel if there is one."""
    if (words := WORDS.load()) is not None:
        found: bytes = words.sums(address, rows)
        return found
    memory: Any = (ctypes.c_int64 * (rows * _LANES)).from_address(address)
    sums: bytes = np.frombuffer(memory, np.int64).reshape(rows, _LANES).sum(0).tobytes()
    return sums


def flipped_bit(before: bytes, now: bytes, size: int, bits: int) -> int | None:
    """The number of the bit in its element, the lowest being 0, if one bit of one element explains two other marks.

    Args:
        before: Mark of the tensor before.
        now: Mark of it now.
        size: Bytes of the tensor.
        bits: Bits of an element.
    """
    sums = 0 if size <= _SHORT_BYTES else 8 * _LANES
    pairs = zip(np.frombuffer(before[:sums], np.uint64), np.frombuffer(now[:sums], np.uint64), strict=True)
    lanes = [int(one) - int(other) for one, other in pairs if one != other]
    rest = int.from_bytes(before[sums:], "little") ^ int.from_bytes(now[sums:], "little")
    if len(lanes) + rest.bit_count() != 1:
        return None
    change = min(abs(lanes[0]), 2**64 - abs(lanes[0])) if lanes else rest  # sums are modulo 2^64
    return (change.bit_length() - 1) % bits if change.bit_count() == 1 else None


class Marks:
    """Marks of parameters as the latest step of an optimizer left them."""

    def __init__(self) -> None:
        self._held: list[tuple[ReferenceType[Tensor], Sequence[Piece], bytes]] = []

    def take(self, parameter: Tensor, pieces: Sequence[Piece]) -> None:
        """Mark a parameter, given with the pieces that it holds."""
        if (mark := mark_of(parameter)) is not None:
            self._held.append((ref(parameter), pieces, mark))

    def release(self, parameters: Collection[Tensor]) -> None:
        """Forget the marks of parameters that another optimizer has stepped since."""
        ids = {id(one) for one in parameters}
        self._held = [one for one in self._held if id(one[0]()) not in ids]

    def forget(self) -> None:
        """Forget all marks: a step is about to change the parameters."""
        self._held = []

    def edited(self) -> Iterator[tuple[Tensor, Sequence[Piece]]]:
        """The parameters that got other bits since they were marked, with their pieces. They are marked again."""
        for number, (held, pieces, before) in enumerate(self._held):
            parameter = held()
            if parameter is not None and (now := mark_of(parameter)) != before and now is not None:
                self._held[number] = held, pieces, now
                yield parameter, pieces
