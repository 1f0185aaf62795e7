"""Bits of the dtypes that checkpoints have, their values, and how values round to shorter dtypes. NumPy alone."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.unsignedinteger[Any]]
"""Elements as unsigned integers of their own width."""

ITEM_BYTES: Mapping[str, int] = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1, "float4_e2m1fn_x2": 1, "float6_e2m3fn": 1,
    "float6_e3m2fn": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1,
    "complex64": 8, "complex128": 16,
}  # fmt: skip
"""Bytes of an element, by dtype as torch spells it."""

_HOLDS: Mapping[str, tuple[str, ...]] = {
    "float64": ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"),
    "float32": ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"),
    "bfloat16": ("float8_e4m3fn", "float8_e5m2"),
    "float16": ("float8_e4m3fn", "float8_e5m2"),
}
"""By dtype: the dtypes all of whose numbers it has, too."""

_DIGITS: Mapping[str, tuple[int, int]] = {
    "float64": (52, -1022), "float32": (23, -126), "bfloat16": (7, -126), "float16": (10, -14),
    "float8_e4m3fn": (3, -6), "float8_e5m2": (2, -14),
}  # fmt: skip
"""Binary digits behind the point, and the exponent of the smallest normal number."""

TOO_LARGE: Mapping[str, float] = {
    "float64": np.inf, "float32": 2.0**128 - 2.0**103, "bfloat16": 2.0**128 - 2.0**119, "float16": 65520.0,
    "float8_e4m3fn": float(np.nextafter(464.0, np.inf)), "float8_e5m2": 61440.0,
}  # fmt: skip
"""By dtype: the smallest number that does not round to a finite one, but to infinity, or is cut to the largest one."""


def is_float(dtype: str) -> bool:
    """True for a dtype whose numbers can be decoded and rounded to."""
    return dtype in _DIGITS


def shorter(dtype: str) -> tuple[str, ...]:
    """The dtypes all of whose numbers `dtype` holds too, from long to short."""
    return _HOLDS.get(dtype, ())


def bits_type(dtype: str) -> np.dtype[Any]:
    """The unsigned integers in which the bits of a dtype are kept; bytes for a dtype of 16 bytes."""
    size = ITEM_BYTES[dtype]
    return np.dtype("u1") if size > 8 else np.dtype(f"<u{size}")


def decoded(bits: Bits, dtype: str) -> NDArray[Any]:
    """The values of these bits, in float64 for float64 and in float32 for the other dtypes, exactly; same shape.

    Args:
        bits: As `bits_type` has them, contiguous.
        dtype: One for which `is_float` holds, or integers, which are returned as they are.
    """
    if dtype == "float64":
        return bits.view(np.float64)
    if dtype == "float32":
        return bits.view(np.float32)
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float32)
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype in ("float8_e4m3fn", "float8_e5m2"):
        return _numbers_of_8_bits(dtype)[bits]
    return bits.view(dtype) if dtype.startswith("int") else bits


def rounded(values: NDArray[Any], dtype: str) -> Bits:
    """The bits of values rounded to the nearest number of a dtype, ties to even, as torch's conversion rounds.

    float64 becomes float32 first where the dtype is shorter than that, as in torch. NaN becomes
    one of a dtype's NaNs; which of them a library makes differs.

    Args:
        values: float32 or float64.
        dtype: One for which `is_float` holds.
    """
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        if dtype == "float64":
            return values.astype(np.float64).view("<u8")
        single = np.ascontiguousarray(values, dtype=np.float32)
        if dtype == "float32":
            return single.view("<u4")
        if dtype == "float16":
            return single.astype(np.float16).view("<u2")
        if dtype == "bfloat16":
            raw = single.view(np.uint32)
            odd = (raw >> np.uint32(16)) & np.uint32(1)
            short = ((raw + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype("<u2")
            short[np.isnan(single)] = 0x7FC0
            return short
        return _rounded_to_8_bits(single, dtype)


def truncated(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Values without the digits that a dtype does not have, towards zero; float64, for dtypes of `is_float`."""
    wide = values.astype(np.float64)
    spacing = gap(wide, dtype)
    with np.errstate(invalid="ignore"):
        return np.trunc(wide / spacing) * spacing


def gap(values: NDArray[Any], dtype: str) -> NDArray[np.float64]:
    """Distance between neighboring numbers of a dtype at each value: `2^(max(floor(log2 |x|), least) - digits)`."""
    digits, least = _DIGITS[dtype]
    with np.errstate(invalid="ignore"):
        exponent = np.frexp(np.where(np.isfinite(values), values, 0.0).astype(np.float64))[1].astype(np.int64) - 1
    return np.asarray(np.ldexp(1.0, np.maximum(exponent, least) - digits), dtype=np.float64)


@cache
def _numbers_of_8_bits(dtype: str) -> NDArray[np.float32]:
    """The value of each of the 256 codes (OCP 8-bit floating point, revision 1.0, section 5)."""
    code = np.arange(256)
    digits, least = _DIGITS[dtype]
    exponent, fraction = (code & 0x7F) >> digits, code & ((1 << digits) - 1)
    size = np.ldexp((fraction + (exponent > 0) * (1 << digits)).astype(np.float64), np.maximum(exponent, 1))
    size = np.ldexp(size, least - 1 - digits)
    if dtype == "float8_e4m3fn":
        size[(code & 0x7F) == 0x7F] = np.nan
    else:
        size[(code & 0x7C) == 0x7C] = np.inf
        size[((code & 0x7C) == 0x7C) & (fraction > 0)] = np.nan
    return np.asarray(np.where(code & 0x80, -size, size), dtype=np.float32)


def _rounded_to_8_bits(values: NDArray[np.float32], dtype: str) -> Bits:
    numbers = _numbers_of_8_bits(dtype)[:128].astype(np.float64)
    finite = numbers[np.isfinite(numbers)]
    after = 2 * finite[-1] - finite[-2]  # what rounds to it is too large
    borders = np.append((finite[1:] + finite[:-1]) / 2, (finite[-1] + after) / 2)
    size = np.abs(values.astype(np.float64))
    code = np.searchsorted(borders, size, side="left")
    tie = (code < len(borders)) & (borders[np.minimum(code, len(borders) - 1)] == size) & (code % 2 == 1)
    code = code + tie
    if dtype == "float8_e4m3fn":
        code = np.minimum(code, 0x7E)  # which has no infinity: the largest number, as torch does it
    code[np.isnan(values)] = 0x7F
    return np.asarray(code + 0x80 * np.signbit(values), dtype=np.uint8)
