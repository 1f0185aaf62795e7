"""The flatbuffer of an Arrow IPC message, as far as mutants change numbers in it.

The layout is Arrow's (format/Message.fbs): a message is `ffffffff`, the length of the metadata, the metadata,
and the body.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

_MARK = b"\xff\xff\xff\xff"


@dataclass(slots=True)
class Message:
    """A message taken apart; places are offsets in `metadata` of numbers that may be overwritten.

    Attributes:
        metadata: The flatbuffer.
        body: The buffers.
        lengths: Places of int64 numbers that say how long something is: rows, nodes, the body.
        buffers: Place of each buffer's (offset, length), two int64.
        codec: Place of the byte that names the compression; None without one.
    """

    metadata: bytearray
    body: bytearray
    lengths: list[int]
    buffers: list[int]
    codec: int | None

    def data(self) -> bytes:
        """Put it together."""
        return _MARK + struct.pack("<i", len(self.metadata)) + bytes(self.metadata) + bytes(self.body)

    def buffer(self, number: int) -> tuple[int, int]:
        """Offset and length of a buffer in the body."""
        offset, length = struct.unpack_from("<qq", self.metadata, self.buffers[number])
        return offset, length

    def set_buffer(self, number: int, content: bytes) -> None:
        """Put another content at the end of the body and point the buffer to it."""
        self.body += b"\0" * (-len(self.body) % 8)
        struct.pack_into("<qq", self.metadata, self.buffers[number], len(self.body), len(content))
        self.body += content + b"\0" * (-len(content) % 8)
        struct.pack_into("<q", self.metadata, self.lengths[0], len(self.body))


def parsed(data: bytes) -> Message:
    """Take a message with a record batch apart.

    Raises:
        ValueError: It is another one.
    """
    if data[:4] != _MARK:
        raise ValueError("no message")
    (length,) = struct.unpack_from("<i", data, 4)
    metadata, body = bytearray(data[8 : 8 + length]), bytearray(data[8 + length :])
    (root,) = struct.unpack_from("<I", metadata, 0)
    fields = _fields(metadata, root)
    if metadata[fields[1]] != 3:
        raise ValueError("no record batch")
    batch = fields[2] + struct.unpack_from("<I", metadata, fields[2])[0]
    inner = _fields(metadata, batch)
    lengths = [fields[3], *([inner[0]] if 0 in inner else [])]
    nodes = _vector(metadata, inner[1], 16)
    lengths += [place + part for place in nodes for part in (0, 8)]
    buffers = _vector(metadata, inner[2], 16)
    codec = None
    if 3 in inner:
        compression = inner[3] + struct.unpack_from("<I", metadata, inner[3])[0]
        codec = _fields(metadata, compression).get(0)
    return Message(metadata, body, lengths, buffers, codec)


def _fields(data: bytearray, table: int) -> dict[int, int]:
    """Places of the fields of a table, by number."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    (size,) = struct.unpack_from("<H", data, vtable)
    offsets = struct.unpack_from(f"<{size // 2 - 2}H", data, vtable + 4)
    return {number: table + offset for number, offset in enumerate(offsets) if offset}


def _vector(data: bytearray, field: int, size: int) -> list[int]:
    """Places of the structures of a vector."""
    start = field + struct.unpack_from("<I", data, field)[0]
    (count,) = struct.unpack_from("<I", data, start)
    return [start + 4 + size * number for number in range(count)]
