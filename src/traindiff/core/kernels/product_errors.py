"""How far the rows of a product of matrices are from the exact ones, for the two other products of a linear layer."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from traindiff.core.kernels.registry import PRODUCT_ERRORS, installed
from traindiff.core.kernels.row_errors import Number, Weights, row_errors
from traindiff.core.kernels.row_sums import row_sums

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def product_errors(
    left: Tensor, right: Tensor, made: Tensor, signs: Tensor, added: Tensor | None, by: Weights, largest: Number,
    counts: Sequence[int],
) -> Tensor:  # fmt: skip
    """The errors of the rows of a product.

    Args:
        left: What is multiplied by a matrix; shape (rows, terms), a floating dtype, detached.
        right: The products of the matrix with signs, and the squares of the norms of its rows or columns; float64,
            shape (2, terms), contiguous.
        made: The product; shape (rows, columns), the same.
        signs: Of its columns, float64, contiguous.
        added: What is added to each row, or None; shape (columns,).
        by: What rounding explains, for sizes of rows.
        largest: Norm of the matrix.
        counts: Numbers to put behind those that are returned.

    Returns:
        As `row_errors`, without waiting for a device. On a GPU the median error is rounded to float32.
    """
    for device_types, kernel in installed(PRODUCT_ERRORS):
        tensors = (left, made) if added is None else (left, made, added)
        if left.device.type in device_types and kernel.reads(*tensors):
            found: Tensor = kernel.product_errors(left, right, made, signs, added, by, largest, counts)
            return found
    ones = _ones(signs.numel(), signs.device)
    of_added: tuple[Any, Any] = (0.0, 0.0)
    if added is not None:
        product, square, _ = _numbers(row_sums(added.reshape(1, -1), signs, ones).reshape(3))
        of_added = product, square**0.5
    sums = row_sums(left, right[0], right[1])
    return row_errors(sums, row_sums(made, signs, ones), by, largest, of_added, counts)


@lru_cache(maxsize=4096)
def _ones(count: int, device: torch.device) -> Tensor:
    return torch.ones(count, dtype=torch.float64, device=device)


def _numbers(vector: Tensor) -> Sequence[Any]:
    """The elements of a tensor: numbers, or tensors of one where reading them would wait for a device."""
    return vector.tolist() if vector.device.type == "cpu" else vector.unbind()
