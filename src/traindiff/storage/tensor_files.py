"""Tensors in files of their own: safetensors, one file per observation."""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from traindiff.core.shards import Shard
from traindiff.core.summary import RawTensor
from traindiff.core.untrusted.demands import damaged, demanded, listed, mapped, one_of, parse, quoted, shaped, whole
from traindiff.storage.batch_metadata import too_much
from traindiff.storage.location import file_name
from traindiff.storage.schema import MOST_ELEMENTS

_KNOWN = {
    "float64": ("F64", "<f8"), "float32": ("F32", "<f4"), "float16": ("F16", "<f2"), "bfloat16": ("BF16", "<u2"),
    "float8_e4m3fn": ("F8_E4M3", "u1"), "float8_e5m2": ("F8_E5M2", "u1"), "int64": ("I64", "<i8"),
    "int32": ("I32", "<i4"), "int16": ("I16", "<i2"), "int8": ("I8", "i1"), "uint64": ("U64", "<u8"),
    "uint32": ("U32", "<u4"), "uint16": ("U16", "<u2"), "uint8": ("U8", "u1"), "bool": ("BOOL", "?"),
}  # fmt: skip
"""Dtypes as torch spells them, as safetensors spells them, and as NumPy does; the bits where it lacks one."""

_NUMPY: dict[str, np.dtype[np.generic]] = {name: np.dtype(form) for name, form in _KNOWN.values()}

MOST_HEADER_BYTES = 1 << 16
"""Limit for the size of a file's header."""

_HEADER = mapped(
    shaped(
        {
            "dtype": one_of(_NUMPY),
            "shape": listed(whole(0, MOST_ELEMENTS)),
            "data_offsets": listed(whole(0), least=2, most=2),
        }
    )
)

