"""Compare two summaries: exact where they are defined to be, to float64 rounding elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np

from traindiff.core import summary

EXACT = (
    "count", "nan", "positive_infinity", "negative_infinity", "zero", "negative", "subnormal", "minimum", "maximum",
    "smallest", "fingerprint", "multiset", "nonfinite",
)  # fmt: skip
LARGEST = ("row_largest", "column_largest")
LINEAR = ("sum", "sketch")
SQUARED = ("sum_of_squares", "row_squares", "column_squares")

_OVERFLOWS = 1e150  # the square of anything above may be infinite


def assert_equal_up_to_rounding(actual: Any, expected: Any) -> None:
    assert set(SUMMARY_NAMES) == {*EXACT, *LARGEST, *LINEAR, *SQUARED}
    for name in (*EXACT, *LARGEST):
        np.testing.assert_array_equal(actual[name], expected[name], err_msg=name)
    largest = float(summary.largest(expected))
    if largest > _OVERFLOWS:
        return
    # Every partial sum is at most count * largest; each of count roundings is half a unit of that.
    tolerance = 1e-15 * float(expected["count"])
    for name in LINEAR:
        np.testing.assert_allclose(actual[name], expected[name], rtol=1e-13, atol=tolerance * largest, err_msg=name)
    for name in SQUARED:
        np.testing.assert_allclose(actual[name], expected[name], rtol=1e-13, atol=tolerance * largest**2, err_msg=name)


SUMMARY_NAMES = summary.SUMMARY.names or ()
