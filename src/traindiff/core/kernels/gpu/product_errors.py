"""Checks of the products of a linear layer on a GPU: two launches each; see `traindiff.core.kernels.product_errors`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from traindiff.core.kernels.gpu.enqueue import FLOATS, ceiling, doubles, enqueue, load, numbers_on, reads
from traindiff.core.kernels.row_errors import NUMBERS, TINY, Weights
from traindiff.core.kernels.row_sums import BLOCK, LANES

__all__ = ["product_errors", "reads", "table_sums"]

_HEIGHT = 8
"""Rows that a program checks."""

_PARTIAL = 7
"""Numbers of a program: four sums of squares, the count of inexact rows, the largest error, and its row."""

_PARTS_AT_ONCE, _RATIOS_AT_ONCE = 128, 2048
_TABLE_HEIGHT, _TABLE_WIDTH = 32, 64
"""Rows and columns of a weight that a program reads at once."""

_PARTS = 64
"""Into at most so many stretches of rows is a weight cut."""

_ADDED_AT_ONCE = 256

_LANES, _TINY, _COLUMNS = tl.constexpr(LANES), tl.constexpr(TINY), tl.constexpr(_PARTIAL)
_WEIGHTS, _NUMBERS = tl.constexpr(len(Weights._fields)), tl.constexpr(NUMBERS)
_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)


def table_sums(
    matrix: torch.Tensor, row_factors: torch.Tensor, column_factors: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `traindiff.core.kernels.row_sums.table_sums`."""
    rows, columns = matrix.shape
    at_once = max(1, ceiling(ceiling(rows, _PARTS), _TABLE_HEIGHT)) * _TABLE_HEIGHT
    parts, blocks = ceiling(rows, at_once), ceiling(columns, _TABLE_WIDTH)
    partials = torch.empty(2 * (parts * columns + blocks * rows), dtype=torch.float64, device=matrix.device)
    found = torch.empty(2 * (columns + rows) + 1, dtype=torch.float64, device=matrix.device)
    by_column = partials.data_ptr()
    by_row = by_column + 16 * parts * columns
    addresses = matrix.data_ptr(), row_factors.data_ptr(), column_factors.data_ptr(), by_column, by_row
    numbers = (*addresses, rows, columns, at_once, *matrix.stride())
    sizes, kind = (_TABLE_HEIGHT, _TABLE_WIDTH), FLOATS[matrix.dtype]
    enqueue(table_kernel, matrix.device, (parts, blocks), numbers, *sizes, kind)
    programs = 1 + ceiling(2 * columns, _ADDED_AT_ONCE) + ceiling(2 * rows, _ADDED_AT_ONCE)
    numbers = by_column, by_row, found.data_ptr(), rows, columns, parts, blocks
    enqueue(added_kernel, matrix.device, (programs,), numbers, _ADDED_AT_ONCE)
    return found[: 2 * columns].view(2, columns), found[2 * columns : -1].view(2, rows), found[-1]