_SEALED_DIGITS = len("00000000.safetensors")
_COMPRESSED = ".zstd"
_BITS = frozenset({"positive", "signless", "nan"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Raw:
    """A tensor in a file: dtype as safetensors spells it, shape and bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


_NOTHING = RawTensor(dtype="uint8", shape=(0,), data=b"")


def tensor_file(*, step: int, row: int, site: str, content: bytes) -> str:
    """Path of an observation's file in its rank's directory; `row` is its row in the whole stream.

    The checksum of the content is part of the name, which is written in a sealed message.
    """
    return f"tensors/step-{step:06d}/{row:08d}-{file_name(site)}.{zlib.crc32(content):08x}.safetensors"


def check_content(name: str, checksum: int, *, where: str) -> None:
    """Refuse a file if its content does not match the checksum in its name.

    Raises:
        CorruptRecordingError: The checksums differ.
    """
    sealed = name[-_SEALED_DIGITS:].partition(".")[0]
    if f"{checksum:08x}" != sealed:
        raise damaged(where, f"its content has checksum {checksum:08x}, and its name says {sealed}")


def most_bytes(shard: Shard, *, num_bounds: int) -> int:
    """Limit for the size of a file with tensors of a part."""
    return 8 + MOST_HEADER_BYTES + 16 + 8 * (num_bounds + 1) + 8 * shard.size + 3 * (_num_bit_bytes(shard) + 8)


def dump(tensors: Mapping[str, RawTensor], *, site: str) -> bytes:
    """The file's content: length of the header, header, data, as the safetensors format has it.

    Written here because the safetensors library accepts bfloat16 and float8 only as torch tensors.
    """
    header: dict[str, object] = {"__metadata__": {"site": site}}
    begin = 0
    tensors = _compressed(tensors)
    for name, tensor in tensors.items():
        end = begin + len(tensor.data)
        header[name] = {
            "dtype": _KNOWN[tensor.dtype][0],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([struct.pack("<Q", len(text)), text, *(tensor.data for tensor in tensors.values())])


def load(data: bytes, *, where: str, shard: Shard) -> dict[str, NDArray[np.generic]]:
    """The tensors of a file, by name. bfloat16 becomes float32; other dtypes that NumPy lacks are returned as bits.

    The tensors must have the size of `shard`, the part that was observed.

    Raises:
        CorruptRecordingError: The content is not as `dump` writes it.
    """
    raw = dict(_decompressed(name, one, where, shard) for name, one in _read(data, where).items())
    for name, one in raw.items():
        if one.dtype != (dtype := _DTYPES.get(name, one.dtype)):
            raise damaged(where, f"{name} has the dtype {one.dtype}, and must have {dtype}")
        expected = _SHAPES[name](shard) if name in _SHAPES else one.shape
        if one.shape not in ((expected, (0,)) if name in _BITS else (expected,)):
            raise damaged(where, f"{name} has the shape {list(one.shape)}, and must have {list(expected)}")
    if (
        "value" in raw
        and "md5" in raw
        and hashlib.md5(raw["value"].data, usedforsecurity=False).digest() != bytes(raw["md5"].data)
    ):
        raise damaged(where, "its value has another MD5 than it says")
    return {name: _array(one) for name, one in raw.items()}


def _num_bit_bytes(shard: Shard) -> int:
    return -(-shard.size // 8)


_DTYPES: Mapping[str, str] = {**dict.fromkeys(_BITS, "U8"), "md5": "U8", "intervals": "I64"}

_SHAPES: Mapping[str, Callable[[Shard], tuple[int, ...]]] = {
    "value": lambda shard: shard.shape,
    **dict.fromkeys(_BITS, lambda shard: (_num_bit_bytes(shard),)),
    "md5": lambda _: (16,),
}


def _read(data: bytes, where: str) -> dict[str, _Raw]:
    """The tensors of a safetensors file, which must follow each other without gaps."""
    if len(data) < 8:
        raise damaged(where, f"it has {len(data)} bytes")
    (length,) = struct.unpack_from("<Q", data)
    begin = 8 + length
    if begin > len(data):
        raise damaged(where, f"its header has {length} bytes, and the file has {len(data)}")
    header = parse(data[8:begin], where=where, most_bytes=MOST_HEADER_BYTES)
    header = {name: one for name, one in demanded(header, shaped({}), where=where).items() if name != "__metadata__"}
    demanded(header, _HEADER, where=where)
    found, content = {}, memoryview(data)[begin:]
    end = 0
    for name, about in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        first, last = about["data_offsets"]
        size = prod(about["shape"]) * _NUMPY[about["dtype"]].itemsize
        if (first, last) != (end, end + size):
            raise damaged(where, f"{quoted(name)} lies at bytes {first} to {last}, and {size} from {end} are expected")
        found[name] = _Raw(dtype=about["dtype"], shape=tuple(about["shape"]), data=content[first:last])
        end = last
    if end != len(content):
        raise damaged(where, f"its tensors have {end} bytes, and {len(content)} are there")
    return found


def _compressed(tensors: Mapping[str, RawTensor]) -> dict[str, RawTensor]:
    """The tensors, whose bits are compressed if many are alike, e.g. unused rows of an embedding."""
    if not len(tensors.get("signless", _NOTHING).data):
        return dict(tensors)
    return dict(_smaller(name, tensor) if name in _BITS else (name, tensor) for name, tensor in tensors.items())


def _smaller(name: str, tensor: RawTensor) -> tuple[str, RawTensor]:
    data = struct.pack("<Q", len(tensor.data)) + pa.compress(tensor.data, codec="zstd", asbytes=True)
    if len(data) >= len(tensor.data) or too_much(len(tensor.data), len(data)):
        return name, tensor
    return name + _COMPRESSED, RawTensor(dtype="uint8", shape=(len(data),), data=data)


def _decompressed(name: str, one: _Raw, where: str, shard: Shard) -> tuple[str, _Raw]:
    if not name.endswith(_COMPRESSED) or (plain := name.removesuffix(_COMPRESSED)) not in _BITS:
        return name, one
    (size,) = struct.unpack_from("<Q", one.data) if len(one.data) >= 8 else (-1,)
    if size != _num_bit_bytes(shard) or too_much(size, len(one.data)):
        raise damaged(where, f"{name} says that it holds {size} bytes, and {_num_bit_bytes(shard)} are expected")
    try:
        bits = pa.decompress(one.data[8:], decompressed_size=size, codec="zstd", asbytes=True)
    except (OSError, ValueError) as error:
        raise damaged(where, str(error)) from None
    return plain, _Raw(dtype="U8", shape=(len(bits),), data=memoryview(bits))


def _array(one: _Raw) -> NDArray[np.generic]:
    found = np.frombuffer(one.data, dtype=_NUMPY[one.dtype])
    if one.dtype == "BF16":
        found = (found.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return np.asarray(found.reshape(one.shape))
