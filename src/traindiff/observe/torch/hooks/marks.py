"""Marks of parameters: cheap numbers that change if any bit of a parameter does."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from traindiff.core.kernels.registry import WORDS
from traindiff.core.kernels.torch_arrays import addresses, is_freed
from traindiff.core.observation import FLIPPED
from traindiff.core.shards import Piece
from traindiff.core.torch_compat.alike import looks_like
from traindiff.core.torch_compat.autograd import version_of
from traindiff.observe.common.sink import Sink
from traindiff.observe.torch.hooks.swapped_tensors import HoldsTensors

_LANES = 64
_SHORT_BYTES = 4096
LEAST_ELEMENTS = 16
"""Elements other than zero below which a change of one bit may be a legal edit, such as halving the only element."""

_PLAIN = (Tensor, torch.nn.Parameter)


def mark_of(tensor: Tensor) -> bytes | None:
    """The bytes of a short tensor, or sums of a longer one's 64-bit words, in 64 lanes; None if it cannot be read.

    A changed element changes a mark. Elements that change places within a lane do not.

    Args:
        tensor: Any shape and dtype. Only its part on this rank counts. Tensors on other devices than the CPU, which
            reading would have to wait for, tensors of other classes, such as fake ones, and freed ones have no mark.
    """
    local = _local(tensor)
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


def _local(tensor: Tensor) -> Tensor:
    """The part of a tensor on this rank."""
    local: Any = tensor.detach()
    found: Tensor = local.to_local() if hasattr(local, "to_local") else local
    return found


def _is_readable(tensor: Tensor) -> bool:
    """True if a tensor's memory on the CPU is one stretch that `mark_of` reads without a copy."""
    strided = tensor.device.type == "cpu" and tensor.layout == torch.strided and not tensor.is_nested
    return strided and tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def _column_sums(address: int, rows: int) -> bytes:
    """Sums of 64-bit words in `_LANES` columns, by the CPU kernel if there is one."""
    if (words := WORDS.load()) is not None:
        found: bytes = words.sums(address, rows)
        return found
    memory: Any = (ctypes.c_int64 * (rows * _LANES)).from_address(address)
    sums: bytes = np.frombuffer(memory, np.int64).reshape(rows, _LANES).sum(0).tobytes()
    return sums


class Together:
    """Marks of tensors that one native call can read: contiguous ones on the CPU."""

    def __init__(self, tensors: Sequence[Tensor], looks: Callable[[Sequence[Any]], bool], words: Any) -> None:
        sizes = (tensor.nbytes for tensor in tensors)
        self._marks = words.Marks([(0, size) if size <= _SHORT_BYTES else divmod(size, 8 * _LANES) for size in sizes])
        self._looks = looks

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Together | None:
        """For tensors that look like these; None if there is no such call for them."""
        words = WORDS.load()
        if words is None or not all(type(one) in _PLAIN and _is_readable(one) for one in tensors):
            return None
        looks = looks_like(tensors)
        return None if looks is None else cls(tensors, looks, words)

    def read(self, tensors: Sequence[Any]) -> NDArray[np.uint8] | None:
        """The marks of the tensors, one after the other; None if some look otherwise than they did, or are freed."""
        if not self._looks(tensors):
            return None
        at = addresses(tensors)
        if at is None:
            return None
        found: NDArray[np.uint8] = self._marks.read(at)
        return found

    def parts(self, marks: NDArray[np.uint8]) -> list[bytes]:
        """The mark of each tensor, as `mark_of` gives it."""
        return [marks[first:end].tobytes() for first, end in pairwise([0, *self._marks.ends])]


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


class Edit(NamedTuple):
    """A tensor that got other bits since it was marked.

    Attributes:
        tensor: The tensor.
        pieces: What it holds.
        bit: The bit that is another one in one element, the lowest being 0, if that alone has changed and nothing wrote
            to the tensor; else None.
    """

    tensor: Tensor
    pieces: Sequence[Piece]
    bit: int | None


class _Held(NamedTuple):
    """A tensor that is marked by itself, with the pieces in it, its mark, and the counter of writes to it."""

    tensor: ReferenceType[Tensor]
    pieces: Sequence[Piece]
    mark: bytes
    version: int


