"""A tensor of a checkpoint: its dtype and shape, and its elements slab by slab, wherever its parts lie."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from traindiff.core.shards import Region, Shard
from traindiff.core.untrusted.demands import quoted
from traindiff.core.untrusted.folder import Folder
from traindiff.errors import CheckpointError
from traindiff.state.dtypes import ITEM_BYTES, Bits, bits_type

SLAB_BYTES = 1 << 22
"""Bytes of a slab: as many rows as fit, at least one. Slabs of all threads fit into a cache together."""

Role = Literal["parameter", "optimizer", "other"]


def unreadable(where: str, what: str) -> CheckpointError:
    """The error for a file of a checkpoint; `what` is a clause without a full stop."""
    return CheckpointError(f"{where} cannot be read: {what}. Restore the file from where it was copied, or save again.")


class SlabBuffers:
    """Memory that each thread uses again for every slab: new memory costs more than reading into it.

    Args:
        count: How many slabs a thread needs at once.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._local = threading.local()

    def of_thread(self) -> list[NDArray[np.uint8]]:
        """The buffers of the calling thread, each of the size of a slab."""
        if not hasattr(self._local, "buffers"):
            self._local.buffers = [np.empty(SLAB_BYTES, np.uint8) for _ in range(self._count)]
        found: list[NDArray[np.uint8]] = self._local.buffers
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """Some bytes of a file: uncompressed, one after the other.

    Attributes:
        folder: Opens the file.
        name: Its name there.
        offset: The first byte.
        count: How many.
    """

    folder: Folder
    name: str
    offset: int
    count: int

    def after(self, count: int) -> Bytes:
        """The bytes without the first `count` ones."""
        return replace(self, offset=self.offset + count, count=max(0, self.count - count))

    def read(self, first: int, count: int, into: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        """`count` bytes from byte `first` on; in `into` if they fit there.

        Raises:
            CheckpointError: The file has ended.
        """
        inside = first >= 0 and count >= 0 and first + count <= self.count
        found = np.empty(0, np.uint8)
        if inside:
            found = self.folder.read_range(self.name, self.offset + first, count, into)
        if found.size != count or not inside:
            raise unreadable(
                self.folder.path(self.name),
                "it ends, or a part of it ends, before the bytes that are described",
            )
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """Bytes whose checksum a file knows.

    Attributes:
        content: The bytes.
        checksum: Their CRC-32.
    """

    content: Bytes
    checksum: int

    def holds(self) -> bool:
        """True if the bytes have this checksum. They are read in slabs.

        Raises:
            CheckpointError: The file has ended.
        """
        found = 0
        for first in range(0, self.content.count, SLAB_BYTES):
            slab = self.content.read(first, min(SLAB_BYTES, self.content.count - first))
            found = zlib.crc32(slab.data, found)
        return found == self.checksum


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the elements of a part lie.

    Attributes:
        content: The bytes, of the first element on.
        strides: Of its dims in elements; None if they are row-major.
        seal: Of the bytes that it lies in, if the file has checksums.
    """

    content: Bytes
    strides: tuple[int, ...] | None = None
    seal: Seal | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Some elements of a tensor.

    Attributes:
        offset: First index: one entry for each dim of a box, one entry for a flat range of elements.
        shape: Shape of the box; one entry for a flat range.
        find: Finds the place of the elements, when they are read.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    find: Callable[[], Place]

    def rows(self, first: int, end: int, dtype: str, into: NDArray[np.uint8] | None = None) -> Bits:
        """Rows of a box, counted in the box; elements of a flat range. Their bytes may be in `into`."""
        size, inner = ITEM_BYTES[dtype], prod(self.shape[1:])
        kind, place = bits_type(dtype), self.find()
        shape = (end - first, *self.shape[1:])
        inside = (size // kind.itemsize,) if kind.itemsize != size else ()
        if place.strides is None:
            found = place.content.read(first * inner * size, (end - first) * inner * size, into)
            return found.view(kind).reshape((*shape, *inside))
        if 0 in shape:
            return np.empty((*shape, *inside), kind)
        low = first * place.strides[0]
        span = 1 + sum((length - 1) * step for length, step in zip(shape, place.strides, strict=True))
        stored = place.content.read(low * size, span * size).view(kind)
        steps = [*(step * size for step in place.strides), *(kind.itemsize for _ in inside)]
        return np.lib.stride_tricks.as_strided(stored, (*shape, *inside), steps, writeable=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor that can be read, in slabs along its first dim.

    Attributes:
        name: Its name in the checkpoint.
        dtype: As torch spells it.
        shape: Its shape; a tensor without dims has one element.
        parts: Disjoint parts that together are all of it. Empty for a tensor in memory and for a summary.
        role: What it is of.
        memory: Slabs of a tensor in memory, by first and last row.
        summary: Its summary, if that is all there is.
        in_one: Whether it is one slab, because its elements are made of whole tensors.
        made_of: The tensors whose elements are its own, if it is put together in memory.
        held: Which elements of a sharded tensor it is, if it is what one rank holds; `shape` is then that of the part.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...] = ()
    role: Role = "parameter"
    memory: Callable[[int, int], Bits] | None = None
    summary: Any = None
    in_one: bool = False
    made_of: tuple[StoredTensor, ...] = ()
    held: Region | Shard | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of all elements."""
        return self.size * ITEM_BYTES[self.dtype]

    @property
    def is_readable(self) -> bool:
        """True if it has elements, and not only a summary."""
        return self.summary is None

    @property
    def rows(self) -> int:
        """Length of the first dim; 1 without dims."""
        return self.shape[0] if self.shape else 1

    @property
    def slabs(self) -> list[tuple[int, int]]:
        """First and last row (excluded) of each slab."""
        if self.in_one:
            return [(0, self.rows)] if self.size else []
        row_bytes = max(1, self.num_bytes // max(1, self.rows))
        step = max(1, SLAB_BYTES // row_bytes)
        return [(first, min(first + step, self.rows)) for first in range(0, self.rows, step)] if self.size else []

    def slab(self, first: int, end: int, into: NDArray[np.uint8] | None = None) -> Bits:
        """The rows from `first` to `end`, flat and contiguous.

        Args:
            first: The first row.
            end: The row after the last one.
            into: Bytes that may hold the result, which then lasts until they are used again.

        Raises:
            CheckpointError: A file has ended.
        """
        assert self.is_readable, "a summary has no elements"
        if self.memory is not None:
            return self.memory(first, end).reshape(-1)
        shape = self.shape or (1,)
        inner = prod(shape[1:])
        if len(self.parts) == 1 and self.parts[0].shape == shape:
            return np.ascontiguousarray(self.parts[0].rows(first, end, self.dtype, into)).reshape(-1)
        kind = bits_type(self.dtype)
        words = ITEM_BYTES[self.dtype] // kind.itemsize
        made = np.empty((end - first, *shape[1:], words), kind)
        flat = made.reshape(-1, words)
        for part in self.parts:
            if len(part.offset) == 1 and (len(shape) > 1 or not self.shape):  # a flat range
                begin, stop = part.offset[0], part.offset[0] + part.shape[0]
                low, high = max(begin, first * inner), min(stop, end * inner)
                if low < high:
                    found = part.rows(low - begin, high - begin, self.dtype)
                    flat[low - first * inner : high - first * inner] = found.reshape(-1, words)
                continue
            low, high = max(part.offset[0], first), min(part.offset[0] + part.shape[0], end)
            if low < high and 0 not in part.shape:
                box = (slice(low - first, high - first), *(
                    slice(begin, begin + length)
                    for begin, length in zip(part.offset[1:], part.shape[1:], strict=True)
                ))  # fmt: skip
                found = part.rows(low - part.offset[0], high - part.offset[0], self.dtype)
                made[box] = found.reshape((*found.shape[: len(shape)], words))
        return made.reshape(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What a path, a model or a state dict holds.

    Attributes:
        path: As the user gave it.
        kind: What it is, in words.
        tensors: By name, in the order of the checkpoint.
        notes: What a reader should know of it, sentences.
        adapter_scale: By what its adapters are to be multiplied, by the name of a weight and the rank of its adapter;
            None if it does not say.
    """

    path: str
    kind: str
    tensors: Mapping[str, StoredTensor]
    notes: tuple[str, ...] = field(default=())
    adapter_scale: Callable[[str, int], float | None] | None = None


def check_parts(where: str, tensor: StoredTensor) -> StoredTensor:
    """The tensor, after checking that its parts lie inside of it and are as many elements as it has.

    Raises:
        CheckpointError: A part is missing, is there twice, or lies outside.
    """
    shape = tensor.shape or (1,)
    held = 0
    for part in tensor.parts:
        limits = shape if len(part.offset) == len(shape) else (tensor.size,)
        pairs = zip(part.offset, part.shape, limits, strict=False)
        if len(part.offset) != len(limits) or any(
            first < 0 or length < 0 or first + length > limit for first, length, limit in pairs
        ):
            raise unreadable(where, f"a part of {quoted(tensor.name)} lies outside of its shape {list(tensor.shape)}")
        held += prod(part.shape)
    if held != tensor.size:
        raise unreadable(
            where,
            f"its parts of {quoted(tensor.name)} have {held} elements, and the tensor has {tensor.size} (shape "
            f"{list(tensor.shape)}): a shard is {'missing' if held < tensor.size else 'there twice'}",
        )
    return tensor
