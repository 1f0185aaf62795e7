"""The optional parts of an observation: exponents, signs, the tensor itself. By NumPy, on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from traindiff.detail import Detail, RawTensor
from traindiff.kernels import torch_arrays

EXPONENT_FIRST = -160
"""Binary exponent of the first bin of a histogram; what is smaller is counted there too."""

EXPONENT_BINS = 320
"""Bins of a histogram of exponents, one per binary exponent; the last takes what is larger."""

_CHUNK = 1 << 16


def exponents(values: NDArray[np.generic]) -> NDArray[np.int64]:
    """How many elements have which binary exponent.

    Args:
        values: Any real floating-point dtype that NumPy has, one axis.

    Returns:
        `EXPONENT_BINS` counts: bin k counts finite elements other than zero with
        `floor(log2 |x|) = k + EXPONENT_FIRST`, subnormal ones by their value.
    """
    counts = np.zeros(EXPONENT_BINS, dtype=np.int64)
    for first in range(0, values.size, _CHUNK):
        chunk = values[first : first + _CHUNK].astype(np.float64)
        chunk = chunk[np.isfinite(chunk) & (chunk != 0)]
        # frexp gives x = m * 2^e with 0.5 <= |m| < 1
        exponent = np.frexp(chunk)[1].astype(np.int64) - 1 - EXPONENT_FIRST
        counts += np.bincount(np.clip(exponent, 0, EXPONENT_BINS - 1), minlength=EXPONENT_BINS)
    return counts


def packed_signs(values: NDArray[Any]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """One bit per element: whether it is positive, and whether it has no sign.

    Args:
        values: Any real dtype, one axis.

    Returns:
        Two arrays of `ceil(n / 8)` bytes, the first element in the lowest bit: set where `x > 0`, and
        set where x is zero or NaN. The second is empty where no element is.
    """
    with np.errstate(invalid="ignore"):
        positive = np.packbits(values > 0, bitorder="little")
        signless = (values == 0) | np.isnan(values.astype(np.float64, copy=False))
    none = np.zeros(0, dtype=np.uint8)
    return positive, np.packbits(signless, bitorder="little") if signless.any() else none


def detail_of(tensor: Tensor, wanted: frozenset[str]) -> Detail | None:
    """The wanted parts of a tensor that a summary could be made of; copies what it keeps.

    Args:
        tensor: Any tensor that `traindiff.kernels.summarise` takes.
        wanted: Some of `traindiff.detail.DETAILS`.

    Returns:
        None where nothing was wanted, or for a scalar, of which the summary holds everything.
    """
    if not tensor.dim() or wanted <= {"summary"}:
        return None
    real = torch_arrays.as_real(tensor)
    found = torch_arrays.elements(real)
    kept: dict[str, RawTensor] = {}
    if "tensors" in wanted:
        dtype = torch_arrays.dtype_name(real)
        kept["value"] = RawTensor(dtype=dtype, shape=tuple(real.shape), data=found.bits.tobytes())
    if "signs" in wanted:
        positive, signless = packed_signs(found.values)
        kept |= {"positive": _packed(positive), "signless": _packed(signless)}
    counted = exponents(found.values) if "exponents" in wanted and found.tiny else None
    return Detail(exponents=counted, tensors=kept)


def _packed(bits: NDArray[np.uint8]) -> RawTensor:
    return RawTensor(dtype="uint8", shape=bits.shape, data=bits.tobytes())
