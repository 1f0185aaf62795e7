"""How far the rows of a product are from the exact ones, in units of what rounding explains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from traindiff.core.kernels.registry import ROW_ERRORS, installed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

TINY = torch.finfo(torch.float64).tiny

NUMBERS = 5
"""Numbers that tell of the rows."""


Number = Any
"""A number, or a tensor of one, float64."""


class Bound(NamedTuple):
    """The error of a row that rounding explains, `result * R + partial * P + coherent * C * P + constant`.

    R is the norm of the result, and P that of the largest partial sum. C is P divided by the root of the sum of the
    squared terms, at least 1 and at most `most`. Numbers, or tensors of one, float64.

    Attributes:
        offset: What is added to the product of each row and signs; no part of the error.
        result: See above.
        partial: See above.
        coherent: See above.
        most: See above.
        constant: See above.
    """

    offset: Number
    result: Number
    partial: Number
    coherent: Number
    most: Number
    constant: Number


class Weights(NamedTuple):
    """What multiplies the sizes of a row in the bound of its error.

    Attributes:
        output: Of what is rounded to the dtype of the output: the result, and, if something is added, the product.
        added: Of the norm of what is added, beside that.
        partial: Of the largest partial sum.
        coherent: Of the same, times its size in units of the terms'.
        most: Largest such size.
        lost: Lost with numbers that are too small to be normal.
        lost_by_input: The same, times the norm of the inputs.
    """

    output: float
    added: float
    partial: float
    coherent: float
    most: float
    lost: float
    lost_by_input: float


def bound_of(by: Weights, largest: Number, added: tuple[Number, Number]) -> Bound:
    """What rounding explains for rows to all of which the same is added; for the arguments see `row_errors`."""
    product, norm = added
    rounded = by.output * (norm > 0)
    return Bound(
        offset=product, result=by.output + rounded, partial=by.partial, coherent=by.coherent, most=by.most,
        constant=by.lost + by.lost_by_input * largest + (by.added + rounded) * norm,
    )  # fmt: skip


def row_errors(
    sums: Tensor, made: Tensor, by: Weights, largest: Number, added: tuple[Number, Number], counts: Sequence[int] = ()
) -> Tensor:
    """The largest error, its row, the median error, and the error of all rows.

    Args:
        sums: What the rows should be, as `row_sums` gives it.
        made: What they are.
        by: What rounding explains, for sizes of rows.
        largest: Norm that bounds the elements of the inputs, for numbers that are too small to be normal.
        added: Sum of what is added to each row, times signs, and its norm; zeros if nothing is.
        counts: Numbers to put behind those that are returned.

    Returns:
        float64, shape (5 + counts,): the largest error of a row, in units of what rounding explains; the first row that
        has it; the (lower) median of those that are not 0; and the norms of the errors and of what rounding explains,
        divided by the larger one of the norms of the terms and of the result. Rows that are not finite count as right;
        what is divided by 0 is 0.
    """
    for device_types, kernel in installed(ROW_ERRORS):
        if sums.device.type in device_types:
            found: Tensor = kernel.row_errors(sums, made, by, largest, added, counts)
            return found
    bound = bound_of(by, largest, added)
    terms, result = sums[1].sqrt(), made[1].sqrt()
    partial = torch.maximum(sums[2].sqrt(), torch.maximum(terms, result))
    coherence = torch.minimum((partial / terms.clamp_min(TINY)).clamp_min(1.0), terms.new_tensor(bound.most))
    errors = (made[0] - (sums[0] + bound.offset)).abs()
    bounds = bound.result * result + (bound.partial + bound.coherent * coherence) * partial + bound.constant
    ratios = errors / bounds
    known = ratios.isfinite()
    ratios = torch.where(known, ratios, 0.0)
    sizes = (torch.where(known, one, 0.0).square().sum().sqrt() for one in (terms, result, errors, bounds))
    of_terms, of_result, *norms = sizes
    size = torch.maximum(of_terms, of_result)
    median = torch.where(ratios > 0, ratios, torch.nan).nanmedian()
    shares = (torch.where(size > 0, one / size, 0.0) for one in norms)
    numbers = torch.stack([ratios.max(), ratios.argmax(), median, *shares]).nan_to_num(nan=0.0)
    return torch.cat([numbers, numbers.new_tensor(counts)])
