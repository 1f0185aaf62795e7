"""Sums over rows and columns in float64 on a GPU; see `traindiff.core.kernels.row_sums`. Nothing waits for it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from traindiff.core.kernels.gpu.enqueue import FLOATS, doubles, enqueue, load
from traindiff.core.kernels.row_sums import BLOCK, LANES

_LANES = tl.constexpr(LANES)
_HEIGHT = 8
"""Rows that a program reads at once."""

_TABLE_HEIGHT, _TABLE_WIDTH = 32, 64
"""Rows and columns that a program reads at once for both sums of a table."""

_PARTS = 64
"""Into at most so many stretches of rows is a table cut."""


def reads(matrix: torch.Tensor) -> bool:
    """True for a matrix in a dtype that the kernels know."""
    return matrix.dtype in FLOATS


def row_sums(matrix: torch.Tensor, factors: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
    """See `traindiff.core.kernels.row_sums.row_sums`."""
    rows, columns = matrix.shape
    found = torch.empty(3, rows, dtype=torch.float64, device=matrix.device)
    if rows:
        addresses = matrix.data_ptr(), factors.data_ptr(), squares.data_ptr(), found.data_ptr()
        numbers = (*addresses, rows, columns, *matrix.stride())
        enqueue(
            sums_kernel, matrix.device, (triton.cdiv(rows, _HEIGHT),), numbers, _HEIGHT, BLOCK, FLOATS[matrix.dtype]
        )
    return found


def table_sums(
    matrix: torch.Tensor, row_factors: torch.Tensor, column_factors: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `traindiff.core.kernels.row_sums.table_sums`."""
    rows, columns = matrix.shape
    at_once = max(1, triton.cdiv(triton.cdiv(rows, _PARTS), _TABLE_HEIGHT)) * _TABLE_HEIGHT
    parts, blocks = triton.cdiv(rows, at_once), triton.cdiv(columns, _TABLE_WIDTH)
    by_column = torch.empty(parts, 2, columns, dtype=torch.float64, device=matrix.device)
    by_row = torch.empty(blocks, 2, rows, dtype=torch.float64, device=matrix.device)
    if parts and blocks:
        addresses = (
            matrix.data_ptr(), row_factors.data_ptr(), column_factors.data_ptr(), by_column.data_ptr(),
            by_row.data_ptr(),
        )  # fmt: skip
        numbers = (*addresses, rows, columns, at_once, *matrix.stride())
        enqueue(
            table_kernel, matrix.device, (parts, blocks), numbers, _TABLE_HEIGHT, _TABLE_WIDTH, FLOATS[matrix.dtype]
        )
    return by_column.sum(0), by_row.sum(0)


@triton.jit(do_not_specialize=["matrix", "factors", "squares", "found", "rows", "columns", "row_step", "column_step"])
def sums_kernel(
    matrix: tl.int64, factors: tl.int64, squares: tl.int64, found: tl.int64, rows: tl.int64, columns: tl.int64,
    row_step: tl.int64, column_step: tl.int64,
    height: tl.constexpr, width: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    """Program p does the rows from `p * height` on, `width` columns after the other."""
    rows, columns = tl.cast(rows, tl.int64), tl.cast(columns, tl.int64)
    row = tl.program_id(0).to(tl.int64) * height + tl.arange(0, height)
    column = tl.arange(0, width).to(tl.int64)
    places = row[:, None] * row_step + column[None, :] * column_step
    total = tl.zeros((height,), dtype=tl.float64)
    weighted, largest = total, total
    lanes = tl.zeros((height, _LANES), dtype=tl.float64)
    for at in range(0, columns, width):
        inside = at + column < columns
        valid = (row < rows)[:, None] & inside[None, :]
        x = load(tl.cast(matrix, tl.int64), places + at * column_step, valid, kind).to(tl.float64)
        factor = tl.load(doubles(factors) + at + column, mask=inside, other=0.0)
        square = tl.load(doubles(squares) + at + column, mask=inside, other=0.0)
        terms = tl.reshape(x * factor[None, :], (height, width // _LANES, _LANES))
        of_lanes = tl.sum(terms, 1)
        lanes += of_lanes
        total += tl.sum(of_lanes, 1)
        largest = tl.maximum(largest, total * total)
        weighted += tl.sum(x * x * square[None, :], 1)
    out = doubles(found) + row
    tl.store(out, tl.sum(lanes, 1), mask=row < rows)
    tl.store(out + rows, weighted, mask=row < rows)
    tl.store(out + 2 * rows, tl.maximum(largest, tl.sum(lanes * lanes, 1)), mask=row < rows)


@triton.jit(do_not_specialize=[
    "matrix", "row_factors", "column_factors", "by_column", "by_row", "rows", "columns", "at_once", "row_step",
    "column_step",
])  # fmt: skip
def table_kernel(
    matrix: tl.int64, row_factors: tl.int64, column_factors: tl.int64, by_column: tl.int64, by_row: tl.int64,
    rows: tl.int64, columns: tl.int64, at_once: tl.int64, row_step: tl.int64, column_step: tl.int64,
    height: tl.constexpr, width: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    """Program (p, q) does the rows from `p * at_once` on, of the columns from `q * width` on."""
    part, block = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    rows, columns, at_once = tl.cast(rows, tl.int64), tl.cast(columns, tl.int64), tl.cast(at_once, tl.int64)
    column = block * width + tl.arange(0, width)
    inside = column < columns
    of_column = tl.load(doubles(column_factors) + column, mask=inside, other=0.0)
    products = tl.zeros((width,), dtype=tl.float64)
    squares = products
    of_rows = doubles(by_row) + block * 2 * rows
    end = tl.minimum((part + 1) * at_once, rows)
    for at in range(part * at_once, end, height):
        row = at + tl.arange(0, height)
        valid = (row < end)[:, None] & inside[None, :]
        x = load(
            tl.cast(matrix, tl.int64), row[:, None] * row_step + column[None, :] * column_step, valid, kind
        ).to(tl.float64)  # fmt: skip
        of_row = tl.load(doubles(row_factors) + row, mask=row < end, other=0.0)
        square = x * x
        products += tl.sum(x * of_row[:, None], 0)
        squares += tl.sum(square, 0)
        tl.store(of_rows + row, tl.sum(x * of_column[None, :], 1), mask=row < end)
        tl.store(of_rows + rows + row, tl.sum(square, 1), mask=row < end)
    out = doubles(by_column) + part * 2 * columns + column
    tl.store(out, products, mask=inside)
    tl.store(out + columns, squares, mask=inside)
