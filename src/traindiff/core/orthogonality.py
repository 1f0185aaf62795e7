"""Sums over ranks that tell whether the update of a matrix may be orthogonal; see `SUMS`.

Muon's update of a matrix M is `U = M p(MᵀM)`: Newton-Schulz iterations keep the singular vectors of M, and map each
singular value s to f(s / |M|), for a known polynomial f that is nearly constant but near 0. A rank that holds rows of U
and M cannot compute f, but norms and inner products of its rows add up over ranks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

TERMS = "terms"
"""Stage of the sums in the phase `update`."""

PROBES = 2
"""Vectors of random signs, those of columns in `traindiff.core.witness`."""

SUMS = ("rows", "update", "rounding", "momentum", "inner", "gram", "probe[0]", "probe[1]")
"""The places of the sums: the number of rows, or -1 times the number of columns if these are divided; the squared
Frobenius norms of U, of its rounding and of M; the inner product of U and M; the Frobenius norm of the Gram matrix of
M, whose sum over ranks is not less than that of the whole matrix; the squared norms of U times each of `PROBES` vectors
of random signs."""

SIZE = len(SUMS)
"""Numbers of a vector, in float64."""

Vector = NDArray[np.float64]

_POINTS = 4096


def singular_values(coefficients: tuple[float, float, float], iterations: int) -> tuple[Vector, Vector]:
    """What Newton-Schulz iterations make of singular values, relative to the Frobenius norm: between 0 and 1.

    Returns:
        Singular values, ascending, and what becomes of them.
    """
    a, b, c = coefficients
    before = np.geomspace(1e-6, 1.0, _POINTS)
    after = before.copy()
    for _ in range(iterations):
        after = after * (a + b * after**2 + c * after**4)
    return before, after
