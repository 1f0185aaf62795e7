"""Summaries written a second time, from the definitions, one element at a time in plain Python.

Shares no code with the package but the layout of the result. Integers are Python's, so nothing
overflows by accident; floats are decoded from their bits, so no conversion is taken on trust.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np

from traindiff.core.summary import SUMMARY

MASK_64 = 2**64 - 1
MASK_32 = 2**32 - 1


@dataclass(frozen=True, kw_only=True)
class Format:
    """How a dtype spells a number. `exponent_bits` is 0 for integers."""

    width: int
    exponent_bits: int = 0
    mantissa_bits: int = 0
    signed: bool = False
    has_infinity: bool = True

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def smallest_normal(self) -> float:
        return 2.0 ** (1 - self.bias)

    def decode(self, bits: int) -> float:
        if not self.exponent_bits:
            negative = self.signed and bits >> (self.width - 1)
            return float(bits - 2**self.width if negative else bits)
        sign = -1.0 if bits >> (self.width - 1) else 1.0
        exponent = (bits >> self.mantissa_bits) & (2**self.exponent_bits - 1)
        mantissa = bits & (2**self.mantissa_bits - 1)
        if exponent == 2**self.exponent_bits - 1:
            if self.has_infinity:
                return sign * math.inf if mantissa == 0 else math.nan
            if mantissa == 2**self.mantissa_bits - 1:
                return math.nan
        if exponent == 0:
            return sign * math.ldexp(mantissa, 1 - self.bias - self.mantissa_bits)
        whole = mantissa + 2**self.mantissa_bits
        return sign * math.ldexp(whole, exponent - self.bias - self.mantissa_bits)


FORMATS = {
    "float64": Format(width=64, exponent_bits=11, mantissa_bits=52),
    "float32": Format(width=32, exponent_bits=8, mantissa_bits=23),
    "bfloat16": Format(width=16, exponent_bits=8, mantissa_bits=7),
    "float16": Format(width=16, exponent_bits=5, mantissa_bits=10),
    "float8_e4m3fn": Format(width=8, exponent_bits=4, mantissa_bits=3, has_infinity=False),
    "float8_e5m2": Format(width=8, exponent_bits=5, mantissa_bits=2),
    "int64": Format(width=64, signed=True),
    "int32": Format(width=32, signed=True),
    "int16": Format(width=16, signed=True),
    "int8": Format(width=8, signed=True),
    "uint8": Format(width=8),
    "bool": Format(width=8),
}


def splitmix64(value: int) -> int:
    z = (value + 0x9E3779B97F4A7C15) & MASK_64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK_64
    return z ^ (z >> 31)


def block_weight(block: int) -> int:
    return splitmix64(block ^ 0x243F6A8885A308D3) | 1


def lane_weight(lane: int) -> int:
    return (splitmix64(lane + 1) >> 32) | 0x80000001


def weight(index: int) -> int:
    return block_weight(index // 64) * lane_weight(index % 64) & MASK_64


def sign(index: int) -> int:
    signs = splitmix64((index // 64) ^ 0x13198A2E03707344)
    return -1 if (signs >> (index % 64)) & 1 else 1


def bucket(index: int) -> int:
    rotation = block_weight(index // 64) >> 58
    return (index % 64 + rotation) % 64


def folded(bits: int, width: int) -> int:
    return bits ^ (bits >> 32) if width == 64 else bits


def multiset_hash(bits: int, width: int) -> int:
    data = folded(bits, width)
    if width == 64:
        z = data * 0xBF58476D1CE4E5B9 & MASK_64
        return (z ^ (z >> 32)) * 0x94D049BB133111EB & MASK_64
    v = data * 0x9E3779B1 & MASK_32
    return (data ^ 0x85EBCA6B) * (v ^ (v >> 16)) & MASK_64


def box_indices(shape: Sequence[int], strides: Sequence[int], offset: Sequence[int]) -> list[int]:
    """Global indices of a box, in its own row-major order."""
    return [
        sum((first + at) * step for first, at, step in zip(offset, position, strides, strict=True))
        for position in product(*(range(length) for length in shape))
    ]


def row_major_strides(shape: Sequence[int]) -> list[int]:
    return [prod(shape[axis + 1 :]) for axis in range(len(shape))]


def profile_buckets(index: int, *, rows: int, columns: int) -> tuple[int, int]:
    """Row and column bucket, of 16 each; column buckets are multiples of 16 columns wide."""
    columns = max(columns, 1)
    row_block = max(1, math.ceil(rows / 16))
    column_block = 16 * max(1, math.ceil(columns / 256))
    return (index // columns // row_block) % 16, (index % columns) // column_block


def summarize(bits: Sequence[int], indices: Sequence[int], dtype: str, *, rows: int, columns: int) -> np.void:
    """The summary of the elements with these bits at these global indices."""
    form = FORMATS[dtype]
    result = np.zeros((), dtype=SUMMARY)
    finite: list[tuple[int, float]] = []
    fingerprint = multiset = nonfinite = 0
    for raw, index in zip(bits, indices, strict=True):
        x = form.decode(raw)
        result["count"] += 1
        result["zero"] += x == 0
        result["negative"] += x < 0
        fingerprint += weight(index) * folded(raw, form.width)
        multiset += multiset_hash(raw, form.width)
        kind = 1 if math.isnan(x) else 2 if x == math.inf else 3 if x == -math.inf else 0
        nonfinite += weight(index) * kind
        if kind:
            result[("nan", "positive_infinity", "negative_infinity")[kind - 1]] += 1
        else:
            finite.append((index, x))
            result["subnormal"] += bool(form.exponent_bits) and 0 < abs(x) < form.smallest_normal
    result["fingerprint"] = fingerprint & MASK_64
    result["multiset"] = multiset & MASK_64
    result["nonfinite"] = nonfinite & MASK_64
    result["minimum"] = min((x for _, x in finite), default=math.inf)
    result["maximum"] = max((x for _, x in finite), default=-math.inf)
    result["smallest"] = min((abs(x) for _, x in finite if x), default=math.inf)
    if form.exponent_bits:
        _moments(result, finite, rows=rows, columns=columns)
    return result[()]


def _moments(result: np.ndarray, finite: list[tuple[int, float]], *, rows: int, columns: int) -> None:
    result["sum"] = _sum(x for _, x in finite)
    result["sum_of_squares"] = _sum(x * x for _, x in finite)
    terms: list[list[float]] = [[] for _ in range(64)]
    by_row: list[list[float]] = [[] for _ in range(16)]
    by_column: list[list[float]] = [[] for _ in range(16)]
    for index, x in finite:
        row, column = profile_buckets(index, rows=rows, columns=columns)
        terms[bucket(index)].append(sign(index) * x)
        by_row[row].append(x)
        by_column[column].append(x)
    result["sketch"] = [_sum(part) for part in terms]
    for name, parts in (("row", by_row), ("column", by_column)):
        result[f"{name}_largest"] = [max(map(abs, part), default=0.0) for part in parts]
        result[f"{name}_squares"] = [_sum(x * x for x in part) for part in parts]


def _sum(values: object) -> float:
    try:
        return math.fsum(values)
    except OverflowError:
        return math.nan  # compared by nobody: see `rounding.assert_equal_up_to_rounding`
