"""How far the rows of a product are from the exact ones, on a GPU; see `traindiff.core.kernels.row_errors`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from traindiff.core.kernels.gpu.enqueue import doubles, enqueue
from traindiff.core.kernels.row_errors import NUMBERS, TINY, Weights

_AT_ONCE = 1024
_PARTS_AT_ONCE = 128
_PARTIAL = 7
"""Numbers of a stretch of rows: four sums of squares, the count of inexact rows, the largest error, and its row."""

_TINY = tl.constexpr(TINY)
_COLUMNS = tl.constexpr(_PARTIAL)
_WEIGHTS = tl.constexpr(len(Weights._fields))
_NUMBERS = tl.constexpr(NUMBERS)


def row_errors(
    sums: torch.Tensor, made: torch.Tensor, by: Weights, largest: Any, added: tuple[Any, Any],
    counts: Sequence[int] = (),
) -> torch.Tensor:  # fmt: skip
    """See `traindiff.core.kernels.row_errors.row_errors`. Nothing waits for the device."""
    rows, device = sums.shape[1], sums.device
    parts = max(1, triton.cdiv(rows, _AT_ONCE))
    ratios = torch.empty(rows, dtype=torch.float64, device=device)
    partials = torch.empty(parts, _PARTIAL, dtype=torch.float64, device=device)
    found = torch.empty(NUMBERS + len(counts), dtype=torch.float64, device=device)
    numbers = _numbers(by, tuple(counts), device)
    about = [one if isinstance(one, torch.Tensor) else _number(float(one), device) for one in (largest, *added)]
    addresses = [one.data_ptr() for one in (sums, made, numbers, *about, ratios, partials)]
    enqueue(errors_kernel, device, (parts,), (*addresses, rows), _AT_ONCE)
    in_order = ratios.sort().values
    addresses = [one.data_ptr() for one in (in_order, partials, numbers, found)]
    enqueue(numbers_kernel, device, (1,), (*addresses, rows, parts, len(counts)), _PARTS_AT_ONCE)
    return found


@lru_cache(maxsize=4096)
def _numbers(by: Weights, counts: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor([*by, *counts], dtype=torch.float64, device=device)


@lru_cache(maxsize=256)
def _number(value: float, device: torch.device) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64, device=device)


@triton.jit(do_not_specialize=[
    "sums", "made", "by", "largest", "product", "norm", "ratios", "partials", "rows",
])  # fmt: skip
def errors_kernel(
    sums: tl.int64, made: tl.int64, by: tl.int64, largest: tl.int64, product: tl.int64, norm: tl.int64,
    ratios: tl.int64, partials: tl.int64, rows: tl.int64,
    height: tl.constexpr,
):  # fmt: skip
    """Program p does `height` rows, and writes row p of `partials`."""
    weights = doubles(by)
    of_output, of_added, of_partial = tl.load(weights), tl.load(weights + 1), tl.load(weights + 2)
    coherent, most = tl.load(weights + 3), tl.load(weights + 4)
    size = tl.load(doubles(norm))
    rounded = tl.where(size > 0.0, of_output, 0.0)
    constant = tl.load(weights + 5) + tl.load(weights + 6) * tl.load(doubles(largest)) + (of_added + rounded) * size

    rows = tl.cast(rows, tl.int64)
    row = tl.program_id(0).to(tl.int64) * height + tl.arange(0, height)
    valid = row < rows
    expected, actual = doubles(sums) + row, doubles(made) + row
    terms = tl.sqrt(tl.load(expected + rows, mask=valid, other=0.0))
    result = tl.sqrt(tl.load(actual + rows, mask=valid, other=0.0))
    partial = tl.sqrt(tl.load(expected + 2 * rows, mask=valid, other=0.0))
    partial = tl.maximum(partial, tl.maximum(terms, result))
    coherence = tl.minimum(tl.maximum(partial / tl.maximum(terms, _TINY), 1.0), most)
    expected_sum = tl.load(expected, mask=valid, other=0.0) + tl.load(doubles(product))
    error = tl.abs(tl.load(actual, mask=valid, other=0.0) - expected_sum)
    bound = (of_output + rounded) * result + (of_partial + coherent * coherence) * partial + constant
    ratio = error / bound
    known = valid & (ratio < float("inf"))
    ratio = tl.where(known, ratio, 0.0)
    tl.store(doubles(ratios) + row, ratio, mask=valid)

    best = tl.max(ratio, 0)
    out = doubles(partials) + tl.program_id(0).to(tl.int64) * _COLUMNS
    tl.store(out, tl.sum(tl.where(known, terms * terms, 0.0), 0))
    tl.store(out + 1, tl.sum(tl.where(known, result * result, 0.0), 0))
    tl.store(out + 2, tl.sum(tl.where(known, error * error, 0.0), 0))
    tl.store(out + 3, tl.sum(tl.where(known, bound * bound, 0.0), 0))
    tl.store(out + 4, tl.sum((ratio > 0.0).to(tl.float64), 0))
    tl.store(out + 5, best)
    tl.store(out + 6, tl.min(tl.where(valid & (ratio == best), row, rows), 0).to(tl.float64))


@triton.jit(do_not_specialize=["in_order", "partials", "by", "found", "rows", "parts", "counts"])
def numbers_kernel(
    in_order: tl.int64, partials: tl.int64, by: tl.int64, found: tl.int64, rows: tl.int64, parts: tl.int64,
    counts: tl.int64,
    width: tl.constexpr,
):  # fmt: skip
    """One program: the numbers of all rows, from those of stretches and from the errors in order."""
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
    best = tl.max(largest, 0)
    first = tl.min(tl.where(largest == best, place, float("inf")), 0)
    count = tl.sum(inexact, 0).to(tl.int64)
    middle = rows - count + (count - 1) // 2
    median = tl.load(doubles(in_order) + middle, mask=count > 0, other=0.0)
    size = tl.sqrt(tl.maximum(tl.sum(of_terms, 0), tl.sum(of_result, 0)))
    out = doubles(found)
    tl.store(out, tl.maximum(best, 0.0))
    tl.store(out + 1, tl.where(rows > 0, first, 0.0))
    tl.store(out + 2, median)
    tl.store(out + 3, _share(tl.sqrt(tl.sum(of_error, 0)), size))
    tl.store(out + 4, _share(tl.sqrt(tl.sum(of_bound, 0)), size))
    number = tl.arange(0, 8).to(tl.int64)
    tl.store(
        out + _NUMBERS + number,
        tl.load(doubles(by) + _WEIGHTS + number, mask=number < counts, other=0.0),
        mask=number < counts,
    )


@triton.jit
def _share(norm, size):
    share = norm / tl.where(size > 0.0, size, 1.0)
    return tl.where((size > 0.0) & (share >= 0.0), share, 0.0)
