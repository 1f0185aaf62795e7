"""Check of `Y = alpha A B + beta C`: `Y v` against `alpha A (B v) + beta C v` for random signs v.

This is Freivalds' check (R. Freivalds, "Probabilistic machines can use less running time", IFIP 1977). It reads each
matrix once: it costs as much as a product with a few vectors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from traindiff.observe.torch.products.residuals import MOST_ELEMENTS, Residual, norms, residual, signs, zeros
from traindiff.observe.torch.products.rounding import Format, RowSizes, allowed

NUM_PARTS = 8
"""Number of parts of a sum after each of which the partial sum is measured."""

NUM_LANES = 16
"""Number of sums, each of every sixteenth term, that are measured too: vector units add up like this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """One of the two matrices, with the numbers by which its elements are multiplied.

    Attributes:
        values: Shape (matrices, rows, columns), any floating-point dtype.
        scale: Broadcast to `values`; None for 1.
    """

    values: Tensor
    scale: Tensor | None = None

    def part(self, matrices: slice, rows: slice) -> Tensor:
        """Some rows of some matrices, float64."""
        found = self.values[matrices, rows].to(torch.float64)
        if self.scale is None:
            return found
        return found * self.scale.to(torch.float64).expand(self.values.shape)[matrices, rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """A matrix that is added to the product, times a number.

    Attributes:
        projected: Its product with the random signs, shape (matrices, rows, vectors), may be broadcast; float64.
        norms: Norms of its rows, shape (matrices, rows), may be broadcast; float64.
    """

    projected: Tensor
    norms: Tensor


def added(values: Tensor, shape: Sequence[int], beta: float) -> Added:
    """What `beta * values` adds to the rows of a product of this shape; to be called before it may be overwritten."""
    whole = values.expand(shape)
    vectors = signs(shape[-1], values.device)
    projected, sizes = zeros((*shape[:-1], vectors.shape[1]), values.device), zeros(shape[:-1], values.device)
    for matrices, rows in _blocks(shape[0], shape[1], shape[2]):
        part = whole[matrices, rows].to(torch.float64)
        projected[matrices, rows] = part @ vectors * beta
        sizes[matrices, rows] = part.norm(dim=-1) * abs(beta)
    return Added(projected=projected, norms=sizes)


def check(
    left: Factor, right: Factor, output: Tensor, *, alpha: float = 1.0, plus: Added | None = None, form: Format
) -> Residual:
    """Check a product of matrices.

    Args:
        left: Shape (matrices, M, K).
        right: Shape (matrices, K, N).
        output: What was returned, shape (matrices, M, N).
        alpha: Factor of the product.
        plus: What was added to it.
        form: Dtypes.

    Returns:
        One row for each row of `output`: shape (matrices, M). Nothing is synchronized.
    """
    num_matrices, num_rows, num_terms = left.values.shape
    num_columns = output.shape[-1]
    vectors = signs(num_columns, output.device)
    errors, bounds, sizes, scales = (zeros((num_matrices, num_rows), output.device) for _ in range(4))
    each = max(1, MOST_ELEMENTS // max(1, num_rows * (num_terms + num_columns), num_terms * num_columns))
    for first in range(0, num_matrices, each):
        some = slice(first, min(first + each, num_matrices))
        projected, squares = _project(right, some, vectors, alpha)
        largest = squares.sum((-1, -2)).sqrt().amax()
        for _, rows in _blocks(1, num_rows, (some.stop - some.start) * (num_terms + num_columns)):
            factor = left.part(some, rows)
            exact, partial = _sums(factor, projected)
            terms = (factor.square() @ squares).squeeze(-1).sqrt()
            found = output[some, rows].to(torch.float64)
            own = torch.zeros_like(terms)
            if plus is not None:
                exact, own = exact + plus.projected[some, rows], plus.norms[some, rows]
            measured = RowSizes(
                # Not from a few random signs, which may all but cancel in one row of many.
                result=found.norm(dim=-1), added=own, terms=terms, partial=torch.maximum(partial, terms),
                num_columns=num_columns, num_terms=num_terms,
            )  # fmt: skip
            errors[some, rows] = norms(found @ vectors - exact)
            bounds[some, rows] = allowed(form, measured, largest)
            sizes[some, rows], scales[some, rows] = norms(exact), terms
    return residual(errors, bounds, sizes, scales)


def _project(right: Factor, some: slice, vectors: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """The products of `alpha B` with the vectors, and the squared norms of its rows: (matrices, K, vectors or 1)."""
    num_terms, num_columns = right.values.shape[1:]
    projected, squares = [], []
    for _, rows in _blocks(1, num_terms, (some.stop - some.start) * num_columns):
        part = right.part(some, rows)
        projected.append(part @ vectors)
        squares.append(part.norm(dim=-1, keepdim=True).square())
    return torch.cat(projected, 1) * alpha, torch.cat(squares, 1) * alpha**2


def _sums(factor: Tensor, projected: Tensor) -> tuple[Tensor, Tensor]:
    """The product with the projected matrix, and the norm of the largest partial sums of each row."""
    num_terms = factor.shape[-1]
    width = max(1, -(-num_terms // NUM_PARTS))
    total = zeros((*factor.shape[:-1], projected.shape[-1]), factor.device)
    largest = zeros(factor.shape[:-1], factor.device)
    for first in range(0, num_terms, width):
        total = total + factor[..., first : first + width] @ projected[:, first : first + width]
        largest = torch.maximum(largest, norms(total))
    even = num_terms - num_terms % NUM_LANES
    lanes = factor[..., :even].unflatten(-1, (-1, NUM_LANES)).movedim(-1, 0)
    in_lanes = lanes @ projected[:, :even].unflatten(1, (-1, NUM_LANES)).movedim(2, 0)
    return total, torch.maximum(largest, norms(in_lanes).norm(dim=0))


def _blocks(num_matrices: int, num_rows: int, row_elements: int) -> Iterator[tuple[slice, slice]]:
    """Blocks of matrices and rows with at most `MOST_ELEMENTS` elements, or one row."""
    rows = max(1, MOST_ELEMENTS // max(1, row_elements))
    matrices = max(1, rows // max(1, num_rows))
    for first in range(0, num_matrices, matrices):
        for row in range(0, num_rows, rows):
            yield slice(first, min(first + matrices, num_matrices)), slice(row, min(row + rows, num_rows))
