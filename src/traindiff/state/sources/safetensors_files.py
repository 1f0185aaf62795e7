"""A file of safetensors: its header is read, and elements when they are asked for."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from math import prod
from typing import Any

from traindiff.core.site import printable
from traindiff.core.untrusted.demands import TEXT, demanded, listed, mapped, parse, quoted, shaped, whole
from traindiff.core.untrusted.folder import Folder
from traindiff.state.dtypes import ITEM_BYTES
from traindiff.state.stored import Bytes, Part, Place, StoredTensor, unreadable

MOST_HEADER_BYTES = 100_000_000
"""Limit for the size of a header, as in the safetensors library."""

_DTYPES: Mapping[str, str] = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U64": "uint64",
    "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool", "C64": "complex64",
    "F4": "float4_e2m1fn_x2", "F6_E2M3": "float6_e2m3fn", "F6_E3M2": "float6_e3m2fn",
}  # fmt: skip

_PACKED: Mapping[str, int] = {"float4_e2m1fn_x2": 4, "float6_e2m3fn": 6, "float6_e3m2fn": 6}
"""Bits of an element, where several share bytes: these are compared as bytes."""

_TENSOR = shaped(
    {
        "dtype": TEXT,
        "shape": listed(whole(0, 1 << 48), most=64),
        "data_offsets": listed(whole(0), least=2, most=2),
    }
)


def of_file(folder: Folder, name: str) -> dict[str, StoredTensor]:
    """The tensors of one file, by name, after checking its header against its size.

    Raises:
        CheckpointError: The header is damaged, too large, or does not fit the file.
    """
    where, size = folder.path(name), folder.size(name)
    start = folder.read_range(name, 0, 8)
    length = struct.unpack("<Q", start.tobytes())[0] if start.size == 8 else 0
    if not 2 <= length <= MOST_HEADER_BYTES or 8 + length > size:
        raise unreadable(where, f"it has {size} bytes, and no header of safetensors fits into them")
    header = parse(
        folder.read_range(name, 8, length).tobytes(), where=where, refuse=unreadable, most_bytes=MOST_HEADER_BYTES
    )
    if isinstance(header, dict):
        header.pop("__metadata__", None)
    demanded(header, mapped(_TENSOR), where=where, refuse=unreadable)
    end, before = 0, ""
    for key, content in sorted(header.items(), key=lambda item: tuple(item[1]["data_offsets"])):
        first = content["data_offsets"][0]
        if first < end:
            what = f"the tensor {quoted(printable(key))} begins before {quoted(printable(before))} ends"
            raise unreadable(where, what)
        if first > end:
            what = f"{first - end} bytes before the tensor {quoted(printable(key))} are of none"
            raise unreadable(where, f"{what}: libraries refuse to load it")
        end, before = max(end, content["data_offsets"][1]), key
    if 8 + length + end < size:
        what = f"its tensors end at byte {8 + length + end}, and the file has {size} bytes: libraries refuse to load it"
        raise unreadable(where, what)
    return {
        printable(key): _tensor(folder, name, printable(key), content, 8 + length, size - 8 - length)
        for key, content in header.items()
    }


def _tensor(folder: Folder, name: str, key: str, content: Mapping[str, Any], data: int, room: int) -> StoredTensor:
    where, shape = folder.path(name), tuple(content["shape"])
    begin, end = content["data_offsets"]
    dtype = _DTYPES.get(content["dtype"])
    if end < begin or end > room:
        raise unreadable(
            where, f"the tensor {quoted(key)} ends at byte {data + end}, and the file has {data + room} bytes"
        )
    if dtype is None:
        raise unreadable(
            where, f"the tensor {quoted(key)} has the dtype {quoted(content['dtype'])}, which is not known"
        )
    size, found = prod(shape) * ITEM_BYTES[dtype], end - begin
    if dtype in _PACKED:
        size, shape = -(-prod(shape) * _PACKED[dtype] // 8), (found,)
    if found != size:
        raise unreadable(
            where, f"the tensor {quoted(key)} of shape {content['shape']} ({content['dtype']}) has {found} bytes"
        )
    place = Place(content=Bytes(folder=folder, name=name, offset=data + begin, count=end - begin))
    part = Part(offset=(0,) * max(1, len(shape)), shape=shape or (1,), find=lambda: place)
    return StoredTensor(name=key, dtype=dtype, shape=shape, parts=(part,))
