"""Checks of the metadata of a record batch message, made before anything of it is decoded.

The metadata are a flatbuffer (Arrow's Message.fbs). They say where in the body each buffer lies, and a compressed
buffer begins with its decompressed size. An Arrow reader allocates as much memory as these sizes say. So the sizes are
added up here first.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from traindiff.core.summary import SUMMARY
from traindiff.storage.schema import SCHEMA, Malformed

CODEC: Final = "lz4"
"""Codec of the buffers of a message. It begins fast: most messages have 80 buffers, and they are small."""

MOST_MESSAGE_BYTES = 1 << 28
"""Size of a message at most."""

FREE_BYTES = 1 << 23
EXPANSION = 32
"""Decoded, a message or compressed bits may have `FREE_BYTES`, and `EXPANSION` times their own bytes."""

_CONTINUATION = b"\xff\xff\xff\xff"
_RECORD_BATCH = 3
_LZ4_FRAME = 0
_NOT_COMPRESSED = -1


def too_much(num_bytes: int, packed_bytes: int) -> bool:
    """True if data of this size may not be packed into so few bytes. Writers then leave them unpacked."""
    return num_bytes > FREE_BYTES + EXPANSION * packed_bytes


class Message(NamedTuple):
    """A record batch message whose metadata have been checked.

    Attributes:
        content: Its bytes.
        rows: Number of its rows.
        places: Where each of its buffers begins in it, and its size.
        decoded_bytes: Bytes of all columns when they are decoded.
    """

    content: bytes
    rows: int
    places: NDArray[np.int64]
    decoded_bytes: int


def checked(message: bytes) -> Message:
    """A record batch message, after a look at its metadata.

    Raises:
        Malformed: It is not such a message, or decoding it would read outside of it or take too much memory.
    """
    try:
        return _checked(message)
    except (struct.error, IndexError, OverflowError, ValueError) as error:
        raise Malformed(f"its metadata cannot be read ({error})") from None


def _checked(message: bytes) -> Message:
    if message[:4] != _CONTINUATION:
        raise Malformed("it does not begin as a message of an Arrow stream does")
    (length,) = struct.unpack_from("<i", message, 4)
    begin = 8 + length
    if not 0 < length <= len(message) - 8:
        raise Malformed(f"its metadata have {length} bytes, and the message has {len(message)}")
    head = _Table.root(message[8:begin])
    if head.number(1, "<B") != _RECORD_BATCH:
        raise Malformed("it is no record batch")
    body = memoryview(message)[begin:]
    if (said := head.number(3, "<q")) != len(body):
        raise Malformed(f"its body has {len(body)} bytes, and its metadata say {said}")
    batch = head.table(2)
    if batch is None:
        raise Malformed("it is an empty record batch")
    rows, buffers = batch.number(0, "<q"), batch.pairs(2)
    num_bytes = _decoded_bytes(batch, buffers, body)
    if not 0 < rows * SUMMARY.itemsize <= num_bytes:
        raise Malformed(f"it has {rows} rows, and its columns hold {num_bytes} bytes")
    if too_much(num_bytes, len(message)):
        raise Malformed(f"its {len(message)} bytes hold {num_bytes} bytes, more than they may ({_RULE})")
    return Message(message, rows, buffers + np.array([begin, 0]), num_bytes)


def _decoded_bytes(batch: _Table, buffers: NDArray[np.int64], body: memoryview) -> int:
    """Size of all buffers when they are decoded."""
    compression, nodes = batch.table(3), batch.pairs(1)
    if compression is not None and compression.number(0, "<b") != _LZ4_FRAME:
        raise Malformed("its buffers are compressed, and not with LZ4")
    if (len(nodes), len(buffers)) != (_NUM_NODES, _NUM_BUFFERS):
        raise Malformed(f"it has {len(buffers)} buffers of {len(nodes)} columns, not {_NUM_BUFFERS} of {_NUM_NODES}")
    if nodes[:, 1].any():
        raise Malformed("a column has nulls")
    if compression is not None and (sizes := _packed_sizes(body, buffers)) is not None:
        return sizes
    return sum(_decoded(body, *buffer, compressed=compression is not None) for buffer in buffers.tolist())


def _packed_sizes(body: memoryview, buffers: NDArray[np.int64]) -> int | None:
    """Size of all compressed buffers when they are decoded; None if one of them is to be looked at by itself."""
    offsets, lengths = buffers[buffers[:, 1] != 0].T
    if not ((offsets >= 0) & (lengths >= 8) & (lengths <= len(body)) & (offsets <= len(body) - lengths)).all():
        return None
    sizes = np.frombuffer(body, np.uint8)[offsets[:, None] + np.arange(8)].view("<i8")[:, 0]
    if (sizes < _NOT_COMPRESSED).any():
        return None
    found: list[int] = np.where(sizes == _NOT_COMPRESSED, lengths - 8, sizes).tolist()
    return sum(found)


_RULE = f"{FREE_BYTES}, and {EXPANSION} times their number"


def _decoded(body: memoryview, offset: int, length: int, *, compressed: bool) -> int:
    """Size of a buffer when it is decoded."""
    if not 0 <= offset <= offset + length <= len(body):
        raise Malformed(f"a buffer at {offset} with {length} bytes lies outside of its body, which has {len(body)}")
    if not compressed or not length:
        return length
    (size,) = struct.unpack_from("<q", body[offset : offset + length])
    if size == _NOT_COMPRESSED:
        return length - 8
    if size < 0:
        raise Malformed(f"a buffer has {size} bytes")
    return int(size)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """A table of a flatbuffer, whose fields are looked up by number. Nothing outside the buffer is read."""

    data: bytes
    place: int

    @classmethod
    def root(cls, data: bytes) -> _Table:
        return cls(data=data, place=_unpacked("<I", data, 0))

    def number(self, field: int, form: str) -> int:
        """The number in a field; 0 if the field is left out."""
        where = self._where(field)
        return 0 if where is None else _unpacked(form, self.data, where)

    def table(self, field: int) -> _Table | None:
        """The table that a field refers to."""
        where = self._where(field)
        return None if where is None else _Table(data=self.data, place=where + _unpacked("<I", self.data, where))

    def pairs(self, field: int) -> NDArray[np.int64]:
        """A vector of structures of two 64-bit integers."""
        where = self._where(field)
        if where is None:
            return np.empty((0, 2), np.int64)
        where += _unpacked("<I", self.data, where)
        count = _unpacked("<I", self.data, where)
        if where + 4 + 16 * count > len(self.data):
            raise Malformed(f"a list of {count} items goes beyond its metadata")
        return np.frombuffer(self.data, "<i8", 2 * count, where + 4).reshape(-1, 2)

    def _where(self, field: int) -> int | None:
        """Position of a field; None if it is left out."""
        fields = self.place - _unpacked("<i", self.data, self.place)
        size, entry = _unpacked("<H", self.data, fields), 4 + 2 * field
        if entry + 2 > size or not (offset := _unpacked("<H", self.data, fields + entry)):
            return None
        return self.place + offset


def _unpacked(form: str, data: bytes, place: int) -> int:
    if place < 0:  # struct would count it from the end
        raise Malformed(f"its metadata refer to the place {place}")
    return int(struct.unpack_from(form, data, place)[0])


def _layout() -> list[tuple[int, int]]:
    """By column of the format: number of nodes (one more for the inner column of a list) and number of buffers."""
    found = []
    for kind in SCHEMA.types:
        fixed, any_length = pa.types.is_fixed_size_list(kind), pa.types.is_list(kind)
        nodes = 2 if fixed or any_length else 1
        found.append((nodes, 4 if any_length else 3 if fixed or pa.types.is_string(kind) else 2))
    return found


LAYOUT = _layout()
_NUM_NODES, _NUM_BUFFERS = (sum(numbers) for numbers in zip(*LAYOUT, strict=True))
