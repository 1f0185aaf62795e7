"""What is kept of each element, or counted over all: signs, intervals, exponents. By NumPy, on the CPU."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

EXPONENT_FIRST = -160
"""Binary exponent of the first bin of a histogram; what is smaller is counted there too."""

EXPONENT_BINS = 320
"""Bins of a histogram of exponents, one per binary exponent; the last takes what is larger."""

_CHUNK = 1 << 15
"""Elements that are read at a time, so that what is made of them stays in the cache; a multiple of 8."""

Bits = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSigns:
    """One bit per element, the first element in the lowest bit of the first byte.

    Attributes:
        positive: Set where x > 0.
        signless: Set where x is zero or NaN; empty where no element is.
        nan: Set where x is NaN; empty where no element is.
    """

    positive: Bits
    signless: Bits
    nan: Bits


def exponents(values: NDArray[np.generic]) -> NDArray[np.int64]:
    """How many elements have which binary exponent.

    Args:
        values: Any real floating-point dtype that NumPy has, one axis.

    Returns:
        `EXPONENT_BINS` counts: bin k counts finite elements other than zero with
        `floor(log2 |x|) = k + EXPONENT_FIRST`, subnormal ones by their value.
    """
    counts = np.zeros(EXPONENT_BINS, dtype=np.int64)
    for chunk in _chunks(values):
        finite = chunk.astype(np.float64)
        finite = finite[np.isfinite(finite) & (finite != 0)]
        # frexp gives x = m * 2^e with 0.5 <= |m| < 1
        exponent = np.frexp(finite)[1].astype(np.int64) - 1 - EXPONENT_FIRST
        counts += np.bincount(np.clip(exponent, 0, EXPONENT_BINS - 1), minlength=EXPONENT_BINS)
    return counts


def packed_signs(values: NDArray[Any], *, may_be_signless: bool = True) -> PackedSigns:
    """Which elements are positive, which have no sign, and which of these are NaN.

    Args:
        values: Any real dtype, one axis.
        may_be_signless: False where it is known that no element is zero or NaN, which saves looking for them.
    """
    num_bytes = -(-values.size // 8)
    positive = np.empty(num_bytes, dtype=np.uint8)
    signless, nan = (np.zeros(num_bytes if may_be_signless else 0, dtype=np.uint8) for _ in range(2))
    first = 0
    with np.errstate(invalid="ignore"):
        for chunk in _chunks(values):
            above = np.packbits(chunk > 0, bitorder="little")
            end = first + above.size
            positive[first:end] = above
            if may_be_signless:
                is_nan = chunk != chunk
                nan[first:end] = np.packbits(is_nan, bitorder="little")
                signless[first:end] = np.packbits(is_nan | (chunk == 0), bitorder="little")
            first = end
    none = np.zeros(0, dtype=np.uint8)
    return PackedSigns(positive=positive, signless=signless if signless.any() else none, nan=nan if nan.any() else none)


def intervals(values: NDArray[Any], bounds: Sequence[float]) -> NDArray[np.int64]:
    """How many elements lie in each of the intervals that some bounds make, each closed on the right.

    Args:
        values: Any real dtype, one axis.
        bounds: Ascending, finite.

    Returns:
        `len(bounds) + 1` counts: of (-inf, b0], (b0, b1], ..., (b_last, inf], exact whatever the dtype. NaN is in
        none of them.
    """
    limits = [_at_most(bound, values.dtype) for bound in bounds]
    below = np.zeros(len(limits) + 1, dtype=np.int64)
    with np.errstate(invalid="ignore"):
        for chunk in _chunks(values):
            for number, limit in enumerate(limits):
                below[number] += np.count_nonzero(chunk <= limit)
            below[-1] += np.count_nonzero(chunk == chunk)  # all but NaN
    return np.diff(below, prepend=0)


def _at_most(bound: float, dtype: np.dtype[Any]) -> Any:
    """The largest number of a dtype that is not above a bound, so that `x <= bound` compares what x really is."""
    if dtype.kind != "f":
        return math.floor(bound)
    with np.errstate(over="ignore"):
        limit = dtype.type(bound)
    return limit if float(limit) <= bound else np.nextafter(limit, dtype.type(-np.inf))


def _chunks(values: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """The elements, some at a time; float16 as float32, of which NumPy compares more at once."""
    for first in range(0, values.size, _CHUNK):
        chunk = values[first : first + _CHUNK]
        yield chunk.astype(np.float32) if chunk.dtype == np.float16 else chunk
