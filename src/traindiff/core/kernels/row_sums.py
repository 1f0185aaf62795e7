"""Sums over the rows and columns of a matrix in float64, for checks of products of matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from traindiff.core.kernels.registry import ROW_SUMS, TABLE_SUMS, installed

if TYPE_CHECKING:
    from torch import Tensor

LANES = 8
"""Numbers that are added up side by side."""

BLOCK = 256
"""Columns after which the CPU kernel looks at the sum so far."""

_AT_ONCE = 1 << 22
"""Elements of a matrix that are converted to float64 at once."""


def row_sums(matrix: Tensor, factors: Tensor, squares: Tensor) -> Tensor:
    """Weighted sums of the elements of each row, and of their squares.

    Args:
        matrix: Shape (rows, columns), any strides, a floating dtype. Detached from graphs.
        factors: float64, shape (columns,), contiguous.
        squares: float64, shape (columns,), contiguous.

    Returns:
        float64, shape (3, rows): the sum of the elements times `factors`; the sum of their squares times `squares`; and
        the square of the largest partial sum of the first, over blocks of columns or in lanes. Where columns are few
        the last is that over lanes.
    """
    for device_types, kernel in installed(ROW_SUMS):
        if matrix.device.type in device_types and kernel.reads(matrix):
            found: Tensor = kernel.row_sums(matrix, factors, squares)
            return found
    at_once = max(1, _AT_ONCE // max(1, matrix.shape[1]))
    return torch.cat([_sums(part.double(), factors, squares) for part in matrix.split(at_once)] or [
        factors.new_zeros(3, 0)
    ], 1)  # fmt: skip


def _sums(matrix: Tensor, factors: Tensor, squares: Tensor) -> Tensor:
    terms = matrix * factors
    columns = terms.shape[1]
    padded = torch.nn.functional.pad(terms, (0, -columns % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).sum(2).cumsum(1)
    lanes = padded.unflatten(1, (-1, LANES)).sum(1)
    largest = torch.cat([blocks.square(), lanes.square().sum(1, keepdim=True)], 1).amax(1)
    return torch.stack([lanes.sum(1), matrix.square() @ squares, largest])


def table_sums(matrix: Tensor, row_factors: Tensor, column_factors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted sums of the elements of each column and of each row, and of their squares.

    Args:
        matrix: Shape (rows, columns), any strides, a floating dtype. Detached from graphs.
        row_factors: float64, shape (rows,), contiguous.
        column_factors: float64, shape (columns,), contiguous.

    Returns:
        float64, shape (2, columns): for each column the sum over rows of its elements times `row_factors`, and of their
        squares. float64, shape (2, rows): for each row the same with `column_factors`. float64, a scalar: the norm of
        the matrix.
    """
    for device_types, kernel in installed(TABLE_SUMS):
        if matrix.device.type in device_types and kernel.reads(matrix):
            found: tuple[Tensor, Tensor, Tensor] = kernel.table_sums(matrix, row_factors, column_factors)
            return found
    by_column, by_row = column_factors.new_zeros(2, matrix.shape[1]), []
    at_once = max(1, _AT_ONCE // max(1, matrix.shape[1]))
    for part, factors in zip(matrix.split(at_once), row_factors.split(at_once), strict=True):
        values = part.double()
        squares = values.square()
        by_column += torch.stack([factors @ values, squares.sum(0)])
        by_row.append(torch.stack([values @ column_factors, squares.sum(1)]))
    rows = torch.cat(by_row, 1) if by_row else row_factors.new_zeros(2, 0)
    return by_column, rows, rows[1].sum().sqrt()
