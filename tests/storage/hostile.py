"""Recordings of somebody who wants to harm: changed, and then sealed again, so that every checksum is right."""

from __future__ import annotations

import io
import json
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from traindiff.storage import manifest
from traindiff.storage.location import DATA, SEALS
from traindiff.storage.schema import SCHEMA
from traindiff.storage.writer import seal


def messages_of(rank: Path) -> list[bytes]:
    """The messages of a rank's stream: the schema, one for each step, and the end of the stream."""
    data = (rank / DATA).read_bytes()
    seals = [line.split() for line in (rank / SEALS).read_text().splitlines()]
    return [data[int(offset) : int(offset) + int(length)] for offset, length, _ in seals]


def put_messages(rank: Path, messages: Sequence[bytes]) -> None:
    """Write a rank's stream, with right seals."""
    (rank / DATA).write_bytes(b"".join(messages))
    seals, offset = [], 0
    for message in messages:
        seals.append(seal(offset, message))
        offset += len(message)
    (rank / SEALS).write_bytes(b"".join(seals))


def put_message(rank: Path, number: int, message: bytes) -> None:
    """Replace one message of a rank's stream."""
    messages = messages_of(rank)
    messages[number] = message
    put_messages(rank, messages)


def encoded(batch: pa.RecordBatch, *, compression: str | None = None) -> bytes:
    """The message of a record batch."""
    file = io.BytesIO()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(file, batch.schema, options=options) as stream:
        stream.write_batch(batch)
        end = file.tell()
    return file.getvalue()[len(batch.schema.serialize().to_pybytes()) : end]


def batch_of(message: bytes) -> pa.RecordBatch:
    """The record batch in a message of a step."""
    return pa.ipc.read_record_batch(pa.py_buffer(message), SCHEMA)


def change_columns(rank: Path, number: int = 1, **columns: Sequence[Any]) -> None:
    """Replace columns of one message of a rank's stream."""
    batch = batch_of(messages_of(rank)[number])
    arrays = [
        pa.array(columns[field.name], field.type) if field.name in columns else batch.column(field.name)
        for field in SCHEMA
    ]
    put_message(rank, number, encoded(pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)))


def change_buffer(rank: Path, column: str, buffer: int, change: Callable[[bytearray], None], number: int = 1) -> None:
    """Change the bytes of one buffer of a column (0: validity, 1: numbers or offsets, 2: text)."""
    batch = batch_of(messages_of(rank)[number])
    message = bytearray(encoded(batch))
    content = batch.column(column).buffers()[buffer].to_pybytes()
    at = message.index(content)
    assert message.count(content) == 1, "the buffer is not told apart by its content"
    changed = bytearray(content)
    change(changed)
    message[at : at + len(content)] = changed
    put_message(rank, number, bytes(message))


def compressed_buffers(message: bytes) -> Iterator[int]:
    """Where in a message each compressed buffer begins: with its size when it is decoded."""
    at = -1
    while (at := message.find(b"\x04\x22\x4d\x18", at + 1)) >= 0:  # the magic number of LZ4 frames
        yield at - 8


def change_json(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change `run.json` or `rank.json`, with a right checksum."""
    content = json.loads(file.read_bytes())
    del content["checksum"]
    change(content)
    file.write_bytes(manifest.dump(content))


def put_tensor_file(rank: Path, name: str, content: bytes) -> str:
    """Write a file with tensors in place of another, under a name with the right checksum; gives the name."""
    (rank / name).unlink()
    renamed = f"{name.rsplit('.', 2)[0]}.{zlib.crc32(content):08x}.safetensors"
    (rank / renamed).write_bytes(content)
    return renamed


def safetensors(header: object, content: bytes = b"") -> bytes:
    """A safetensors file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content
