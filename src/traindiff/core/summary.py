"""The numbers kept of a tensor: their layout in memory, how they merge, what follows from them.

A summary is one element of a NumPy structured array of `SUMMARY`, so the summaries of a step are
one array and every function here works on all of them at once. Merging is commutative and
associative: the summaries of the shards of a tensor, in any order and by any tree, merge to the
summary of the tensor (counts and fingerprints exactly, moments and sketches to float64 rounding).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traindiff.core.shards import BUCKETS

UNIT_ROUNDOFF = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    "float8_e4m3fn": 2.0**-4,
    "float8_e4m3fnuz": 2.0**-4,
    "float8_e5m2": 2.0**-3,
    "float8_e5m2fnuz": 2.0**-3,
    "complex64": 2.0**-24,
    "complex128": 2.0**-53,
}
"""Half the distance from 1 to the next number (Higham, Accuracy and Stability, 2002, section 2.1)."""


LARGEST = {
    "float64": 1.7976931348623157e308,
    "float32": 3.4028234663852886e38,
    "float16": 65504.0,
    "bfloat16": 3.3895313892515355e38,
    "float8_e4m3fn": 448.0,
    "float8_e4m3fnuz": 240.0,
    "float8_e5m2": 57344.0,
    "float8_e5m2fnuz": 57344.0,
}
"""Largest finite number of a dtype; larger numbers overflow."""


SMALLEST_NORMAL = {"float64": 2.0**-1022, "float32": 2.0**-126, "float16": 2.0**-14, "bfloat16": 2.0**-126}
"""Smallest number of a dtype with all its digits; smaller ones are subnormal, or round to 0."""


def rounding(dtype: str) -> float:
    """Noise floor of one operation in `dtype`: `c * u`; 0 for dtypes without fractions."""
    return _ROUNDING.get(dtype, 0.0)


_ROUNDING = {dtype: (32.0 if u <= UNIT_ROUNDOFF["float32"] else 2.0) * u for dtype, u in UNIT_ROUNDOFF.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class RawTensor:
    """A tensor as bytes.

    Attributes:
        dtype: As torch spells it, e.g. `bfloat16`.
        shape: Its shape.
        data: Its elements in row-major order, little-endian.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Detail:
    """The optional parts of one observation.

    Attributes:
        exponents: Histogram of binary exponents; see `traindiff.core.kernels.element_details.exponents`.
        tensors: Tensors for a separate file: `value`; `positive`, `signless` and `nan`; `intervals`; `md5`.
    """

    exponents: NDArray[np.int64] | None = None
    tensors: Mapping[str, RawTensor] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that these parts take."""
        return sum(len(tensor.data) for tensor in self.tensors.values()) + 2560 * (self.exponents is not None)


SKETCH_SIZE = 64
"""Buckets of the sketch: standard deviation of log2(estimate / truth) is about 0.126."""

Summaries = NDArray[np.void]
"""A structured array of dtype `SUMMARY`, any shape."""

_COUNTS = ("count", "nan", "positive_infinity", "negative_infinity", "zero", "negative", "subnormal")
_FINGERPRINTS = ("fingerprint", "multiset", "nonfinite")
_SUMS = ("sum", "sum_of_squares", "sketch", "row_squares", "column_squares")
MINIMA = ("minimum", "smallest")
MAXIMA = ("maximum", "row_largest", "column_largest")
"""Fields that merge to the smallest, and to the largest."""

SUMMARY = np.dtype(
    [
        *((name, "<i8") for name in _COUNTS),
        ("minimum", "<f8"),  # of the finite elements; +inf where there are none
        ("maximum", "<f8"),  # of the finite elements; -inf where there are none
        ("smallest", "<f8"),  # smallest |x| of the finite elements that are not zero
        ("sum", "<f8"),
        ("sum_of_squares", "<f8"),
        ("fingerprint", "<u8"),  # of the bits of every element at its global index
        ("multiset", "<u8"),  # of the bits, whatever their places
        ("nonfinite", "<u8"),  # of the places and kinds of non-finite elements
        ("sketch", "<f8", (SKETCH_SIZE,)),
        ("row_largest", "<f8", (BUCKETS,)),
        ("row_squares", "<f8", (BUCKETS,)),
        ("column_largest", "<f8", (BUCKETS,)),
        ("column_squares", "<f8", (BUCKETS,)),
    ]
)
"""Layout of one summary: 64-bit words only, no padding. FORMAT.md defines every field."""


def empty(shape: int | tuple[int, ...] = ()) -> Summaries:
    """Summaries of no elements: the neutral element of `merge`."""
    blank = np.zeros(shape, dtype=SUMMARY)
    blank["minimum"] = np.inf
    blank["smallest"] = np.inf
    blank["maximum"] = -np.inf
    return blank


def merge(parts: Sequence[Any] | Summaries) -> Any:
    """The summary of a tensor from the summaries of its disjoint shards, in any order.

    Args:
        parts: Summaries along axis 0.

    Returns:
        One summary, or an array of them when `parts` has further axes.
    """
    stacked = np.asarray(parts, dtype=SUMMARY)
    merged = empty(stacked.shape[1:])
    with np.errstate(over="ignore", invalid="ignore"):  # moments that overflowed float64
        for name in (*_COUNTS, *_FINGERPRINTS, *_SUMS):
            merged[name] = stacked[name].sum(axis=0, dtype=stacked[name].dtype)
    for name in MINIMA:
        merged[name] = stacked[name].min(axis=0, initial=np.inf)
    for name in MAXIMA:
        low = -np.inf if name == "maximum" else 0.0
        merged[name] = stacked[name].max(axis=0, initial=low)
    return merged if merged.shape else merged[()]


def add(parts: Sequence[Any] | Summaries, weights: Sequence[float] | NDArray[np.float64] | None = None) -> Any:
    """The linear parts of the summary of a weighted sum of tensors of one shape.

    Only `sum` and `sketch` of the sum follow from those of the terms. The element count
    stays, counts of non-finite elements become the largest of any term, the norm is estimated
    from the sketch, and everything else is zero (fingerprints) or NaN.

    Args:
        parts: Summaries of the terms along axis 0.
        weights: One factor per term; 1 if left out.
    """
    stacked = np.asarray(parts, dtype=SUMMARY)
    factor = np.ones(len(stacked)) if weights is None else np.asarray(weights, dtype=np.float64)
    result = empty(stacked.shape[1:])
    for name in ("minimum", "maximum", "smallest", *MAXIMA, "row_squares", "column_squares"):
        result[name] = np.nan
    result["count"] = stacked["count"].max(axis=0, initial=0)
    for name in ("nan", "positive_infinity", "negative_infinity"):
        result[name] = stacked[name].max(axis=0, initial=0)
    for name in ("sum", "sketch"):
        result[name] = np.tensordot(factor, stacked[name], axes=(0, 0))
    result["sum_of_squares"] = np.square(result["sketch"]).sum(axis=-1)
    return result if result.shape else result[()]


def differences(after: Summaries, before: Summaries, same: NDArray[np.bool_]) -> Summaries:
    """The linear parts of the summaries of `after - before`, of many tensors at once.

    Each is that of `add([after, before], [1, -1])`, or of `add([after], [0])` where the bits are the same: then nothing
    is left, not even what the sums of the same numbers over other shards differ by.

    Args:
        after: Summaries, one for each tensor.
        before: The same of the tensors that are subtracted.
        same: Whether both hold the same bits.
    """
    result = empty(len(after))
    for name in ("minimum", "maximum", "smallest", *MAXIMA, "row_squares", "column_squares"):
        result[name] = np.nan
    for name in ("count", "nan", "positive_infinity", "negative_infinity"):
        result[name] = np.where(same, after[name], np.maximum(after[name], before[name]))
    with np.errstate(over="ignore", invalid="ignore"):  # moments that overflowed float64
        for name in ("sum", "sketch"):
            alike = same if name == "sum" else same[:, None]
            result[name] = np.where(alike, 0.0 * after[name], after[name] - before[name]) + 0.0  # of zeros 0, not -0
        result["sum_of_squares"] = np.square(result["sketch"]).sum(axis=-1)
    return result


def norm(summaries: Any) -> NDArray[np.float64]:
    """Euclidean norm of the finite elements; NaN if the sum of squares is NaN."""
    with np.errstate(invalid="ignore"):
        return np.asarray(np.sqrt(summaries["sum_of_squares"]))


def norm_of(summary: Any) -> float:
    """The `norm` of one summary. As a square root is rounded correctly, it is that of `norm` to the bit."""
    squares = float(summary["sum_of_squares"])
    return math.sqrt(squares) if squares >= 0.0 else math.nan


def norms_of(summaries: Sequence[Any]) -> list[float]:
    """The `norm` of each of many summaries, which need not lie in one array."""
    squares = np.array([one["sum_of_squares"] for one in summaries], dtype=np.float64)
    with np.errstate(invalid="ignore"):
        found: list[float] = np.sqrt(squares).tolist()
    return found


def is_finite(summary: Any) -> bool:
    """True if no element of a tensor is NaN or infinite."""
    return not (summary["nan"] or summary["positive_infinity"] or summary["negative_infinity"])


def largest(summaries: Any) -> NDArray[np.float64]:
    """Largest |x| of the finite elements; 0 if there are none."""
    found = np.maximum(0.0, np.maximum(summaries["maximum"], -summaries["minimum"]))
    return np.asarray(found + 0.0)  # of zeros 0, not -0


def finite_count(summaries: Any) -> NDArray[np.int64]:
    """Number of elements that are neither NaN nor infinite."""
    return np.asarray(
        summaries["count"] - summaries["nan"] - summaries["positive_infinity"] - summaries["negative_infinity"]
    )


def nonfinite_count(summaries: Any) -> NDArray[np.int64]:
    """Number of elements that are NaN or infinite."""
    return np.asarray(summaries["count"] - finite_count(summaries))


def number(summary: Any) -> float:
    """The value of a one-element tensor, recovered from its summary (`sum` skips NaN and infinities)."""
    if int(summary["nan"]):
        return math.nan
    if int(summary["positive_infinity"]):
        return math.inf
    return -math.inf if int(summary["negative_infinity"]) else float(summary["sum"])


def extremes(summary: Any) -> tuple[float, float]:
    """Smallest and largest element, infinite ones included; NaN if an element is NaN or there are no elements."""
    if int(summary["nan"]) or not int(summary["count"]):
        return math.nan, math.nan
    smallest = -math.inf if int(summary["negative_infinity"]) else float(summary["minimum"])
    return smallest, math.inf if int(summary["positive_infinity"]) else float(summary["maximum"])


def mean(summaries: Any) -> NDArray[np.float64]:
    """Mean of the finite elements; NaN if there are none."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(summaries["sum"] / finite_count(summaries))


