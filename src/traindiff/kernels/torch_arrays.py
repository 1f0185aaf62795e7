"""A torch tensor's elements as NumPy arrays: their values, and their raw bits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.parameter import is_lazy

from traindiff.errors import UnsupportedTensorError

_UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Elements:
    """What a kernel needs of a tensor.

    Attributes:
        values: Elements in row-major order, flat; a view of the tensor's memory where NumPy has
            the dtype, float32 for bfloat16 and float8.
        bits: The same, as unsigned integers.
        tiny: Smallest normal number of the dtype; 0 for dtypes without fractions.
    """

    values: NDArray[np.generic]
    bits: NDArray[np.unsignedinteger]
    tiny: float


def check_supported(tensor: torch.Tensor) -> None:
    """Raise unless a summary can be made of this tensor.

    Raises:
        UnsupportedTensorError: Sparse, quantised, nested, meta or lazy tensors.
    """
    if is_lazy(tensor):
        raise UnsupportedTensorError("a lazy parameter has no elements before the first forward pass")
    if tensor.is_nested:
        raise UnsupportedTensorError("a nested tensor has no dense elements")
    if tensor.layout != torch.strided:
        raise UnsupportedTensorError(f"layout {str(tensor.layout).removeprefix('torch.')} has no dense elements")
    if tensor.is_quantized:
        raise UnsupportedTensorError(f"quantised dtype {dtype_name(tensor)} is not supported")
    if tensor.device.type == "meta":
        raise UnsupportedTensorError("a tensor on the meta device has no elements")
    if tensor.dtype.itemsize not in _UNSIGNED and not tensor.is_complex():
        raise UnsupportedTensorError(f"dtype {dtype_name(tensor)} is not supported")


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The tensor's shape; empty for nested and lazy tensors, which have none."""
    return () if tensor.is_nested or is_lazy(tensor) else tuple(tensor.shape)


def dtype_name(tensor: torch.Tensor) -> str:
    """`float32`, `bfloat16`, ...: torch's name without its prefix."""
    return str(tensor.dtype).removeprefix("torch.")


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """A detached tensor of real numbers: complex ones get a last axis of real and imaginary part."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.resolve_neg()


def elements(tensor: torch.Tensor) -> Elements:
    """Values and bits of a real tensor that `check_supported` accepts. Copies only what is strided.

    Raises:
        UnsupportedTensorError: Its elements cannot be read: fake tensors, those inside a
            transform of `torch.func`, dtypes that torch itself cannot convert.
    """
    try:
        return _elements(tensor)
    except (RuntimeError, TypeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UnsupportedTensorError(f"its elements cannot be read: {reason}") from error


def _elements(tensor: torch.Tensor) -> Elements:
    flat = tensor.contiguous().reshape(-1).cpu()
    dtype = flat.dtype
    bits = flat.view(_UNSIGNED[dtype.itemsize]).numpy()
    if dtype.is_floating_point:
        plain = dtype in (torch.float16, torch.float32, torch.float64)
        values = flat if plain else flat.to(torch.float32)
        return Elements(values=values.numpy(), bits=bits, tiny=torch.finfo(dtype).smallest_normal)
    return Elements(values=flat.numpy(), bits=bits, tiny=0.0)
