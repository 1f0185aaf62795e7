"""A MindSpore tensor's elements as NumPy arrays: their values, and their raw bits."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from traindiff.errors import UnsupportedTensorError
from traindiff.kernels.elements import Elements

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SMALLEST_NORMAL_OF_BFLOAT16 = 2.0**-126


def read(tensor: Any) -> NDArray[Any]:
    """The elements of a tensor where they are, after what computes them; the array must not be kept or written to.

    Raises:
        UnsupportedTensorError: It has no dense elements.
    """
    if not hasattr(tensor, "asnumpy"):
        raise UnsupportedTensorError(f"a {type(tensor).__name__} has no dense elements")
    array: NDArray[Any] = tensor.asnumpy()
    return array


def as_real(array: NDArray[Any]) -> NDArray[Any]:
    """An array of real numbers: complex ones get a last axis of real and imaginary part."""
    if array.dtype.kind != "c":
        return array
    part = np.float32 if array.dtype.itemsize == 8 else np.float64
    return np.ascontiguousarray(array).view(part).reshape(*array.shape, 2)


def elements(array: NDArray[Any]) -> Elements:
    """Values and bits of an array of real numbers. Copies only what is strided.

    Args:
        array: Any shape; of a dtype that NumPy has, or bfloat16 as MindSpore registers it.

    Raises:
        UnsupportedTensorError: Its dtype is no number.
    """
    flat = np.ascontiguousarray(array).reshape(-1)
    name, width = flat.dtype.name, flat.dtype.itemsize
    if width not in _UNSIGNED or not (flat.dtype.kind in "biuf" or name == "bfloat16"):
        raise UnsupportedTensorError(f"dtype {name} is not supported")
    bits = flat.view(_UNSIGNED[width])
    if name == "bfloat16":
        values = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return Elements(values=values, bits=bits, tiny=_SMALLEST_NORMAL_OF_BFLOAT16)
    if flat.dtype.kind == "f":
        return Elements(values=flat, bits=bits, tiny=float(np.finfo(flat.dtype).smallest_normal))
    return Elements(values=flat.view(np.uint8) if flat.dtype.kind == "b" else flat, bits=bits, tiny=0.0)
