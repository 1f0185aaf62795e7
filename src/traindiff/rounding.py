"""What the dtypes of floating-point numbers round."""

from __future__ import annotations

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


def rounding(dtype: str) -> float:
    """Floor of one operation in `dtype`: `c * u`; 0 for dtypes without fractions."""
    u = UNIT_ROUNDOFF.get(dtype, 0.0)
    return (32.0 if u <= UNIT_ROUNDOFF["float32"] else 2.0) * u
