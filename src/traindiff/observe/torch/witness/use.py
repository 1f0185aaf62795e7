"""One use of a parameter in a call of a layer: what it contributes to the gradient, and with what rounding error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from traindiff.core.summary import UNIT_ROUNDOFF
from traindiff.core.witness import PROBES
from traindiff.observe.torch.witness.normalized import Normalized
from traindiff.observe.torch.witness.probes import Extent
from traindiff.observe.torch.witness.products import Products

FLOAT32 = UNIT_ROUNDOFF["float32"]
"""Unit roundoff of float32."""

_TF32 = 2.0**-11
_SHORT = 0.25
"""Part of the squared error of a sum over rows in a short dtype: rounding to nearest, of sums that grow."""

_LEAST_FLOAT16 = 2.0**-25
"""Half the smallest number of float16: gradients below it become zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A parameter as a module holds it in a call.

    Attributes:
        path: Its canonical path.
        leaf: Id of the leaf of the graph that holds it.
        local: Its local elements.
        extent: What these are of it.
        divided: Whether ranks hold different parts of it, or work on different parts of the samples.
    """

    path: str
    leaf: int
    local: Tensor
    extent: Extent
    divided: bool


@dataclass(slots=True, kw_only=True)
class Use:
    """One use of a parameter.

    Attributes:
        path: The parameter's canonical path.
        leaf: Id of the leaf of the graph.
        products: What it contributes, given the gradient of the output of the call.
        result: Unit roundoff of the dtype in which the gradient is computed.
        operand: Unit roundoff of the conversion of the inputs; 0 without one.
        sums: Unit roundoff of the sum over rows.
        width: Numbers that are added up for one probe of one row.
        smallest: Below it, an element of the gradient is lost.
        size: Number of elements of the parameter.
        is_own: Whether each rank that works on the same samples has a term of its own.
        normalized: The normalized input on which `products` depends, if it does.
    """

    path: str
    leaf: int
    products: Callable[[Tensor], Products]
    result: float
    operand: float
    sums: float
    width: int
    smallest: float
    size: int
    is_own: bool
    normalized: Normalized | None = None

    def vector(self, gradient: Tensor) -> Tensor:
        """What it contributes, laid out as `traindiff.core.witness` says; the errors are squared."""
        found = self.products(gradient)
        rows: Any = found.rows
        numbers: Any
        combined: Callable[[Any], Tensor]
        if found.totals.device.type == "cpu":  # where arithmetic in Python is faster
            numbers, combined = found.totals.tolist(), _tensor
            rows = int(rows)
        else:
            numbers, combined = found.totals.unbind(), torch.stack
        *sums, squares = numbers
        mean, squares = sum(one * one for one in sums) / PROBES, squares / PROBES
        growth = self.sums**2 * (1.0 if self.sums <= FLOAT32 else _SHORT) * rows
        exact = UNIT_ROUNDOFF["float64"] if self.sums < FLOAT32 else FLOAT32
        terms = (growth + exact**2 * self.width) * squares
        rounded = self.result**2 * mean + self.smallest**2 * self.size
        return combined([*sums, growth * mean, self.operand**2 * squares, rounded, terms])


def _tensor(numbers: list[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64, device="cpu")


def roundoff(tensor: Tensor) -> float:
    """Unit roundoff of a tensor's dtype; 0 for whole numbers."""
    return _roundoff(tensor.dtype)


@cache
def _roundoff(dtype: torch.dtype) -> float:
    return UNIT_ROUNDOFF.get(str(dtype).removeprefix("torch."), 0.0)


def smallest(*tensors: Tensor) -> float:
    """Half the smallest number of float16, if a tensor is in float16; other dtypes reach far below gradients."""
    return _LEAST_FLOAT16 if any(one.dtype == torch.float16 for one in tensors) else 0.0


def of_matrices(given: Tensor, *, is_convolution: bool) -> float:
    """Unit roundoff of the dtype to which kernels may convert the operands of products in float32."""
    if given.dtype != torch.float32:
        return 0.0
    precision = torch.get_float32_matmul_precision()
    if precision == "medium":
        return UNIT_ROUNDOFF["bfloat16"]
    return _TF32 if precision == "high" or (is_convolution and given.is_cuda) else 0.0
