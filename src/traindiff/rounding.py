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
"""The largest finite number of a dtype: what is larger overflows."""


def rounding(dtype: str) -> float:
    """Floor of one operation in `dtype`: `c * u`; 0 for dtypes without fractions."""
    u = UNIT_ROUNDOFF.get(dtype, 0.0)
    return (32.0 if u <= UNIT_ROUNDOFF["float32"] else 2.0) * u
