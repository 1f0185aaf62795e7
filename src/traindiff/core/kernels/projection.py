"""Products of matrices with vectors of signs, for the witness of gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from traindiff.core.kernels.registry import PROJECTIONS, installed
from traindiff.core.witness import PROBES

if TYPE_CHECKING:
    from torch import Tensor

LANES = 8
"""Numbers that the CPU kernel adds up side by side."""

BLOCK = 256
"""Columns whose numbers the CPU kernel adds up in float32, in each lane, before it adds these sums in float64."""

TOTALS = PROBES + 2
"""Numbers that `summed` returns."""

_AT_ONCE = 1 << 24
"""Elements of a matrix in a short dtype that are converted to float32 at once."""


def projected(matrix: Tensor, signs: Tensor) -> Tensor:
    """Each row of a matrix times each vector of signs.

    The CPU kernel adds up float32, and what is converted to it, in float32 within blocks of 256 columns: with the unit
    roundoff u, the error of a product is at most 31 u times the sum of the row's magnitudes, and about 2 u times the
    row's norm. Without the kernel it is that of torch's product of matrices in float32. float64 stays float64.

    Args:
        matrix: Shape (rows, columns), any strides, a floating dtype. Detached from graphs.
        signs: 1 and -1, shape (PROBES, columns), contiguous; float64 for a matrix in float64, else float32.

    Returns:
        float64, shape (rows, PROBES), on the matrix's device. Not a number, or infinite, for rows that have such an
        element.
    """
    for device_types, kernel in installed(PROJECTIONS):
        if matrix.device.type in device_types and kernel.reads(matrix):
            found: Tensor = kernel.projected(matrix, signs)
            return found
    at_once = max(1, _AT_ONCE // max(1, matrix.shape[1]))
    parts = [part.to(signs.dtype) @ signs.T for part in matrix.split(at_once)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).double()


def normalized(matrix: Tensor, gradient: Tensor, signs: Tensor, *, eps: float, centered: bool) -> tuple[Tensor, Tensor]:
    """`projected` of the rows of a matrix, each normalized and multiplied by a row of another one, element by element.

    Args:
        matrix: Shape (rows, columns), a floating dtype. Detached from graphs. A row is divided by the root of the mean
            of its squares plus `eps`.
        gradient: The other matrix, of the same shape and dtype.
        signs: See `projected`.
        eps: See above.
        centered: Subtract the mean of a row before.

    Returns:
        float64, shape (rows, PROBES). Terms are in float32 at least. And a scalar, float64: the sum over all elements
        of the squares of the gradient times the row's mean, divided by what the row is divided by. Without `centered`
        it is 0.
    """
    for device_types, kernel in installed(PROJECTIONS):
        if matrix.device.type in device_types and kernel.reads(matrix) and kernel.reads(gradient):
            found: tuple[Tensor, Tensor] = kernel.normalized(matrix, gradient, signs, eps=eps, centered=centered)
            return found
    x, g = matrix.to(signs.dtype), gradient.to(signs.dtype)
    mean = x.mean(1, keepdim=True) if centered else x.new_zeros(())
    x = x - mean
    scale = (x.square().mean(1, keepdim=True) + eps).rsqrt()
    return projected(g * x * scale, signs), (g * (mean * scale)).double().square().sum()


def summed(left: Tensor, right: Tensor) -> Tensor:
    """The sum over rows of the products of two tables' elements.

    Args:
        left: float64, shape (rows, PROBES), contiguous.
        right: The same shape, or a single row that counts for all.

    Returns:
        float64, shape (TOTALS,): the sums of the columns of products, then the sum of all their squares, then the sum
        of the squares of the differences from the products of the row before; from 0 for the first row.
    """
    for device_types, kernel in installed(PROJECTIONS):
        if left.device.type in device_types:
            found: Tensor = kernel.summed(left, right)
            return found
    terms = left * right
    changes = terms[:1].square().sum() + terms.diff(dim=0).square().sum()
    return torch.cat([terms.sum(0), torch.stack([terms.square().sum(), changes])])