class Marks(HoldsTensors):
    """Marks of tensors as the latest step of an optimizer left them: parameters, or a state of theirs."""

    def __init__(self) -> None:
        super().__init__()
        self._held: list[_Held] = []
        self._together: Together | None = None
        self._of_together: list[tuple[ReferenceType[Tensor], Sequence[Piece]]] = []
        self._marked: list[tuple[ReferenceType[Tensor], Sequence[Piece]]] = []
        self._marks = np.empty(0, np.uint8)  # of those in `_marked`
        self._versions: list[int] = []
        self._writes_uncounted = False  # the training writes to them in ways that torch does not count

    def take(self, parameter: Tensor, pieces: Sequence[Piece]) -> None:
        """Mark a parameter, given with the pieces that it holds."""
        if (mark := mark_of(parameter)) is not None:
            self._held.append(_Held(ref(parameter), pieces, mark, version_of(parameter)))

    def take_all(self, parameters: Sequence[tuple[Tensor, Sequence[Piece]]]) -> None:
        """Mark some parameters, and forget all others."""
        self.forget()
        tensors = [one for one, _ in parameters]
        if not _are(self._of_together, parameters):
            self._together = Together.of(tensors)
            self._of_together = [(ref(one), pieces) for one, pieces in parameters]
        marks = None if self._together is None else self._together.read(tensors)
        if marks is not None:
            self._marked, self._marks, self._versions = self._of_together, marks, [*map(version_of, tensors)]
            return
        self._of_together = []
        for parameter, pieces in parameters:
            self.take(parameter, pieces)

    def release(self, parameters: Collection[Tensor]) -> None:
        """Forget the marks of parameters that another optimizer has stepped since."""
        if not parameters or not (self._held or self._marked):
            return
        self._part()
        ids = {id(one) for one in parameters}
        self._held = [one for one in self._held if id(one.tensor()) not in ids]

    def forget(self) -> None:
        """Forget all marks: a step is about to change the parameters."""
        self._held, self._marked = [], []

    def forget_tensors(self) -> None:
        """See `HoldsTensors`."""
        self.forget()
        self._of_together = []

    def edited(self) -> Sequence[Edit]:
        """The tensors that got other bits since they were marked. They are marked again.

        A bit is told of one tensor, and only as long as the training was not seen to write to such tensors in a way
        that torch does not count (through `.data`): such a write may happen to change one bit.
        """
        if self._marked and self._together is not None:
            marks = self._together.read([held() for held, _ in self._marked])
            if marks is not None and np.array_equal(marks, self._marks):
                return ()
            self._part()
        edits: list[Edit] = []
        uncounted = 0
        for number, one in enumerate(self._held):
            tensor = one.tensor()
            if tensor is None or (now := mark_of(tensor)) == one.mark or now is None:
                continue
            version = version_of(tensor)
            bit = changed_bit(tensor, one.mark, now) if version == one.version and len(one.pieces) == 1 else None
            self._held[number] = _Held(one.tensor, one.pieces, now, version)
            edits.append(Edit(tensor, one.pieces, bit))
            uncounted += version == one.version
            self._writes_uncounted |= version == one.version and bit is None
        self._writes_uncounted |= uncounted > 1
        return [edit._replace(bit=None) for edit in edits] if self._writes_uncounted else edits

    def _part(self) -> None:
        """Keep a mark for each parameter."""
        if self._marked and self._together is not None:
            parts = zip(self._together.parts(self._marks), self._versions, strict=True)
            self._held += [
                _Held(*held, mark, version) for held, (mark, version) in zip(self._marked, parts, strict=True)
            ]
            self._marked = []


def changed_bit(tensor: Tensor, before: bytes, now: bytes) -> int | None:
    """The bit that explains two marks of a tensor, if it has enough elements to tell a flip from an edit."""
    local = _local(tensor)
    if len(before) != len(now) or int(torch.count_nonzero(local)) < LEAST_ELEMENTS:
        return None
    return flipped_bit(before, now, local.nbytes, 8 * local.element_size())


def emit_bit(sink: Sink, edit: Edit, **about: Any) -> None:
    """Hand the number of a bit that has flipped to the sink, if one has.

    Args:
        sink: Receives the observation.
        edit: The tensor.
        about: Arguments of `Sink.emit` but for path and stage.
    """
    if edit.bit is not None:
        bit = torch.tensor(float(edit.bit), dtype=torch.float64, device="cpu")
        sink.emit(bit, path=edit.pieces[0].path, stage=FLIPPED, scaled=False, **about)


def _are(held: Sequence[tuple[ReferenceType[Tensor], Sequence[Piece]]], those: Sequence[tuple[Tensor, Any]]) -> bool:
    """True if these are the same parameters with the same pieces."""
    return len(held) == len(those) and all(
        one() is other and pieces is others for (one, pieces), (other, others) in zip(held, those, strict=True)
    )
