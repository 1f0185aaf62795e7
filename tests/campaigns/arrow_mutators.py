"""Record batches with other columns, and messages with other numbers in them."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from random import Random
from typing import Any

import pyarrow as pa

from tests.campaigns import arrow_messages
from tests.campaigns.byte_mutators import INTERESTING, mangled
from tests.campaigns.drafts import Stream
from traindiff.storage.schema import SCHEMA

_TEXTS = (
    "", "a", "grad", "forward", "param", "optimizer", "update", "batch", "loss", "loss_scale", "value", "before",
    "operator",
    "boundary", "sample", "evaluation", "micro", "clipped", "(all parameters)", "norm", "squared_norm", "max_norm",
    "skipped",
    "traindiff", "rng", "cpu", "fc", "fc.weight", "optimizer.groups[0]", "optimizer.groups[99]", "stage[0]", "stage[x]",
    "lr", "mean", "sum", "shard", "float32", "bfloat16", "int64", "bool", "complex64", "float8_e4m3fn", "nonsense",
    "\0",
    "\x1b[31m", "\u202e", "\U0010ffff", "=1+1", "x" * 3000, "residual", "taken", "replayed", "rounding", "variant[x]",
    "SGD", "NAME(AdamW)", "/etc/passwd", "../../../../outside/secret", "../../../../../outside/secret",
    "../../run.json", "tensors", "tensors/", ".", "fc/x[0]",
    "fc/aten.mm[0]", "(root)/aten.mm[9999999999]", "output[0]", "output[", "input[0][1]", "../rank-00001/rank.json",
    "tensors/\0", "tensors/" + "a" * 300, "//", "https://localhost:9/x", "file:///etc/passwd", "again[1]", "again[x]",
    "recomputed", "reduced", "unscaled", "logged", "backward", "after", "grad.grad", "\ufffd", "exp_avg",
    "exp_avg_sq", "step",
    "momentum_buffer", "master", "betas[0]", "eps", "weight_decay",
)  # fmt: skip
_INTS = (0, 1, -1, 2, 3, 7, 255, 1 << 24, (1 << 24) * 5, 2**31 - 1, -(2**31), 2**40, 2**53, 2**62, 2**63 - 1, -(2**63))
_FLOATS = (
    0.0, -0.0, 1.0, -1.0, float("nan"), float("inf"), float("-inf"), 1e308, -1e308, 5e-324, 1e-300, 1e38, 0.5,
    2.0**-24, 1e19,
)  # fmt: skip
_LISTS: tuple[list[int], ...] = (
    [], [0], [1], [-1], [2, 2], [2, 3], [3, 2], [4, 3], [-1, 3], [-1, -1], [0, 0], [2**31], [2**62, 4], [2**62] * 20,
    [1] * 64,
    [1] * 5000, [-5], [-(2**63)], [2**63 - 1], [2**32, 2**31], [12], [1000, 1000, 1000], [2, 4],
)  # fmt: skip


@cache
def _types() -> tuple[pa.DataType, ...]:
    return (
        pa.int8(), pa.int32(), pa.int64(), pa.uint64(), pa.float32(), pa.float64(), pa.utf8(), pa.large_utf8(),
        pa.binary(),
        pa.bool_(), pa.null(), pa.list_(pa.int32()), pa.list_(pa.utf8()), pa.list_(pa.list_(pa.int64())),
        pa.list_(pa.int64(), 3), pa.list_(pa.float64(), 0), pa.dictionary(pa.int8(), pa.utf8()), pa.decimal128(5),
        pa.struct([pa.field("a", pa.int8())]), pa.timestamp("ns"), pa.large_list(pa.int64()),
    )  # fmt: skip


@lru_cache(maxsize=64)
def _batch(message: bytes) -> pa.RecordBatch:
    return pa.ipc.read_record_batch(pa.py_buffer(message), SCHEMA)


@cache
def _schema_message() -> bytes:
    return bytes(SCHEMA.serialize().to_pybytes())


def _message(batch: pa.RecordBatch, *, codec: str | None = None, **options: Any) -> bytes:
    """The batch as one message, or as several where dictionaries come first."""
    sink = io.BytesIO()
    writer = pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression=codec, **options))
    writer.write_batch(batch)
    data = sink.getvalue()
    return data[8 + struct.unpack_from("<i", data, 4)[0] :]


def _value(kind: pa.DataType, rng: Random) -> Any:
    if pa.types.is_string(kind):
        return rng.choice(_TEXTS)
    if pa.types.is_boolean(kind):
        return rng.random() < 0.5
    if pa.types.is_floating(kind):
        return rng.choice(_FLOATS)
    if pa.types.is_integer(kind):
        value = rng.choice(_INTS)
        bits = kind.bit_width
        if pa.types.is_unsigned_integer(kind):
            return value % (1 << bits)
        return max(-(1 << bits - 1), min(value, (1 << bits - 1) - 1))
    if pa.types.is_fixed_size_list(kind):
        return [_value(kind.value_type, rng) for _ in range(kind.list_size)]
    return list(rng.choice(_LISTS))


def _with_column(batch: pa.RecordBatch, number: int, column: pa.Array) -> pa.RecordBatch:
    columns = list(batch.columns)
    columns[number] = column
    fields = [pa.field(one.name, column.type if at == number else one.type) for at, one in enumerate(SCHEMA)]
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))


def _values_changed(stream: Stream, at: int, rng: Random) -> None:
    """Right types, other values: in a row or in all of them."""
    batch = _batch(stream.messages[at])
    for _ in range(rng.choice((1, 1, 2, 3, 6))):
        number = rng.randrange(len(SCHEMA) - 2 if rng.random() < 0.8 else len(SCHEMA))
        if rng.random() < 0.6:
            number = rng.randrange(20)  # what says of which tensor the numbers are
        kind = SCHEMA.field(number).type
        values = batch.column(number).to_pylist()
        if not values:
            continue
        if rng.random() < 0.5:
            values[rng.randrange(len(values))] = _value(kind, rng)
        else:
            values = [_value(kind, rng)] * len(values)
        batch = _with_column(batch, number, pa.array(values, kind))
    stream.messages[at] = _message(batch)


_SITES = (
    ("batch", "", "", "input[0]"), ("batch", "sample", "", "input[0]"), ("batch", "before", "rng", "cpu"),
    ("batch", "", "traindiff", "optimizer"), ("forward", "", "fc", "output[0]"), ("forward", "evaluation", "fc",
    "output[0]"),
    ("forward", "recomputed", "fc", "output[0]"), ("forward", "boundary", "stage[1]", "received[0]"),
    ("forward", "operator", "fc/aten.addmm[0]", "output[0]"), ("backward", "operator", "fc/aten.mm[0]", "input[0]"),
    ("backward", "again[1]", "fc", "output[0]"), ("loss", "", "loss", "backward"), ("loss", "", "loss_scale", "value"),
    ("loss", "", "loss", "logged"), ("backward", "", "fc", "output[0]"), ("grad", "", "fc.weight", "grad"),
    ("grad", "micro", "fc.weight", "grad"), ("grad", "reduced", "fc.weight", "grad"), ("grad", "unscaled",
    "fc.weight", "grad"),
    ("grad", "clipped", "(all parameters)", "norm"), ("grad", "clipped", "(all parameters)", "max_norm"),
    ("grad", "clipped", "(all parameters)", "squared_norm"), ("grad", "clipped", "(all parameters)", "max_value"),
    ("optimizer", "", "optimizer.groups[0]", "lr"), ("optimizer", "", "optimizer.groups[1]", "weight_decay"),
    ("optimizer", "", "optimizer.groups[7]", "betas[0]"), ("optimizer", "", "optimizer", "skipped"),
    ("optimizer", "", "fc.weight", "exp_avg"), ("optimizer", "", "fc.weight", "exp_avg_sq"), ("optimizer", "",
    "fc.weight", "step"),
    ("update", "residual", "fc.weight", "SGD"), ("update", "replayed", "fc.weight", "SGD"), ("update", "taken",
    "fc.weight", "SGD"),
    ("update", "rounding", "fc.weight", "SGD"), ("update", "variant[x]", "fc.weight", "NAME(AdamW)"),
    ("param", "before", "fc.weight", "value"), ("param", "", "fc.weight", "value"), ("param", "", "fc.weight",
    "master"),
    ("param", "", "out.weight", "value"), ("update", "", "fc.weight", "value"),
)  # fmt: skip
_DTYPES = (
    "float32",
    "float64",
    "bfloat16",
    "float16",
    "int64",
    "int32",
    "uint8",
    "bool",
    "complex64",
    "float8_e4m3fn",
    "",
    "x",
)
_SHAPES: tuple[list[int], ...] = (
    [], [0], [1], [4], [12], [4, 3], [2, 4], [0, 3], [1, 1, 1], [1] * 8, [2**31, 3], [2**20, 2**20], [2**40], [3,
    2**58],
)  # fmt: skip


def _sites(stream: Stream, at: int, rng: Random) -> None:
    """Rows that say of themselves that they are something else, and are right in all other ways: what they mean is
    odd."""
    batch = _batch(stream.messages[at])
    columns = {field.name: column.to_pylist() for field, column in zip(SCHEMA, batch.columns, strict=True)}
    step = rng.choice((None, None, None, 0, 5, 2**40))
    for row in range(batch.num_rows):
        if rng.random() < 0.5:
            continue
        names = ("phase", "stage", "path", "slot")
        for name, value in zip(names, rng.choice(_SITES), strict=True):
            columns[name][row] = value
        for name, values in (
            ("micro_step", (0, 1, 2, 2**31 - 1)), ("call", (0, 1, 3, 2**31 - 1)), ("dtype", _DTYPES), ("term", (0, 1,
            2**31 - 1)),
            ("merge", ("shard", "sum", "mean")), ("scaled", (True, False)), ("weight", (1.0, 0.0, 3.0, 1e308, 5e-324)),
            ("factor", (1.0, 2.0, 0.5, 1e308, 5e-324)), ("order", (0, 1, 2, 1 << 24, 7 << 24, 2**62)),
            ("unobserved", ("", "", "no gradient", "no output was observed", "the grad tap failed: x",
            "this is no full replica: x")),
        ):  # fmt: skip
            if rng.random() < 0.3:
                columns[name][row] = rng.choice(values)
        if rng.random() < 0.4:
            _reshaped(columns, row, rng)
    if step is not None:
        columns["step"] = [step] * batch.num_rows
    stream.messages[at] = _message(pa.RecordBatch.from_pydict(columns, schema=SCHEMA))


def _reshaped(columns: dict[str, list[Any]], row: int, rng: Random) -> None:
    """Another shape, and a summary that fits it."""
    shape = rng.choice(_SHAPES)
    whole = rng.choice((shape, [-1, *shape[1:]] if shape else shape, [2 * one for one in shape], [6, 6], [*shape, 2]))
    columns["shape"][row], columns["global_shape"][row] = shape, whole
    columns["offset"][row] = rng.choice(([0] * len(whole), [0], [1] * len(whole)))
    columns["spacing"][row] = rng.choice(([], [], [1, 2]))
    count = 1
    for length in shape:
        count *= length
    for name in ("nan", "positive_infinity", "negative_infinity", "zero", "negative", "subnormal"):
        columns[name][row] = 0
    columns["count"][row] = count
    columns["exponents"][row] = []
    for name in rng.sample(("nan", "positive_infinity", "zero", "negative"), rng.choice((0, 0, 1))):
        columns[name][row] = count
    if rng.random() < 0.5:
        value = rng.choice((0.0, 1.0, 1e308, 5e-324, 1e-40, 65504.0, 3.4e38))
        columns["minimum"][row], columns["maximum"][row], columns["smallest"][row] = -value, value, value or 1.0
        columns["sum"][row], columns["sum_of_squares"][row] = rng.choice((0.0, value)), min(value * value, 1e308)
        columns["sketch"][row] = [rng.choice((0.0, value, -value))] * 64
        for name in ("row_largest", "column_largest", "row_squares", "column_squares"):
            columns[name][row] = [rng.choice((0.0, value))] * 16


def _nulls(stream: Stream, at: int, rng: Random) -> None:
    """Nulls in a column that has none."""
    batch = _batch(stream.messages[at])
    number = rng.randrange(len(SCHEMA))
    kind = SCHEMA.field(number).type
    values = [one if rng.random() < 0.5 else None for one in batch.column(number).to_pylist()]
    stream.messages[at] = _message(_with_column(batch, number, pa.array(values, kind)))


def _other_type(stream: Stream, at: int, rng: Random) -> None:
    """A column of another type, in the batch alone or in the schema too."""
    batch = _batch(stream.messages[at])
    number = rng.randrange(len(SCHEMA))
    kind = rng.choice(_types())
    column = pa.nulls(batch.num_rows, kind)
    changed = _with_column(batch, number, column)
    stream.messages[at] = _message(changed)
    if rng.random() < 0.5:
        stream.messages[0] = changed.schema.serialize().to_pybytes()


def _columns_moved(stream: Stream, at: int, rng: Random) -> None:
    """Columns left out, doubled or in another order."""
    batch = _batch(stream.messages[at])
    order = list(range(len(SCHEMA)))
    change = rng.randrange(3)
    if change == 0:
        del order[rng.randrange(len(order))]
    elif change == 1:
        order.insert(rng.randrange(len(order)), rng.choice(order))
    else:
        rng.shuffle(order)
    changed = pa.RecordBatch.from_arrays(
        [batch.column(number) for number in order], schema=pa.schema([SCHEMA.field(number) for number in order])
    )
    stream.messages[at] = _message(changed)
    if rng.random() < 0.5:
        stream.messages[0] = changed.schema.serialize().to_pybytes()


def _rows(stream: Stream, at: int, rng: Random) -> None:
    """No rows, some, one of them many times, or those of another message too."""
    batch = _batch(stream.messages[at])
    change = rng.randrange(5)
    if change == 0:
        changed = batch.slice(0, 0)
    elif change == 1:
        changed = batch.take(pa.array([rng.randrange(batch.num_rows)] * rng.choice((2, 50, 3000))))
    elif change == 2:
        order = list(range(batch.num_rows))
        rng.shuffle(order)
        changed = batch.take(pa.array(order[: rng.randrange(1, len(order) + 1)]))
    else:
        others = [one for one in stream.messages[1:] if len(one) > 8]
        tables = [pa.Table.from_batches([batch])] + [pa.Table.from_batches([_batch(rng.choice(others))])] * (change - 2)
        changed = pa.concat_tables(tables).combine_chunks().to_batches()[0]
    stream.messages[at] = _message(changed)


def _huge_text(stream: Stream, at: int, rng: Random) -> None:
    """Names of a megabyte; compressed, they take nothing."""
    batch = _batch(stream.messages[at])
    texts = [number for number, one in enumerate(SCHEMA) if pa.types.is_string(one.type)]
    length = rng.choice((100_000, 1_000_000, 5_000_000))
    text = rng.choice(("a", "\u202e", "a.", "[", "/", "é")) * length
    column = pa.array([text[: length // 2] + str(row) for row in range(batch.num_rows)], pa.utf8())
    stream.messages[at] = _message(_with_column(batch, rng.choice(texts), column))


def _messages_moved(stream: Stream, at: int, rng: Random) -> None:
    """Messages doubled, in another order, left out; schemas and ends in the middle; one that is none."""
    end = b"\xff\xff\xff\xff\0\0\0\0"
    change = rng.randrange(7)
    if change == 0:
        stream.messages.insert(rng.randrange(len(stream.messages) + 1), stream.messages[at])
    elif change == 1:
        rng.shuffle(stream.messages)
    elif change == 2:
        del stream.messages[rng.randrange(len(stream.messages))]
    elif change == 3:
        stream.messages.insert(at, _schema_message())
    elif change == 4:
        stream.messages.insert(rng.randrange(len(stream.messages)), end)
    elif change == 5:
        stream.messages.insert(
            at, rng.choice((b"", b"\0" * 8, end * 2, rng.randbytes(100), b"\xff\xff\xff\xff\xff\xff\xff\x7f", b"a"))
        )
    else:
        stream.messages[at] = stream.messages[at] + rng.choice((stream.messages[at], b"\0" * 64, rng.randbytes(9)))


def _metadata(stream: Stream, at: int, rng: Random) -> None:
    """Bytes of the flatbuffer, whose checksum is then computed anew."""
    data = stream.messages[rng.randrange(len(stream.messages)) if rng.random() < 0.2 else at]
    length = min(len(data), 8 + abs(struct.unpack_from("<i", data, 4)[0])) if len(data) >= 8 else len(data)
    stream.messages[at] = mangled(data[:length], rng) + data[length:]


def _body(stream: Stream, at: int, rng: Random) -> None:
    """Bytes of the buffers, compressed ones too."""
    data = stream.messages[at]
    if rng.random() < 0.5:
        data = _message(_batch(data), codec=None)
    length = 8 + struct.unpack_from("<i", data, 4)[0]
    stream.messages[at] = data[:length] + mangled(data[length:], rng)


def _numbers(stream: Stream, at: int, rng: Random) -> None:
    """Lengths of the batch, of its nodes and of its body, places and lengths of buffers, the codec."""
    codec = rng.choice((None, "lz4"))
    message = arrow_messages.parsed(_message(_batch(stream.messages[at]), codec=codec))
    for _ in range(rng.choice((1, 1, 2, 5))):
        extreme = rng.choice((*_INTS, 4, 5, 8, 16, 100, 1000, len(message.body), len(message.body) + 8))
        if message.codec is not None and rng.random() < 0.1:
            message.metadata[message.codec] = rng.choice((0, 1, 2, 255))
        elif rng.random() < 0.5:
            struct.pack_into("<q", message.metadata, rng.choice(message.lengths), extreme)
        else:
            struct.pack_into("<q", message.metadata, rng.choice(message.buffers) + rng.choice((0, 8)), extreme)
    stream.messages[at] = message.data()


def _buffers(stream: Stream, at: int, rng: Random) -> None:
    """The content of a buffer: offsets that decrease or lead out of it, texts that are no UTF-8, bits and numbers."""
    message = arrow_messages.parsed(_message(_batch(stream.messages[at]), codec=None))
    filled = [number for number in range(len(message.buffers)) if message.buffer(number)[1]]
    for _ in range(rng.choice((1, 1, 2))):
        offset, length = message.buffer(rng.choice(filled))
        if rng.random() < 0.3:
            message.body[offset : offset + length] = mangled(bytes(message.body[offset : offset + length]), rng)[
                :length
            ].ljust(length, b"\0")
            continue
        place = offset + rng.randrange(max(1, length)) // 4 * 4
        what = rng.choice(
            (*INTERESTING, b"\xed\xa0\x80", b"\xff\xfe", struct.pack("<i", rng.choice((1, 5, -5, 10**6))))
        )
        message.body[place : place + len(what)] = what[: max(0, len(message.body) - place)]
    stream.messages[at] = message.data()


def _compression(stream: Stream, at: int, rng: Random) -> None:
    """Compressed buffers that lie about their length, or become very long."""
    message = arrow_messages.parsed(_message(_batch(stream.messages[at]), codec="lz4"))
    number = rng.randrange(len(message.buffers))
    change = rng.randrange(4)
    if change == 0:
        filled = [one for one in range(len(message.buffers)) if message.buffer(one)[1]]
        offset, _ = message.buffer(rng.choice(filled))
        struct.pack_into("<q", message.body, offset, rng.choice((*_INTS, -2, 2**36, 2**33)))
    elif change == 1:
        length = rng.choice((1 << 20, 1 << 26, 1 << 28))
        message.set_buffer(number, struct.pack("<q", rng.choice((length, length, 8, 1 << 40))) + _bomb(length, "lz4"))
    elif change == 2:
        message.set_buffer(number, struct.pack("<q", rng.choice(_INTS)) + rng.randbytes(rng.choice((0, 4, 50))))
    else:
        message.set_buffer(number, rng.randbytes(rng.choice((0, 1, 7, 8))))
    stream.messages[at] = message.data()


@cache
def _bomb(length: int, codec: str) -> bytes:
    return bytes(pa.compress(bytes(length), codec=codec, asbytes=True))


def _other_writer(stream: Stream, at: int, rng: Random) -> None:
    """The same batch as other writers would have it, and as none may: zstd, other alignments, older metadata."""
    version = rng.choice((pa.ipc.MetadataVersion.V4, pa.ipc.MetadataVersion.V5))
    codec = rng.choice((None, "lz4", "zstd")) if version == pa.ipc.MetadataVersion.V5 else None
    stream.messages[at] = _message(_batch(stream.messages[at]), codec=codec, metadata_version=version)
    if rng.random() < 0.3:
        schema = SCHEMA.with_metadata({"a": "b" * rng.choice((1, 100_000))})
        stream.messages[0] = schema.serialize().to_pybytes()


ARROW: Mapping[str, tuple[float, Callable[[Stream, int, Random], None]]] = {
    "values": (10, _values_changed), "sites": (12, _sites), "nulls": (1, _nulls), "type": (2, _other_type),
    "columns": (1, _columns_moved),
    "rows": (2, _rows), "huge text": (0.2, _huge_text), "messages": (2, _messages_moved), "metadata": (4, _metadata),
    "body": (3, _body), "numbers": (4, _numbers), "buffers": (5, _buffers), "compression": (3, _compression),
    "writer": (1, _other_writer),
}  # fmt: skip
"""Weight and mutator by name; each changes the message at a place of the stream."""


def mutate(stream: Stream, name: str, rng: Random) -> None:
    """Change a message that holds a step.

    Raises:
        ValueError: The stream has none, or one was changed already: what may be damaged is not read again here.
    """
    if stream.changed:
        raise ValueError("changed")
    places = [number for number, one in enumerate(stream.messages) if number and len(one) > 8]
    if not places:
        raise ValueError("no step")
    stream.seals, stream.changed = None, True
    ARROW[name][1](stream, rng.choice(places), rng)


def rename_file(stream: Stream, old: str, new: str) -> None:
    """Have the messages name a file of tensors otherwise; they stay as they are where one was changed already."""
    if stream.changed:
        return
    number = SCHEMA.get_field_index("tensors")
    for at, message in enumerate(stream.messages):
        if at and len(message) > 8:
            names = _batch(message).column(number).to_pylist()
            if old in names:
                column = pa.array([new if name == old else name for name in names], pa.utf8())
                stream.messages[at] = _message(_with_column(_batch(message), number, column))
                stream.seals = None


def zstd_frame(length: int) -> bytes:
    """A zstd frame of as many zeros."""
    return _bomb(length, "zstd")
