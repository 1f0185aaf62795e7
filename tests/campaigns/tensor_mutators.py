"""Files of tensors: safetensors with other headers, and with frames that become too long; `.npy` with other headers."""

from __future__ import annotations

import json
import struct
from random import Random

from tests.campaigns import json_mutators
from tests.campaigns.arrow_mutators import zstd_frame
from tests.campaigns.byte_mutators import mangled

_DTYPES = (
    "F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I64", "I32", "I8", "U64", "U8", "BOOL", "C64", "F4", "E8M0",
    "x", "",
)  # fmt: skip
_SHAPES = (
    [], [0], [1], [-1], [2, 3], [4, 3], [12], [2**62], [2**32, 2**32], [2**63], [0, 2**62], [1] * 100, [1.5], ["a"],
    None, 3,
    [10**13],
)  # fmt: skip


def mutated_safetensors(data: bytes, rng: Random) -> bytes:
    """The file with another header, other bytes, or other frames."""
    if len(data) < 8:
        return mangled(data, rng)
    (length,) = struct.unpack_from("<Q", data)
    try:
        header = json.loads(data[8 : 8 + length])
    except ValueError:
        return mangled(data, rng)
    content = data[8 + length :]
    names = [name for name in header if name != "__metadata__"]
    change = rng.randrange(8)
    if change == 0 or not names:
        return mangled(data, rng)
    name = rng.choice(names)
    if change == 1:
        return struct.pack("<Q", rng.choice((0, 1, 2**31, 2**40, 2**62, 2**64 - 1, length + 8, len(data)))) + data[8:]
    if change == 2:
        header[name]["dtype"] = rng.choice(_DTYPES)
    elif change == 3:
        header[name]["shape"] = rng.choice(_SHAPES)
    elif change == 4:
        begin, end = header[name]["data_offsets"]
        header[name]["data_offsets"] = rng.choice(
            (
                [end, begin],
                [begin, end + 8],
                [0, 0],
                [begin, 2**62],
                [-8, end],
                [begin],
                [begin, end - 1],
                [2**62, 2**62],
                "x",
            )
        )
    elif change == 5:
        header[
            rng.choice(
                (
                    "value",
                    "positive",
                    "signless",
                    "nan",
                    "intervals",
                    "md5",
                    "nan.zstd",
                    "x.zstd",
                    "0",
                    "-1",
                    "99",
                    "x",
                    "\x1b[2J",
                )
            )
        ] = header.pop(name)
    elif change == 6:
        frame = rng.choice((zstd_frame(1 << 20), zstd_frame(1 << 28), rng.randbytes(30), b"", zstd_frame(1 << 20)[:-3]))
        size = rng.choice((0, 8, 64, 1 << 20, 1 << 28, 1 << 30, 1 << 40, 2**64 - 1))
        packed = rng.choice((struct.pack("<Q", size) + frame, frame, b"\0" * 3))
        kept = rng.choice(("positive.zstd", "signless.zstd", "nan.zstd"))
        header = {kept: {"dtype": "U8", "shape": [len(packed)], "data_offsets": [0, len(packed)]}}
        content = packed
    else:
        text = json_mutators.mutated(json.dumps(header), rng).encode("utf-8", "surrogatepass")
        return struct.pack("<Q", len(text)) + text + content
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + content


def mutated_npy(data: bytes, rng: Random) -> bytes:
    """An array's file with another header."""
    change = rng.randrange(5)
    if change == 0:
        return mangled(data, rng)
    shape = rng.choice(
        ("(4, 3)", "(12,)", "()", "(10000000000000,)", "(-1,)", "(2**40,)", "(4611686018427387904, 4)",
        "(0, 9223372036854775807)",
         "(True, 3)", "(" * 5000, "(1,)*10", "'a'", "(" + "1," * 100 + ")", "(4, 3.0)")
    )  # fmt: skip
    kind = rng.choice(
        ("'|b1'", "'|O'", "'<f8'", "'<U1000000'", "'|V9'", "[('a', '|b1')]", "'<M8[ns]'", "1", "'|b1', 'x': 1", "'|S0'")
    )
    header = f"{{'descr': {kind}, 'fortran_order': {rng.choice(('False', 'True', '7'))}, 'shape': {shape}, }}"
    if change == 1:
        header = mangled(header.encode(), rng).decode("latin1")
    version = rng.choice((b"\x01\0", b"\x01\0", b"\x02\0", b"\x03\0", b"\x09\0"))
    text = header.encode("latin1", "replace")
    length = rng.choice((len(text), len(text), len(text), 0, 2**16 - 1, len(text) + 50))
    size = struct.pack(
        "<H" if version == b"\x01\0" else "<I", min(length, 2**16 - 1 if version == b"\x01\0" else length)
    )
    archive = rng.random() < 0.05
    return (
        b"PK\x03\x04" + data if archive else b"\x93NUMPY" + version + size + text + b"\1" * rng.choice((12, 12, 0, 100))
    )