def std(summaries: Any) -> NDArray[np.float64]:
    """Population standard deviation of the finite elements, from the float64 moments.

    `sqrt(E[x^2] - E[x]^2)` loses digits when the mean is much larger than the deviation; the
    float64 moments leave about 1e-8 of the mean as its resolution.
    """
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        variance = summaries["sum_of_squares"] / finite_count(summaries) - mean(summaries) ** 2
    return np.asarray(np.sqrt(np.maximum(variance, 0.0)))


def distance(baseline: Any, candidate: Any) -> NDArray[np.float64]:
    """Estimate of `||candidate - baseline||_2` over the finite elements, from the two sketches."""
    with np.errstate(over="ignore", invalid="ignore"):
        difference = candidate["sketch"] - baseline["sketch"]
        return np.asarray(np.sqrt(np.square(difference).sum(axis=-1)))


def scale(summaries: Any, factor: Any) -> Any:
    """Summaries of the tensors multiplied by a positive `factor`.

    Moments, extremes, profiles and sketches are scaled. Counts and fingerprints stay: they describe the bits that were
    observed.
    """
    scaled = np.array(summaries, dtype=SUMMARY)
    factor = np.asarray(factor, dtype=np.float64)
    with np.errstate(over="ignore", invalid="ignore"):  # a recording may hold any numbers
        for name in ("minimum", "maximum", "smallest", "sum"):
            scaled[name] = scaled[name] * factor
        scaled["sum_of_squares"] = scaled["sum_of_squares"] * factor**2
        scaled["sketch"] = scaled["sketch"] * factor[..., None]
        for name in ("row_largest", "column_largest"):
            scaled[name] = scaled[name] * factor[..., None]
        for name in ("row_squares", "column_squares"):
            scaled[name] = scaled[name] * (factor**2)[..., None]
    return scaled if scaled.shape else scaled[()]
