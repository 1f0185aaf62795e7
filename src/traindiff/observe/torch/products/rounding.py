"""How far a right product may be from the exact one: what its format allows.

A product `Y = A B` with K terms per element is computed exactly as its inputs are given, but for these roundings. The
bounds are for the norm of a row, and u is the unit roundoff (half the distance of 1 to the next number):

* The result is rounded to the dtype of the output: `u(output) ||Y||`. If a matrix C is added to the product, the
  product may be rounded before: `u(output) (||Y|| + ||C||)` more. A transposed convolution, or the gradient of a
  convolution's input, may first make the product of each position of the kernel, and round it to the dtype of the
  output: `u(output) sqrt(positions) max(T, ||Y||)` more, with the T of
  the next point. On a CPU, the gradient of a convolution's weight may be added up in this dtype, image by image: as in
  the next point, with the images in place of the terms.
* Terms are added up in the accumulator, usually float32. K roundings of partial sums of size `S` add up to
  `u sqrt(K) S` if they are random (Higham and Mary, "A new approach to probabilistic rounding error analysis", SIAM J.
  Sci. Comput. 41, 2019), and to `u K S` at most. They are random where the terms have random signs, so that partial
  sums grow like the root of the sum of the squared terms, `T`. They need not be where all terms agree in sign, so that
  `S / T` reaches `sqrt(K)`. `u sqrt(K) S (S / T)` is the former in the first case, and the latter in the second.
* If the user's settings allow it, inputs are first rounded to a shorter dtype, e.g. to TF32: `2 u(input) S`, and twice
  that where the hardware cuts digits off.

Numbers below the smallest normal one are lost in an absolute sense.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from traindiff.core.kernels.row_errors import TINY, Weights
from traindiff.core.kernels.torch_arrays import name_of_dtype
from traindiff.core.torch_compat.operators import inputs_may_be_rounded_to, partial_sums_may_be_short

_SHORT_SUMS = 2.0**-13
"""Unit roundoff with which GPUs add up products of FP8: they keep about 14 bits (DeepSeek-V3 technical report, arXiv
2412.19437, section 3.5.2). It was not measured here."""

_EXACT = torch.finfo(torch.float64).eps

_MOST_SPLITS = 64
"""Number of parts of a sum, at most, that a library adds up in the dtype of the output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """The dtypes of a product, and what the user's settings let the library do.

    Attributes:
        inputs: Dtypes of the two factors.
        output: Dtype of the result.
        device: Type of the device.
        is_convolution: True for a convolution, which has settings of its own.
    """

    inputs: tuple[torch.dtype, torch.dtype]
    output: torch.dtype
    device: str
    is_convolution: bool = False

    @property
    def sums(self) -> torch.dtype:
        """Dtype in which terms are added up."""
        longest = max((*self.inputs, self.output), key=lambda dtype: torch.finfo(dtype).bits)
        return torch.float64 if longest == torch.float64 else torch.float32

    @property
    def shortened(self) -> str:
        """The shorter format to which the library may round float32 inputs: `tf32`, `bf16`, or empty."""
        if self.inputs != (torch.float32, torch.float32):
            return ""
        return inputs_may_be_rounded_to(self.device, convolution=self.is_convolution)

    @property
    def adds_parts_in_output(self) -> bool:
        """True if the library may add up parts of a sum in the dtype of the output."""
        return partial_sums_may_be_short(self.device, self.output)

    def __str__(self) -> str:
        first, second, result = (name_of_dtype(dtype) for dtype in (*self.inputs, self.output))
        rounded = f", inputs may be rounded to {self.shortened.upper()}" if self.shortened else ""
        parts = ", parts of sums may be rounded" if self.adds_parts_in_output else ""
        return f"{first} x {second} -> {result}{rounded}{parts}"


Rows = Any
"""One number for each row, or for all, float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSizes:
    """Sizes of the rows of a product, all of one shape, which `added` may be broadcast to.

    Attributes:
        result: Norm of the result.
        added: Norm of what is added to the product; 0 if nothing is.
        terms: Root of the sum of the squares of all terms.
        partial: Norm of the largest partial sum; at least `terms`.
        rounded: Norm of what is rounded to the dtype of the output beside the result.
        num_columns: Number of elements of a row.
        num_terms: Number of terms of an element.
    """

    result: Rows
    added: Rows
    terms: Rows
    partial: Rows
    rounded: Rows = 0.0
    num_columns: int
    num_terms: int


def added_up(terms: Rows, partial: Rows, count: int) -> Rows:
    """Largest error of a sum of so many numbers, in units of the roundoff with which they are added up.

    Args:
        terms: Root of the sum of the squares of the numbers.
        partial: Size of the largest partial sum; at least `terms`.
        count: Number of numbers.
    """
    return math.sqrt(count) * _coherence(terms, partial, count) * partial


def _coherence(terms: Rows, partial: Rows, count: int) -> Rows:
    """How much larger a partial sum is than one of numbers with random signs."""
    return (partial / terms.clip(TINY, None)).clip(1.0, math.sqrt(count))


def weights(form: Format, num_columns: int, num_terms: int) -> Weights:
    """The weights for rows of so many elements with so many terms, as the user's settings are now; see the module."""
    return _weights(form, form.shortened, form.adds_parts_in_output, num_columns, num_terms)


def precision_of_products() -> tuple[Any, ...]:
    """What the user's settings say now of products of matrices on the CPU; `weights` depend on it."""
    return inputs_may_be_rounded_to("cpu", convolution=False), partial_sums_may_be_short("cpu", torch.float16)


@lru_cache(maxsize=4096)
def _weights(form: Format, shortened: str, parts: bool, num_columns: int, num_terms: int) -> Weights:  # noqa: FBT001
    output, sums = torch.finfo(form.output), torch.finfo(form.sums)
    u_output, u_sums = output.eps / 2.0, sums.eps / 2.0
    if form.device == "cuda" and all(torch.finfo(dtype).bits == 8 for dtype in form.inputs):
        u_sums = _SHORT_SUMS
    width = math.sqrt(num_columns)
    check = _EXACT * width  # the check itself is computed in float64
    of_inputs = 4.0 * (2.0**-11 if shortened == "tf32" else 2.0**-8) if shortened else 0.0
    of_parts = u_output * math.sqrt(_MOST_SPLITS) if parts else 0.0
    small = sums.tiny * num_terms
    return Weights(
        output=u_output, added=2.0 * u_sums + check, partial=of_inputs + of_parts + check,
        coherent=u_sums * math.sqrt(num_terms), most=math.sqrt(num_terms), lost=width * (output.tiny + small),
        lost_by_input=width * small,
    )  # fmt: skip


def allowed(form: Format, sizes: RowSizes, largest_input: Rows) -> Rows:
    """Norm of the largest error of each row that rounding explains; the module's docstring has the formula.

    Args:
        form: The dtypes.
        sizes: Sizes of the rows.
        largest_input: Norm that bounds the elements of the inputs, scalar; for numbers that are too small to be normal.

    Returns:
        Float64, in the shape of the rows, of the same kind as the sizes.
    """
    by = weights(form, sizes.num_columns, sizes.num_terms)
    bound = by.output * (sizes.result + sizes.rounded + (sizes.added > 0) * (sizes.result + sizes.added))
    summed = by.partial + by.coherent * _coherence(sizes.terms, sizes.partial, sizes.num_terms)
    return bound + by.added * sizes.added + summed * sizes.partial + by.lost + by.lost_by_input * largest_input
