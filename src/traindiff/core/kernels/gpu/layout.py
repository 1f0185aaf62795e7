"""The dtypes that the kernel reads, and a summary as 64-bit words: where each field begins, how each word merges."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from traindiff.core.summary import MAXIMA, MINIMA, SUMMARY


@dataclass(frozen=True, slots=True, kw_only=True)
class Dtype:
    """A dtype whose elements the kernel reads as unsigned integers.

    Attributes:
        form: Name of the float format, or `signed` or `unsigned` for integers.
        bits: Width of an element.
        infinity: Magnitude bits of +inf; of the first NaN where there is no infinity.
        first_nan: This magnitude and all larger ones are NaN.
        smallest_normal: Magnitude bits of the smallest normal number.
    """

    form: str
    bits: int
    infinity: int = 0
    first_nan: int = 0
    smallest_normal: int = 0


def _float(form: str, bits: int, infinity: int, smallest_normal: int) -> Dtype:
    return Dtype(form=form, bits=bits, infinity=infinity, first_nan=infinity + 1, smallest_normal=smallest_normal)


DTYPES = {
    torch.float64: _float("float64", 64, 0x7FF0000000000000, 0x0010000000000000),
    torch.float32: _float("float32", 32, 0x7F800000, 0x00800000),
    torch.bfloat16: _float("bfloat16", 16, 0x7F80, 0x0080),
    torch.float16: _float("float16", 16, 0x7C00, 0x0400),
    torch.float8_e5m2: _float("float8_e5m2", 8, 0x7C, 0x04),
    torch.float8_e4m3fn: Dtype(form="float8_e4m3fn", bits=8, infinity=0x7F, first_nan=0x7F, smallest_normal=0x08),
    torch.int64: Dtype(form="signed", bits=64),
    torch.int32: Dtype(form="signed", bits=32),
    torch.int16: Dtype(form="signed", bits=16),
    torch.int8: Dtype(form="signed", bits=8),
    torch.uint32: Dtype(form="unsigned", bits=32),
    torch.uint16: Dtype(form="unsigned", bits=16),
    torch.uint8: Dtype(form="unsigned", bits=8),
    torch.bool: Dtype(form="unsigned", bits=8),
}
"""The dtypes that the kernel reads. Not among them: uint64 and the rarer float8 formats."""


WORDS = SUMMARY.itemsize // 8
"""Words in a summary."""

ADD_INTEGERS, ADD_FLOATS, MINIMUM, MAXIMUM = range(4)
"""How a word merges."""


def first_word(name: str) -> int:
    """Index of the first word of a field."""
    assert SUMMARY.fields is not None
    return SUMMARY.fields[name][1] // 8


def merging() -> NDArray[np.int64]:
    """How each word merges, int64 of shape (WORDS,)."""
    ways = np.empty((), dtype=[(name, "<i8", SUMMARY[name].shape) for name in SUMMARY.names or ()])
    for name in SUMMARY.names or ():
        if name in MINIMA:
            ways[name] = MINIMUM
        elif name in MAXIMA:
            ways[name] = MAXIMUM
        else:
            ways[name] = ADD_FLOATS if SUMMARY[name].base.kind == "f" else ADD_INTEGERS
    return np.frombuffer(ways.tobytes(), dtype=np.int64)
