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
from typing import Any

import torch

from traindiff.core.torch_compat.execution import inputs_may_be_rounded_to, partial_sums_may_be_short

_SHORT_SUMS = 2.0**-13
"""Unit roundoff with which GPUs add up products of FP8: they keep about 14 bits (DeepSeek-V3 technical report, arXiv
2412.19437, section 3.5.2). It was not measured here."""

_TINY = torch.finfo(torch.float64).tiny

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
        first, second, result = (name_of(dtype) for dtype in (*self.inputs, self.output))
        rounded = f", inputs may be rounded to {self.shortened.upper()}" if self.shortened else ""
        parts = ", parts of sums may be rounded" if self.adds_parts_in_output else ""
        return f"{first} x {second} -> {result}{rounded}{parts}"


def name_of(dtype: torch.dtype) -> str:
    """A dtype as torch spells it without its prefix."""
    return str(dtype).removeprefix("torch.")


Rows = Any
"""One number for each row, float64: a tensor, or an array of NumPy, which is faster for few rows in memory."""


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
    coherence = (partial / terms.clip(_TINY, None)).clip(1.0, math.sqrt(count))
    return math.sqrt(count) * coherence * partial


def allowed(form: Format, sizes: RowSizes, largest_input: Rows) -> Rows:
    """Norm of the largest error of each row that rounding explains; the module's docstring has the formula.

    Args:
        form: The dtypes.
        sizes: Sizes of the rows.
        largest_input: Norm that bounds the elements of the inputs, scalar; for numbers that are too small to be normal.

    Returns:
        Float64, in the shape of the rows, of the same kind as the sizes.
    """
    output, sums = torch.finfo(form.output), torch.finfo(form.sums)
    u_output, u_sums = output.eps / 2.0, sums.eps / 2.0
    if form.device == "cuda" and all(torch.finfo(dtype).bits == 8 for dtype in form.inputs):
        u_sums = _SHORT_SUMS
    bound = u_output * (sizes.result + sizes.rounded + (sizes.added > 0) * (sizes.result + sizes.added))
    bound = bound + u_sums * (added_up(sizes.terms, sizes.partial, sizes.num_terms) + 2.0 * sizes.added)
    if form.shortened:
        u_inputs = 2.0**-11 if form.shortened == "tf32" else 2.0**-8
        bound = bound + 4.0 * u_inputs * sizes.partial
    if form.adds_parts_in_output:
        bound = bound + u_output * math.sqrt(_MOST_SPLITS) * sizes.partial
    # The check itself is computed in float64.
    bound = bound + _EXACT * math.sqrt(sizes.num_columns) * (sizes.partial + sizes.added)
    lost = output.tiny + sums.tiny * sizes.num_terms * (1.0 + largest_input)
    return bound + math.sqrt(sizes.num_columns) * lost
