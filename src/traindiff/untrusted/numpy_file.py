"""A `.npy` file of booleans: NumPy's own reader allocates what a header says, and has errors of its own."""

from __future__ import annotations

import ast
import struct
from math import prod

import numpy as np
from numpy.typing import NDArray

_MAGIC = b"\x93NUMPY"
MOST_HEADER_BYTES = 1 << 12
"""Size of a header at most, with what lies before it."""
_MOST_AXES = 64
_BOOL = "|b1"


def booleans(data: bytes) -> NDArray[np.bool_]:
    """The array in a `.npy` file.

    Args:
        data: The file's content.

    Raises:
        ValueError: It is not a whole file of booleans; the message is a clause that says why.
    """
    if data[:6] != _MAGIC or len(data) < 12 or data[6] not in (1, 2, 3):
        raise ValueError("cannot be read as an array")
    form, begin = ("<H", 10) if data[6] == 1 else ("<I", 12)
    (length,) = struct.unpack_from(form, data, 8)
    if length > MOST_HEADER_BYTES - begin or begin + length > len(data):
        raise ValueError(f"has a header of {length} bytes")
    kind, by_column, shape = _header(data[begin : begin + length])
    if kind != _BOOL:
        raise ValueError(f"holds {kind!r} and not bool")
    content = memoryview(data)[begin + length :]
    if prod(shape) != len(content):
        raise ValueError(f"has the shape {list(shape)}, and {len(content)} elements")
    return np.frombuffer(content, dtype=np.uint8).astype(np.bool_).reshape(shape, order="F" if by_column else "C")


def _header(data: bytes) -> tuple[str, bool, tuple[int, ...]]:
    try:
        header = ast.literal_eval(data.decode("latin-1").strip())
        kind, by_column, shape = header["descr"], header["fortran_order"], header["shape"]
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError, KeyError):
        raise ValueError("cannot be read as an array") from None
    lengths_are_known = isinstance(shape, tuple) and len(shape) <= _MOST_AXES
    if not lengths_are_known or not all(type(one) is int and 0 <= one < 2**62 for one in shape):
        raise ValueError("has no shape")
    return str(kind)[:80], bool(by_column), shape
