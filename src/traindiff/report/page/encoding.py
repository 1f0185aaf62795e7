"""Arrays as text within a page: sizes on a logarithmic scale in 16 bits, deflated, in base 64."""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

MISSING, ZERO, INFINITE = 0, 1, 65535
"""Codes of what has no logarithm."""

LOWEST, HIGHEST = -64.0, 128.0
"""Binary logarithms of the smallest and largest size that is told from others: 5e-20, and that of float32."""

STEPS = INFINITE - 2 - 2
"""Codes from the lowest to the highest; one is a factor of 1.002."""


def log_codes(values: NDArray[Any]) -> NDArray[np.uint16]:
    """Sizes as 16-bit codes that are linear in their logarithm.

    Args:
        values: Any shape; signs are lost, and NaN means that there is none.

    Returns:
        Codes of the same shape, within 0.1 % of the sizes.
    """
    sizes = np.abs(np.asarray(values, dtype=np.float64))
    with np.errstate(divide="ignore", invalid="ignore"):
        place = (np.log2(sizes) - LOWEST) * (STEPS / (HIGHEST - LOWEST))
    codes = 2 + np.clip(np.nan_to_num(np.rint(place), nan=0.0, posinf=STEPS, neginf=0.0), 0, STEPS)
    codes = np.where(np.isnan(sizes), MISSING, np.where(sizes == 0, ZERO, np.where(np.isinf(sizes), INFINITE, codes)))
    return np.asarray(codes, dtype=np.uint16)


def packed(values: NDArray[Any]) -> dict[str, Any]:
    """An array for the page: its name of a typed array, its shape, and its little-endian bytes, deflated, in base 64.

    Bytes of the same significance stand together, which deflates better.
    """
    little = np.ascontiguousarray(values).astype(values.dtype.newbyteorder("<"), copy=False)
    size = little.dtype.itemsize
    planes = np.frombuffer(little.tobytes(), dtype=np.uint8).reshape(-1, size).T
    deflated = zlib.compress(np.ascontiguousarray(planes).tobytes(), 6)
    return {
        "type": _TYPES[values.dtype.name],
        "shape": list(values.shape),
        "data": base64.b64encode(deflated).decode("ascii"),
    }


_TYPES = {"uint16": "Uint16Array", "float32": "Float32Array", "float64": "Float64Array"}
