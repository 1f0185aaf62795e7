"""Tensors in files of their own: safetensors, one file per observation."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from safetensors import SafetensorError, deserialize

from traindiff.detail import RawTensor
from traindiff.errors import CorruptRecordingError
from traindiff.recording.names import file_name

_NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint64": "U64",
    "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
_PLAIN: dict[str, np.dtype[np.generic]] = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"), "I16": np.dtype("<i2"), "I8": np.dtype("i1"), "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"), "U16": np.dtype("<u2"), "U8": np.dtype("u1"), "BOOL": np.dtype("?"),
}  # fmt: skip

_COMPRESSED = ".zstd"
_BITS = frozenset({"positive", "signless", "nan"})
_NOTHING = RawTensor(dtype="uint8", shape=(0,), data=b"")


def tensor_file(*, step: int, row: int, site: str) -> str:
    """Path of an observation's file in its rank's directory; `row` is its row in the whole stream."""
    return f"tensors/step-{step:06d}/{row:08d}-{file_name(site)}.safetensors"


def dump(tensors: Mapping[str, RawTensor], *, site: str) -> bytes:
    """The file's content: length of the header, header, data, as the safetensors format has it.

    Written here because the library takes bfloat16 and float8 from torch tensors only.
    """
    header: dict[str, object] = {"__metadata__": {"site": site}}
    begin = 0
    tensors = _compressed(tensors)
    for name, tensor in tensors.items():
        end = begin + len(tensor.data)
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([struct.pack("<Q", len(text)), text, *(tensor.data for tensor in tensors.values())])


def load(data: bytes, *, where: str) -> dict[str, NDArray[np.generic]]:
    """Tensors of a file by name. bfloat16 comes as float32, other dtypes that NumPy lacks as their bits.

    Raises:
        CorruptRecordingError: It is not what `dump` wrote.
    """
    try:
        entries = deserialize(data)  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise CorruptRecordingError(
            f"{where} is damaged: {error}. Restore the file from where it was copied, or record again."
        ) from None
    found = {name: _array(entry["dtype"], entry["shape"], bytes(entry["data"])) for name, entry in entries}
    return dict(_decompressed(name, array, where) for name, array in found.items())


def _compressed(tensors: Mapping[str, RawTensor]) -> dict[str, RawTensor]:
    """The tensors, with bits compressed of which many are alike: the rows of an embedding that nobody looked up."""
    if not len(tensors.get("signless", _NOTHING).data):
        return dict(tensors)
    return dict(_smaller(name, tensor) if name in _BITS else (name, tensor) for name, tensor in tensors.items())


def _smaller(name: str, tensor: RawTensor) -> tuple[str, RawTensor]:
    data = struct.pack("<Q", len(tensor.data)) + pa.compress(tensor.data, codec="zstd", asbytes=True)
    if len(data) >= len(tensor.data):
        return name, tensor
    return name + _COMPRESSED, RawTensor(dtype="uint8", shape=(len(data),), data=data)


def _decompressed(name: str, array: NDArray[np.generic], where: str) -> tuple[str, NDArray[np.generic]]:
    if not name.endswith(_COMPRESSED):
        return name, array
    data = array.tobytes()
    try:
        (size,) = struct.unpack_from("<Q", data)
        bits = pa.decompress(data[8:], decompressed_size=size, codec="zstd", asbytes=True)
    except (struct.error, OSError, ValueError, OverflowError) as error:
        raise CorruptRecordingError(
            f"{where} is damaged: {error}. Restore the file from where it was copied, or record again."
        ) from None
    return name.removesuffix(_COMPRESSED), np.frombuffer(bits, dtype=np.uint8)


def _array(dtype: str, shape: list[int], data: bytes) -> NDArray[np.generic]:
    if dtype == "BF16":
        bits = np.frombuffer(data, dtype=np.dtype("<u2")).astype(np.uint32) << np.uint32(16)
        return np.asarray(bits.view(np.float32).reshape(shape))
    return np.asarray(np.frombuffer(data, dtype=_PLAIN.get(dtype, np.dtype("u1"))).reshape(shape))
