"""The tensors that operators of a call make, and what is not finite in them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What a floating-point or complex tensor holds: the least and the largest absolute value, and what is not finite.

    Attributes:
        smallest: Least absolute value of the finite elements, as float64; NaN where there are none.
        largest: Largest absolute value of the finite elements; NaN where there are none.
        num_nan: Elements that are NaN.
        num_inf: Elements that are infinite.
    """

    smallest: float
    largest: float
    num_nan: int
    num_inf: int

    @property
    def is_finite(self) -> bool:
        """Whether all elements are."""
        return not (self.num_nan or self.num_inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A tensor that an operator has made, or the gradient that came back to it.

    Attributes:
        position: Of the operator in the call.
        name: Full name of the operator.
        backward: Whether this is the gradient.
        dtype: In which it was computed.
        contents: What it holds.
        of_infinity: Whether the operator was given an infinity that somebody has put there: a mask or a constant.
    """

    position: int
    name: str
    backward: bool
    dtype: torch.dtype
    contents: Contents
    of_infinity: bool = False


def is_inexact(tensor: Tensor) -> bool:
    """Whether a tensor has floating-point or complex elements, which alone can be NaN or infinite."""
    return tensor.is_floating_point() or tensor.is_complex()


def contents(tensor: Tensor) -> Contents:
    """What a floating-point or complex tensor of any shape holds, empty ones too.

    A complex element is NaN or infinite if one of its parts is.
    """
    values = tensor.detach()
    values = values.to(torch.complex128 if values.is_complex() else torch.float64)
    finite = values[values.isfinite()].abs()
    smallest, largest = (float(finite.min()), float(finite.max())) if finite.numel() else (float("nan"),) * 2
    num_nan = int(values.isnan().sum())
    return Contents(
        smallest=smallest, largest=largest, num_nan=num_nan, num_inf=int((~values.isfinite()).sum()) - num_nan
    )  # fmt: skip


def is_finite(tensor: Tensor) -> bool:
    """Whether all elements of a tensor are; those of integers always."""
    return not is_inexact(tensor) or contents(tensor).is_finite
