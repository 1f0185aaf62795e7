"""How the kernel reads the elements of each dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Dtype:
    """A dtype whose elements the kernel reads as unsigned integers.

    Attributes:
        form: Name of the float format, or `signed` or `unsigned` for integers.
        bits: Width of an element.
        infinity: Magnitude bits of +inf; of the first NaN where there is no infinity.
        first_nan: Every magnitude from this one is NaN.
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
