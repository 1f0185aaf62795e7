"""Marks of the tensors that operators return, so that a bit that flips before the next operator reads them is seen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from traindiff.core.torch_compat.autograd import version_of
from traindiff.observe.torch.hooks.marks import flipped_bit, mark_of
from traindiff.observe.torch.hooks.swapped_tensors import HoldsTensors

_LEAST = 16
"""Elements other than zero below which a change of one bit may be something else, such as a scalar that is halved."""

_MOST = 1 << 16
"""Tensors that are marked at a time."""


class Flip(NamedTuple):
    """A bit of one element that changed.

    Attributes:
        maker: What the caller said of the operator that returned the tensor, or else of the first that read it.
        is_output: Whether that operator returned it.
        bit: The number of the bit, the lowest being 0.
    """

    maker: object
    is_output: bool
    bit: int


class _Marked(NamedTuple):
    tensor: ReferenceType[Tensor]
    version: int
    mark: bytes
    maker: object
    is_output: bool


class Memory(HoldsTensors):
    """Marks of tensors by where they lie.

    Only a change of a single bit counts, of a tensor whose counter of writes stands still. So whatever else writes to
    the same memory, seen or not, is no flip.
    """

    def __init__(self) -> None:
        super().__init__()
        self._marked: dict[tuple[object, ...], _Marked] = {}

    def take(self, tensors: Iterable[Tensor], maker: object) -> None:
        """Mark what an operator has returned."""
        for tensor in tensors:
            self._mark(tensor, maker, is_output=True)

    def read(self, tensors: Iterable[Tensor], reader: object) -> Iterator[Flip]:
        """Look at what an operator is about to read."""
        for tensor in tensors:
            before = self._marked.get(_place(tensor))
            if before is None or before.version != version_of(tensor):
                self._mark(tensor, reader, is_output=False)
                continue
            now = mark_of(tensor)
            if now is None or now == before.mark:
                continue
            self._marked[_place(tensor)] = before._replace(mark=now)
            bit = flipped_bit(before.mark, now, tensor.nbytes, 8 * tensor.element_size())
            if bit is not None and int(torch.count_nonzero(tensor)) >= _LEAST:
                yield Flip(before.maker, before.is_output, bit)

    def read_living(self) -> Iterator[Flip]:
        """Look at all tensors that the training still holds, such as what the model returned."""
        for marked in list(self._marked.values()):
            if (tensor := marked.tensor()) is not None:
                yield from self.read([tensor], marked.maker)

    def forget_tensors(self) -> None:
        """See `HoldsTensors`."""
        self.clear()

    def clear(self) -> None:
        """Forget all: the step has ended."""
        self._marked.clear()

    def _mark(self, tensor: Tensor, maker: object, *, is_output: bool) -> None:
        if not tensor.is_floating_point() or (mark := mark_of(tensor)) is None:
            return
        known = self._marked.get(_place(tensor))
        if known is not None and known.mark == mark and known.version == version_of(tensor):
            return  # another name of the same memory, such as a detached one
        if len(self._marked) >= _MOST:
            self._marked.clear()
        self._marked[_place(tensor)] = _Marked(ref(tensor), version_of(tensor), mark, maker, is_output)


def _place(tensor: Tensor) -> tuple[object, ...]:
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.is_nested:
        return ()
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
