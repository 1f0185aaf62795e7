"""The range of magnitudes of a tensor's elements, which is enough to detect NaN and infinity."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from traindiff.core.kernels.registry import EXTENTS, installed
from traindiff.errors import UnsupportedTensorError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Extent:
    """The least and the largest absolute value.

    Attributes:
        smallest: Least absolute value, including infinities; NaN if an element is NaN or there are no elements.
        largest: Largest absolute value, including infinities; NaN if an element is NaN or there are no elements.
        count: Number of elements.
    """

    smallest: float
    largest: float
    count: int

    @property
    def is_finite(self) -> bool:
        """True if all elements are finite."""
        return not self.count or math.isfinite(self.largest)


def extent(tensor: Tensor) -> Extent:
    """The extent of a tensor of any dtype, shape, layout and device. Waits for a device other than the CPU.

    Complex numbers count by their magnitude, at most the largest number of their dtype; booleans as 0 and 1; sparse
    tensors by their stored values; distributed tensors by the part on this rank.

    Raises:
        UnsupportedTensorError: It has no elements that could be read.
    """
    for device_types, fast in installed(EXTENTS):
        if tensor.device.type in device_types and fast.reads(tensor):
            found: Extent = fast.extent(tensor)
            return found
    smallest, largest, count = magnitudes(tensor)
    try:
        return Extent(float(smallest), float(largest), count)
    except RuntimeError as error:  # fake tensors
        raise UnsupportedTensorError(f"its elements cannot be read: {error}") from error


def magnitudes(tensor: Tensor) -> tuple[Tensor, Tensor, int]:
    """The least and the largest absolute value as float64 scalars on the tensor's device, and the number of elements.

    Computed by torch operators, without waiting for the device. See `extent`.

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
    """The elements that a tensor stores on this rank, as real numbers of a dtype that torch computes in; any shape.

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
    """Absolute values of integers in float64: that of the least integer does not fit its own dtype."""
    return values.to(torch.float64).abs()
