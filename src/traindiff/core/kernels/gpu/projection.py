"""Products of matrices with signs on a GPU; see `traindiff.core.kernels.projection`. Nothing waits for the device."""

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl

from traindiff.core.kernels.gpu.enqueue import FLOATS, ceiling, doubles, enqueue, load, reads
from traindiff.core.kernels.projection import BLOCK, TOTALS
from traindiff.core.witness import PROBES

__all__ = ["normalized", "projected", "reads", "summed"]

_PROBES = tl.constexpr(PROBES)
_TOTALS = tl.constexpr(TOTALS)
_ELEMENTS = 4096
"""Elements that a program reads at once."""

_NARROW = 32
"""Columns that are read at once of matrices that have no more."""

_ROWS_AT_ONCE = 512
_ALL_ROWS = 4096
"""Rows that one program adds up; of more, each program takes so many."""

assert PROBES == 4  # the kernels name each of them


def projected(matrix: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """See `traindiff.core.kernels.projection.projected`: sums of 256 columns in float32, and of these in float64."""
    rows, columns = matrix.shape
    found = torch.empty(rows, PROBES, dtype=torch.float64, device=matrix.device)
    if rows:
        width = _NARROW if columns <= _NARROW else BLOCK
        height = _ELEMENTS // width
        numbers = matrix.data_ptr(), signs.data_ptr(), found.data_ptr(), rows, columns, *matrix.stride()
        enqueue(projected_kernel, matrix.device, (ceiling(rows, height),), numbers, height, width, FLOATS[matrix.dtype])
    return found


def normalized(
    matrix: torch.Tensor, gradient: torch.Tensor, signs: torch.Tensor, *, eps: float, centered: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `traindiff.core.kernels.projection.normalized`."""
    rows, columns = matrix.shape
    found = torch.empty(rows, PROBES, dtype=torch.float64, device=matrix.device)
    shifts = torch.empty(rows, dtype=torch.float64, device=matrix.device)
    if rows:
        height = _ELEMENTS // BLOCK
        (bits,) = struct.unpack("<q", struct.pack("<d", eps))
        numbers = (
            matrix.data_ptr(), gradient.data_ptr(), signs.data_ptr(), found.data_ptr(), shifts.data_ptr(), rows,
            columns, *matrix.stride(), *gradient.stride(), bits,
        )  # fmt: skip
        constants = height, BLOCK, centered, FLOATS[matrix.dtype], FLOATS[gradient.dtype]
        enqueue(normalized_kernel, matrix.device, (ceiling(rows, height),), numbers, *constants)
    return found, shifts.sum()


def summed(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """See `traindiff.core.kernels.projection.summed`."""
    rows = left.shape[0]
    at_once = _ALL_ROWS if rows > _ALL_ROWS else max(rows, 1)
    programs = max(1, ceiling(rows, at_once))
    found = torch.empty(programs, TOTALS, dtype=torch.float64, device=left.device)
    step = 0 if right.shape[0] == 1 else PROBES
    numbers = left.data_ptr(), right.data_ptr(), found.data_ptr(), rows, at_once, step
    enqueue(summed_kernel, left.device, (programs,), numbers, _ROWS_AT_ONCE)
    return found[0] if programs == 1 else found.sum(0)


@triton.jit(do_not_specialize=["matrix", "signs", "found", "rows", "columns", "row_step", "column_step"])
def projected_kernel(
    matrix: tl.int64, signs: tl.int64, found: tl.int64, rows: tl.int64, columns: tl.int64,
    row_step: tl.int64, column_step: tl.int64,
    height: tl.constexpr, width: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    """Program p does the rows from `p * height` on."""
    address, factors = tl.cast(matrix, tl.int64), tl.cast(signs, tl.int64).to(tl.pointer_type(tl.float32))
    rows, columns = tl.cast(rows, tl.int64), tl.cast(columns, tl.int64)
    row = tl.program_id(0).to(tl.int64) * height + tl.arange(0, height)
    column = tl.arange(0, width).to(tl.int64)
    places = row[:, None] * row_step + column[None, :] * column_step
    first = tl.zeros((height,), dtype=tl.float64)
    second, third, fourth = first, first, first
    for at in range(0, columns, width):
        inside = at + column < columns
        x = load(address, places + at * column_step, (row < rows)[:, None] & inside[None, :], kind)
        sign = factors + at + column
        first += tl.sum(x * tl.load(sign, mask=inside, other=0.0)[None, :], 1).to(tl.float64)
        second += tl.sum(x * tl.load(sign + columns, mask=inside, other=0.0)[None, :], 1).to(tl.float64)
        third += tl.sum(x * tl.load(sign + 2 * columns, mask=inside, other=0.0)[None, :], 1).to(tl.float64)
        fourth += tl.sum(x * tl.load(sign + 3 * columns, mask=inside, other=0.0)[None, :], 1).to(tl.float64)
    _store(found, row, row < rows, first, second, third, fourth)


@triton.jit
def _store(found, row, valid, first, second, third, fourth):
    """Write the products of rows with the probes."""
    out = doubles(found) + row * _PROBES
    tl.store(out, first, mask=valid)
    tl.store(out + 1, second, mask=valid)
    tl.store(out + 2, third, mask=valid)
    tl.store(out + 3, fourth, mask=valid)


@triton.jit(do_not_specialize=[
    "matrix", "gradient", "signs", "found", "shifts", "rows", "columns", "row_step", "column_step", "gradient_row_step",
    "gradient_column_step", "eps_bits",
])  # fmt: skip
def normalized_kernel(
    matrix: tl.int64, gradient: tl.int64, signs: tl.int64, found: tl.int64, shifts: tl.int64,
    rows: tl.int64, columns: tl.int64, row_step: tl.int64, column_step: tl.int64,
    gradient_row_step: tl.int64, gradient_column_step: tl.int64, eps_bits: tl.int64,
    height: tl.constexpr, width: tl.constexpr, centered: tl.constexpr, kind: tl.constexpr, of_gradient: tl.constexpr,
):  # fmt: skip
    """Program p does the rows from `p * height` on: their means, then their mean squares, then their products."""
    address, factors = tl.cast(matrix, tl.int64), tl.cast(signs, tl.int64).to(tl.pointer_type(tl.float32))
    gradient = tl.cast(gradient, tl.int64)
    rows, columns = tl.cast(rows, tl.int64), tl.cast(columns, tl.int64)
    row = tl.program_id(0).to(tl.int64) * height + tl.arange(0, height)
    column = tl.arange(0, width).to(tl.int64)
    places = row[:, None] * row_step + column[None, :] * column_step
    of_gradients = row[:, None] * gradient_row_step + column[None, :] * gradient_column_step
    zeros = tl.zeros((height,), dtype=tl.float64)
    count = columns.to(tl.float64)
    mean = zeros
    if centered:
        for at in range(0, columns, width):
            valid = (row < rows)[:, None] & (at + column < columns)[None, :]
            mean += tl.sum(load(address, places + at * column_step, valid, kind), 1).to(tl.float64)
        mean = mean / count
    near = mean.to(tl.float32)[:, None]
    squares = zeros
    for at in range(0, columns, width):
        valid = (row < rows)[:, None] & (at + column < columns)[None, :]
        x = tl.where(valid, load(address, places + at * column_step, valid, kind) - near, 0.0)
        squares += tl.sum(x * x, 1).to(tl.float64)
    eps = tl.cast(eps_bits, tl.int64).to(tl.float64, bitcast=True)
    scale = 1.0 / tl.sqrt(squares / count + eps)
    by = scale.to(tl.float32)[:, None]
    shift = (mean * scale).to(tl.float32)[:, None]
    first, second, third, fourth, shifted = zeros, zeros, zeros, zeros, zeros
    for at in range(0, columns, width):
        inside = at + column < columns
        valid = (row < rows)[:, None] & inside[None, :]
        g = load(gradient, of_gradients + at * gradient_column_step, valid, of_gradient)
        x = g * (load(address, places + at * column_step, valid, kind) - near) * by
        x = tl.where(valid, x, 0.0)
        sign = factors + at + column
        first += tl.sum(x * tl.load(sign, mask=inside, other=0.0)[None, :], 1).to(tl.float64)
        second += tl.sum(x * tl.load(sign + columns, mask=inside, other=0.0)[None, :], 1).to(tl.float64)
        third += tl.sum(x * tl.load(sign + 2 * columns, mask=inside, other=0.0)[None, :], 1).to(tl.float64)
        fourth += tl.sum(x * tl.load(sign + 3 * columns, mask=inside, other=0.0)[None, :], 1).to(tl.float64)
        if centered:
            moved = (g * shift).to(tl.float64)
            shifted += tl.sum(moved * moved, 1)
    _store(found, row, row < rows, first, second, third, fourth)
    tl.store(doubles(shifts) + row, shifted, mask=row < rows)


@triton.jit(do_not_specialize=["left", "right", "found", "rows", "at_once", "right_step"])
def summed_kernel(
    left: tl.int64, right: tl.int64, found: tl.int64, rows: tl.int64, at_once: tl.int64, right_step: tl.int64,
    height: tl.constexpr,
):  # fmt: skip
    """Program p adds up the rows from `p * at_once` on, and writes its sums to row p of `found`."""
    program = tl.program_id(0).to(tl.int64)
    rows, at_once = tl.cast(rows, tl.int64), tl.cast(at_once, tl.int64)
    begin = program * at_once
    end = tl.minimum(begin + at_once, rows)
    probe = tl.arange(0, _PROBES).to(tl.int64)
    sums = tl.zeros((height, _PROBES), dtype=tl.float64)
    squares, changes = sums, sums
    for at in range(begin, end, height):
        row = at + tl.arange(0, height)
        valid = (row < end)[:, None] & (probe >= 0)[None, :]
        terms = _terms(left, right, row, probe, valid, right_step)
        change = terms - _terms(left, right, row - 1, probe, valid & (row > 0)[:, None], right_step)
        sums += terms
        squares += terms * terms
        changes += change * change
    out = doubles(found) + program * _TOTALS
    tl.store(out + probe, tl.sum(sums, 0))
    tl.store(out + _PROBES, tl.sum(tl.sum(squares, 1), 0))
    tl.store(out + _PROBES + 1, tl.sum(tl.sum(changes, 1), 0))


@triton.jit
def _terms(left, right, row, probe, valid, right_step):
    one = tl.load(doubles(left) + row[:, None] * _PROBES + probe[None, :], mask=valid, other=0.0)
    other = tl.load(doubles(right) + row[:, None] * right_step + probe[None, :], mask=valid, other=0.0)
    return one * other
