"""Freivalds' check of the gradient of a weight: random signs, and the layout of both sides of the identity.

A layer that is linear in its weight W has `dL/dW = sum over rows of g xᵀ`: x is a row that it was given, g the gradient
of the row that it returned. For vectors of random signs a and b,

    aᵀ (dL/dW) b  =  sum over rows of (g·a)(x·b)

The left side is *given* by the gradient, the right side is what is *expected* of it. Both are sums over shards, ranks
and micro-steps. If the gradient is wrong by E, the sides differ by `aᵀ E b`, whose root mean square over random signs
is the Frobenius norm of E (Freivalds, IFIP Congress 1977; Huang and Abraham, IEEE Transactions on Computers 33, 1984).
"""

from __future__ import annotations

from functools import cache
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from traindiff.core.kernels.reference import BLOCK, splitmix64, summarize_array
from traindiff.core.shards import Shard

EXPECTED = "expected"
"""Slot of what inputs and gradients of outputs give: one vector for each micro-step and rank."""

LAYERS = "layers"
"""Slot of the same of the calls of layers that were seen in compiled code, beside what backward passes contributed as
`EXPECTED`. Compiled code may use the parameter in other ways, too."""

GIVEN = "given"
"""Slot of what the gradient of the parameter gives, before it is unscaled or clipped: one vector for each shard."""

PROBES = 4
"""Pairs of random signs. If the gradient is right, a side's error has the root mean square of four normal numbers."""

GROWTH = 4
"""Place of the root mean square of the probes, times the relative rounding error of a sum over so many rows."""

CONVERTED = 5
"""Place of the rounding error of operands that are converted to a shorter dtype before the product."""

ROUNDED = 6
"""Place of the root mean square of the probes, times the unit roundoff of the dtype in which it was computed."""

TERMS = 7
"""Place of the rounding error of a sum over so many rows whose terms cancel each other."""

EDITED = 4
"""Place, on the given side, of 1 if the training wrote to the gradient after the backward pass, and else 0."""

CONTRIBUTED = 5
"""Place, on the given side, of 1 if what backward passes contributed was taken as it is, and else 0."""

SIZE = 8
"""Numbers of a vector, in float64. The errors are root mean squares, of the same unit as the probes."""

OF_OUTPUT, OF_INPUT = "output[0].check", "input[0].check"
"""Slots of the checks of a linear layer's output, and of the gradient of its input: a vector each, of the `CHECKED`."""

CHECKED = ("residual", "row", "median", "error", "allowed", "terms", "rows", "positions")
"""Numbers of such a vector: the error of the worst row, in units of what rounding explains; the number of this row, in
row-major order; the median of these errors over the rows that are not exact; the error of the whole, relative to its
size, and the one that rounding explains; the number of terms of an element; the number of rows, and of rows of one
element of the first axis."""

__all__ = [
    "CHECKED", "CONTRIBUTED", "CONVERTED", "EDITED", "EXPECTED", "GIVEN", "GROWTH", "LAYERS", "OF_INPUT", "OF_OUTPUT",
    "PROBES", "ROUNDED", "SIZE", "TERMS", "elements", "signs", "signs_of",
]  # fmt: skip


def signs_of(path: str, side: str) -> str:
    """The name of the signs of a parameter, given by its canonical path.

    Axis 0 of a parameter has its rows; columns are all other axes, flattened. Rows have signs by the module, so that a
    bias has those of its weight. Columns have signs by the module around it, so that layers of one module which are
    given the same input, such as those of queries, keys and values, have the same: the input is multiplied once.

    Args:
        path: Canonical path.
        side: `rows` or `columns`.
    """
    module = path.rpartition(".")[0]
    return f"rows {module}" if side == "rows" else f"columns {module.rpartition('.')[0]}"


def signs(name: str, first: int, count: int) -> NDArray[np.int8]:
    """Random signs of some rows, or columns. They depend on nothing else, so all ranks have the same.

    Args:
        name: As `signs_of` gives it.
        first: First row or column, from 0.
        count: Number of rows or columns.

    Returns:
        1 and -1, shape (count, PROBES).
    """
    seed = np.uint64(crc32(name.encode())) << np.uint64(32)
    index: NDArray[Any] = np.arange(first, first + count, dtype=np.uint64)[:, None] * np.uint64(PROBES)
    index = index + np.arange(PROBES, dtype=np.uint64)
    words, place = np.unique(index // np.uint64(BLOCK), return_inverse=True)
    bits = splitmix64(splitmix64(seed) ^ words)[place.reshape(index.shape)] >> (index % np.uint64(BLOCK))
    return np.where(bits & np.uint64(1), -1, 1).astype(np.int8)


def elements(summary: Any) -> NDArray[np.float64]:
    """The elements of the vector that a summary is of; NaN if one of them is not finite.

    Each of its `SIZE` elements is alone in a bucket of the sketch, so the sketch holds them exactly.
    """
    if int(summary["nan"]) or int(summary["positive_infinity"]) or int(summary["negative_infinity"]):
        return np.full(SIZE, np.nan)
    buckets, sign = _places()
    return np.asarray(summary["sketch"][buckets] * sign, dtype=np.float64)


@cache
def _places() -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """The bucket of each element of a vector, and its sign there."""
    whole = Shard.whole((SIZE,))
    bits: NDArray[Any] = np.zeros(SIZE, dtype=np.uint64)
    sketches = np.array([summarize_array(row, bits, whole, tiny=1.0)["sketch"] for row in np.eye(SIZE)])
    buckets = np.abs(sketches).argmax(axis=1)
    return buckets, sketches[np.arange(SIZE), buckets]
