"""The optional parts of an observation: exponents, signs, intervals, a digest, the tensor itself. From NumPy arrays."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traindiff.core.summary import Detail, RawTensor

EXPONENT_FIRST = -160
"""Binary exponent of the first bin of a histogram, which also counts smaller ones."""

EXPONENT_BINS = 320
"""Bins of a histogram of exponents, one per binary exponent; the last also counts larger ones."""

_CHUNK = 1 << 15
"""Elements that are read at a time, so that intermediate arrays stay in the cache; a multiple of 8."""

Bits = NDArray[np.uint8]


def exponents(values: NDArray[np.generic]) -> NDArray[np.int64]:
    """Histogram of the elements by binary exponent.

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


def packed_signs(values: NDArray[Any], *, may_be_signless: bool = True) -> tuple[Bits, Bits, Bits]:
    """Masks with one bit per element, the first element in the lowest bit of the first byte.

    Args:
        values: Any real dtype, one axis.
        may_be_signless: False if it is known that no element is zero or NaN, which saves the search.

    Returns:
        Set if x > 0; if x is zero or NaN; if x is NaN. The second and the third are empty if there is no such element.
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
    return positive, signless if signless.any() else signless[:0], nan if nan.any() else nan[:0]


def intervals(values: NDArray[Any], bounds: Sequence[float]) -> NDArray[np.int64]:
    """Number of elements in each of the intervals between bounds, each closed on the right.

    Args:
        values: Any real dtype, one axis.
        bounds: Ascending, finite.

    Returns:
        `len(bounds) + 1` counts: of (-inf, b0], (b0, b1], ..., (b_last, inf], exact for every dtype. NaN is in
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
    """The elements in chunks; float16 becomes float32, which NumPy compares faster."""
    for first in range(0, values.size, _CHUNK):
        chunk = values[first : first + _CHUNK]
        yield chunk.astype(np.float32) if chunk.dtype == np.float16 else chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Elements:
    """A tensor's elements as NumPy arrays.

    Attributes:
        values: Elements in row-major order, flat; a view of the tensor's memory if NumPy has the dtype, else (bfloat16,
            float8) float32.
        bits: The same, as unsigned integers.
        tiny: Smallest normal number of the dtype; 0 for dtypes without fractions.
    """

    values: NDArray[np.generic]
    bits: NDArray[np.unsignedinteger]
    tiny: float


def is_wanted(shape: Sequence[int], wanted: Collection[str], bounds: Sequence[float]) -> bool:
    """True if anything besides the summary is kept. The summary holds everything about a scalar except its MD5."""
    return bool(set(wanted) - {"summary"} or bounds) if len(shape) else "md5" in wanted


def detail_of_elements(
    found: Elements,
    shape: Sequence[int],
    dtype: str,
    wanted: Collection[str],
    *,
    bounds: Sequence[float] = (),
    summary: Any = None,
) -> Detail | None:
    """The wanted parts of a tensor; copies what it keeps.

    Args:
        found: Its elements.
        shape: Its shape.
        dtype: Its dtype, as torch spells it.
        wanted: Some of `traindiff.core.setting_checks.DETAILS`.
        bounds: Ascending bounds of intervals in which elements are counted; may be empty.
        summary: Summary of the tensor, if it is known already.

    Returns:
        The parts; None if nothing was wanted. A scalar has only its MD5, because its summary holds everything else.
    """
    if not is_wanted(shape, wanted, bounds):
        return None
    kept: dict[str, RawTensor] = {}
    if "md5" in wanted:
        digest = hashlib.md5(found.bits.data, usedforsecurity=False).digest()
        kept["md5"] = _raw(np.frombuffer(digest, dtype=np.uint8))
    if not len(shape):
        return Detail(tensors=kept)
    if "tensors" in wanted:
        kept["value"] = RawTensor(dtype=dtype, shape=tuple(shape), data=found.bits.tobytes())
    if "signs" in wanted:
        known = isinstance(summary, np.void)  # not still on its way from a device
        may_be_signless = not known or bool(int(summary["zero"]) + int(summary["nan"]))
        positive, signless, nan = packed_signs(found.values, may_be_signless=may_be_signless)
        kept |= {"positive": _raw(positive), "signless": _raw(signless)}
        if nan.size:
            kept["nan"] = _raw(nan)
    if bounds:
        counts = intervals(found.values, bounds)
        kept["intervals"] = RawTensor(dtype="int64", shape=counts.shape, data=counts.astype("<i8").tobytes())
    counted = exponents(found.values) if "exponents" in wanted and found.tiny else None
    return Detail(exponents=counted, tensors=kept)


def _raw(found: NDArray[np.uint8]) -> RawTensor:
    return RawTensor(dtype="uint8", shape=found.shape, data=found.tobytes())