def product_errors(
    left: torch.Tensor, right: torch.Tensor, made: torch.Tensor, signs: torch.Tensor, added: torch.Tensor | None,
    by: Weights, largest: Any, counts: Sequence[int],
) -> torch.Tensor:  # fmt: skip
    """See `traindiff.core.kernels.product_errors.product_errors`. Nothing waits for the device."""
    rows, terms = left.shape
    device = left.device
    parts = max(1, ceiling(rows, _HEIGHT))
    size = NUMBERS + len(counts)
    room = torch.empty(size + parts * _PARTIAL + (rows + 1) // 2, dtype=torch.float64, device=device)
    found = room.data_ptr()
    partials = found + 8 * size
    ratios = partials + 8 * parts * _PARTIAL
    if not isinstance(largest, torch.Tensor):
        largest = numbers_on(device, float(largest))
    bias = None if added is None else added.contiguous()
    numbers = numbers_on(device, *by, *counts)
    addresses = [0 if one is None else one.data_ptr() for one in (left, right, made, signs, bias, numbers, largest)]
    sizes = rows, terms, signs.numel(), *left.stride(), *made.stride()
    kinds = FLOATS[left.dtype], FLOATS[made.dtype], "" if bias is None else FLOATS[bias.dtype]
    enqueue(check_kernel, device, (parts,), (*addresses, ratios, partials, *sizes), _HEIGHT, BLOCK, *kinds)
    enqueue(
        numbers_kernel, device, (1,), (ratios, partials, numbers.data_ptr(), found, rows, parts, len(counts)),
        _PARTS_AT_ONCE, _RATIOS_AT_ONCE, num_warps=8,
    )  # fmt: skip
    return room[:size]


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


@triton.jit(do_not_specialize=["by_column", "by_row", "found", "rows", "columns", "parts", "blocks"])
def added_kernel(
    by_column: tl.int64, by_row: tl.int64, found: tl.int64, rows: tl.int64, columns: tl.int64, parts: tl.int64,
    blocks: tl.int64,
    width: tl.constexpr,
):  # fmt: skip
    """Add up what `table_kernel` wrote: the first program all squares, for the norm, the others `width` numbers each.

    `found` gets the numbers of the columns, those of the rows, and the norm.
    """
    rows, columns = tl.cast(rows, tl.int64), tl.cast(columns, tl.int64)
    parts, blocks = tl.cast(parts, tl.int64), tl.cast(blocks, tl.int64)
    program = tl.program_id(0).to(tl.int64)
    of_columns = tl.cdiv(2 * columns, width)
    place = tl.arange(0, width).to(tl.int64)
    sums = tl.zeros((width,), dtype=tl.float64)
    if program == 0:
        for part in range(parts):
            squares = doubles(by_column) + (part * 2 + 1) * columns
            for at in range(0, columns, width):
                sums += tl.load(squares + at + place, mask=at + place < columns, other=0.0)
        tl.store(doubles(found) + 2 * (columns + rows), tl.sqrt(tl.sum(sums, 0)))
    elif program <= of_columns:
        number = (program - 1) * width + place
        for part in range(parts):
            sums += tl.load(doubles(by_column) + part * 2 * columns + number, mask=number < 2 * columns, other=0.0)
        tl.store(doubles(found) + number, sums, mask=number < 2 * columns)
    else:
        number = (program - 1 - of_columns) * width + place
        for block in range(blocks):
            sums += tl.load(doubles(by_row) + block * 2 * rows + number, mask=number < 2 * rows, other=0.0)
        tl.store(doubles(found) + 2 * columns + number, sums, mask=number < 2 * rows)


@triton.jit(do_not_specialize=[
    "left", "right", "made", "signs", "bias", "by", "largest", "ratios", "partials", "rows", "terms", "columns",
    "left_row", "left_column", "made_row", "made_column",
])  # fmt: skip
def check_kernel(
    left: tl.int64, right: tl.int64, made: tl.int64, signs: tl.int64, bias: tl.int64, by: tl.int64, largest: tl.int64,
    ratios: tl.int64, partials: tl.int64, rows: tl.int64, terms: tl.int64, columns: tl.int64,
    left_row: tl.int64, left_column: tl.int64, made_row: tl.int64, made_column: tl.int64,
    height: tl.constexpr, width: tl.constexpr, of_left: tl.constexpr, of_made: tl.constexpr, of_bias: tl.constexpr,
):  # fmt: skip
    """Program p checks the rows from `p * height` on, and writes row p of `partials`."""
    rows, terms, columns = tl.cast(rows, tl.int64), tl.cast(terms, tl.int64), tl.cast(columns, tl.int64)
    row = tl.program_id(0).to(tl.int64) * height + tl.arange(0, height)
    valid = row < rows
    column = tl.arange(0, width).to(tl.int64)

    places = row[:, None] * left_row + column[None, :] * left_column
    total = tl.zeros((height,), dtype=tl.float64)
    weighted, furthest = total, total
    lanes = tl.zeros((height, _LANES), dtype=tl.float64)
    for at in range(0, terms, width):
        inside = at + column < terms
        x = load(
            tl.cast(left, tl.int64), places + at * left_column, valid[:, None] & inside[None, :], of_left
        ).to(tl.float64)  # fmt: skip
        factor = tl.load(doubles(right) + at + column, mask=inside, other=0.0)
        square = tl.load(doubles(right) + terms + at + column, mask=inside, other=0.0)
        of_lanes = tl.sum(tl.reshape(x * factor[None, :], (height, width // _LANES, _LANES)), 1)
        lanes += of_lanes
        total += tl.sum(of_lanes, 1)
        furthest = tl.maximum(furthest, total * total)
        weighted += tl.sum(x * x * square[None, :], 1)
    furthest = tl.maximum(furthest, tl.sum(lanes * lanes, 1))
    expected = tl.sum(lanes, 1)

    actual = tl.zeros((height,), dtype=tl.float64)
    squares = actual
    added = tl.zeros((width,), dtype=tl.float64)
    added_squares = added
    places = row[:, None] * made_row + column[None, :] * made_column
    for at in range(0, columns, width):
        inside = at + column < columns
        y = load(
            tl.cast(made, tl.int64), places + at * made_column, valid[:, None] & inside[None, :], of_made
        ).to(tl.float64)  # fmt: skip
        sign = tl.load(doubles(signs) + at + column, mask=inside, other=0.0)
        actual += tl.sum(y * sign[None, :], 1)
        squares += tl.sum(y * y, 1)
        if of_bias != "":
            one = load(tl.cast(bias, tl.int64), at + column, inside, of_bias).to(tl.float64)
            added += one * sign
            added_squares += one * one

    weights = doubles(by)
    of_output, of_added, of_partial = tl.load(weights), tl.load(weights + 1), tl.load(weights + 2)
    coherent, most = tl.load(weights + 3), tl.load(weights + 4)
    norm = tl.sqrt(tl.sum(added_squares, 0))
    rounded = tl.where(norm > 0.0, of_output, 0.0)
    constant = tl.load(weights + 5) + tl.load(weights + 6) * tl.load(doubles(largest)) + (of_added + rounded) * norm
    size, result = tl.sqrt(weighted), tl.sqrt(squares)
    partial = tl.maximum(tl.sqrt(furthest), tl.maximum(size, result))
    coherence = tl.minimum(tl.maximum(partial / tl.maximum(size, _TINY), 1.0), most)
    error = tl.abs(actual - (expected + tl.sum(added, 0)))
    bound = (of_output + rounded) * result + (of_partial + coherent * coherence) * partial + constant
    ratio = error / bound
    known = valid & (ratio < float("inf"))
    ratio = tl.where(known, ratio, 0.0)
    short = tl.minimum(ratio, _LARGEST).to(tl.float32)
    tl.store(tl.cast(ratios, tl.int64).to(tl.pointer_type(tl.float32)) + row, short, mask=valid)

    best = tl.max(ratio, 0)
    out = doubles(partials) + tl.program_id(0).to(tl.int64) * _COLUMNS
    tl.store(out, tl.sum(tl.where(known, size * size, 0.0), 0))
    tl.store(out + 1, tl.sum(tl.where(known, result * result, 0.0), 0))
    tl.store(out + 2, tl.sum(tl.where(known, error * error, 0.0), 0))
    tl.store(out + 3, tl.sum(tl.where(known, bound * bound, 0.0), 0))
    tl.store(out + 4, tl.sum((short > 0.0).to(tl.float64), 0))
    tl.store(out + 5, best)
    tl.store(out + 6, tl.min(tl.where(valid & (ratio == best), row, rows), 0).to(tl.float64))


@triton.jit(do_not_specialize=["ratios", "partials", "by", "found", "rows", "parts", "counts"])
def numbers_kernel(
    ratios: tl.int64, partials: tl.int64, by: tl.int64, found: tl.int64, rows: tl.int64, parts: tl.int64,
    counts: tl.int64,
    width: tl.constexpr, at_once: tl.constexpr,
):  # fmt: skip
    """One program: the numbers of all rows, from those of a few rows each and from the errors."""
    rows, parts, counts = tl.cast(rows, tl.int64), tl.cast(parts, tl.int64), tl.cast(counts, tl.int64)
    part = tl.arange(0, width).to(tl.int64)
    zeros = tl.zeros((width,), dtype=tl.float64)
    of_terms, of_result, of_error, of_bound, inexact = zeros, zeros, zeros, zeros, zeros
    largest = tl.full((width,), -1.0, dtype=tl.float64)
    place = zeros
    for at in range(0, parts, width):
        valid = at + part < parts
        entry = doubles(partials) + (at + part) * _COLUMNS
        of_terms += tl.load(entry, mask=valid, other=0.0)
        of_result += tl.load(entry + 1, mask=valid, other=0.0)
        of_error += tl.load(entry + 2, mask=valid, other=0.0)
        of_bound += tl.load(entry + 3, mask=valid, other=0.0)
        inexact += tl.load(entry + 4, mask=valid, other=0.0)
        one = tl.load(entry + 5, mask=valid, other=-1.0)
        place = tl.where(one > largest, tl.load(entry + 6, mask=valid, other=0.0), place)
        largest = tl.maximum(largest, one)
    best = tl.maximum(tl.max(largest, 0), 0.0)
    first = tl.min(tl.where(largest == best, place, float("inf")), 0)
    size = tl.sqrt(tl.maximum(tl.sum(of_terms, 0), tl.sum(of_result, 0)))
    before = (tl.sum(inexact, 0).to(tl.int64) - 1) // 2
    out = doubles(found)
    tl.store(out, best)
    tl.store(out + 1, tl.where(rows > 0, first, 0.0))
    tl.store(out + 2, _median(ratios, rows, tl.minimum(best, _LARGEST).to(tl.float32), before, at_once).to(tl.float64))
    tl.store(out + 3, _share(tl.sqrt(tl.sum(of_error, 0)), size))
    tl.store(out + 4, _share(tl.sqrt(tl.sum(of_bound, 0)), size))
    number = tl.arange(0, 8).to(tl.int64)
    tl.store(
        out + _NUMBERS + number,
        tl.load(doubles(by) + _WEIGHTS + number, mask=number < counts, other=0.0),
        mask=number < counts,
    )


@triton.jit
def _median(ratios, rows, largest, before, at_once: tl.constexpr):
    """The positive number that has so many `before` it; 0 without one. Found by halving the range in which it lies."""
    place = tl.arange(0, at_once).to(tl.int64)
    bits = tl.cast(ratios, tl.int64).to(tl.pointer_type(tl.int32))
    low = tl.zeros((1,), dtype=tl.int32)
    high = low + largest.to(tl.int32, bitcast=True)
    for _ in range(31):
        middle = low + (high - low) // 2
        below = tl.zeros((at_once,), dtype=tl.int64)
        for at in range(0, rows, at_once):
            one = tl.load(bits + at + place, mask=at + place < rows, other=0)
            below += ((one > 0) & (one <= middle)).to(tl.int64)
        enough = tl.sum(below, 0) > before
        low = tl.where(enough | (low >= high), low, middle + 1)
        high = tl.where(enough, middle, high)
    return tl.sum(tl.where(before >= 0, low.to(tl.float32, bitcast=True), 0.0), 0)


@triton.jit
def _share(norm, size):
    share = norm / tl.where(size > 0.0, size, 1.0)
    return tl.where((size > 0.0) & (share >= 0.0), share, 0.0)
