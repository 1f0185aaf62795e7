"""Marks of parameters: cheap numbers that change if any bit of a parameter does."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from weakref import ReferenceType, ref

import numpy as np
import torch
from torch import Tensor

from traindiff.core.shards import Piece

_LANES = 64
_SHORT_BYTES = 4096


def mark_of(tensor: Tensor) -> bytes | None:
    """The bytes of a short tensor, or sums of a longer one's 64-bit words, in 64 lanes; None if it cannot be read.

    A changed element changes a mark. Elements that change places within a lane do not.

    Args:
        tensor: Any shape and dtype. Only its part on this rank counts. Tensors on other devices than the CPU, which
            reading would have to wait for, and tensors of other classes, such as fake ones, have no mark.
    """
    local: Tensor = tensor.detach()
    local = local.to_local() if hasattr(local, "to_local") else local
    if type(local) is not Tensor or local.device.type != "cpu" or local.layout != torch.strided or local.is_nested:
        return None
    local = local.contiguous()  # held until its memory has been read
    size, address = local.nbytes, local.data_ptr()
    if size <= _SHORT_BYTES:
        return ctypes.string_at(address, size) if size else b""
    memory: Any = (ctypes.c_char * size).from_address(address)
    words = np.frombuffer(memory, np.int64, size // 8)
    table = words[: words.size // _LANES * _LANES].reshape(-1, _LANES)
    rest = size - table.nbytes
    sums: bytes = table.sum(0).tobytes()
    return sums + ctypes.string_at(address + table.nbytes, rest)


class Marks:
    """Marks of parameters as the latest step of an optimizer left them."""

    def __init__(self) -> None:
        self._held: list[tuple[ReferenceType[Tensor], Sequence[Piece], bytes]] = []

    def take(self, parameters: Iterable[tuple[Tensor, Sequence[Piece]]]) -> None:
        """Mark parameters, given with the pieces that they hold. This forgets all earlier marks."""
        self._held = [(ref(one), pieces, mark) for one, pieces in parameters if (mark := mark_of(one)) is not None]

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
