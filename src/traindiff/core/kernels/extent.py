"""Between which magnitudes the elements of a tensor lie: all that is needed to see what is not finite."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch

from traindiff.errors import UnsupportedTensorError

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Extent:
    """The least and the largest absolute value.

    Attributes:
        smallest: Least absolute value, infinities included; NaN where an element is NaN, or where there are no
            elements.
        largest: Largest absolute value; NaN and infinite as above.
        count: Elements.
    """

    smallest: float
    largest: float
    count: int

    @property
    def is_finite(self) -> bool:
        """Whether all elements are."""
        return not self.count or math.isfinite(self.largest)


def extent(tensor: Tensor) -> Extent:
    """The extent of a tensor of any dtype, shape, layout and device. On another device than the CPU it waits for it.

    Complex numbers count by their magnitudes, or by the largest number of their dtype where that is less, booleans as
    0 and 1, sparse tensors by the values that they store, and distributed ones by what this rank holds.

    Raises:
        UnsupportedTensorError: It has no elements that could be read.
    """
    for device_types, fast in _kernels():
        if tensor.device.type in device_types and fast.reads(tensor):
            found: Extent = fast.extent(tensor)
            return found
    smallest, largest, count = magnitudes(tensor)
    try:
        return Extent(float(smallest), float(largest), count)
    except RuntimeError as error:  # fake tensors
        raise UnsupportedTensorError(f"its elements cannot be read: {error}") from error


@cache
def _kernels() -> list[tuple[frozenset[str], ModuleType]]:
    """The kernels whose packages are installed."""
    from traindiff.core.kernels.registry import EXTENTS

    return [(kernel.device_types, module) for kernel in EXTENTS if (module := kernel.load()) is not None]


def magnitudes(tensor: Tensor) -> tuple[Tensor, Tensor, int]:
    """The least and the largest absolute value as float64 scalars on the tensor's device, and the number of elements.

    By torch's own operators, which wait for nothing. See `extent`.

    Raises:
        UnsupportedTensorError: It has no elements that could be read.
    """
    try:
        with torch.no_grad():
            values = stored_values(tensor)
            if not values.numel():
                nothing = torch.full((), math.nan, dtype=torch.float64)
                return nothing, nothing, 0
            least, most = torch.aminmax(values.abs() if values.dtype.is_floating_point else _of_integers(values))
            return least.to(torch.float64), most.to(torch.float64), values.numel()
    except (RuntimeError, TypeError, NotImplementedError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UnsupportedTensorError(f"its elements cannot be read: {reason}") from error


def stored_values(tensor: Tensor) -> Tensor:
    """The elements that a tensor stores here, as real numbers of a dtype that torch computes in; any shape.

    Raises:
        UnsupportedTensorError: There are none.
    """
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if tensor.device.type == "meta":
        raise UnsupportedTensorError("a tensor on the meta device has no elements")
    if tensor.is_nested:
        parts = tensor.unbind()
        tensor = torch.cat([part.reshape(-1) for part in parts]) if parts else torch.empty(0)
    if tensor.layout != torch.strided:
        tensor = tensor.coalesce().values() if tensor.layout == torch.sparse_coo else tensor.values()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.is_complex():
        magnitudes, largest = tensor.abs(), torch.finfo(tensor.dtype).max
        return torch.where(tensor.isfinite() & magnitudes.isinf(), largest, magnitudes)
    short = tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1
    return tensor.to(torch.float32) if short else tensor


def _of_integers(values: Tensor) -> Tensor:
    """Absolute values of integers, of the least one too, which its own dtype cannot hold."""
    return values.to(torch.float64).abs()
