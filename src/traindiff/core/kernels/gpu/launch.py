"""The kernels, and their launches. Everything here is asynchronous.

Addresses travel as int64, so that one kernel serves a tensor and a table of tensors, and no argument is
specialized on: a kernel is compiled once per dtype, whatever the shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from traindiff.core.kernels.gpu.blocks import summarize_blocks, summarize_profiles, write_no_profiles
from traindiff.core.kernels.gpu.enqueue import enqueue
from traindiff.core.kernels.gpu.layout import ADD_FLOATS, ADD_INTEGERS, MAXIMUM, MINIMUM, WORDS, Dtype
from traindiff.core.kernels.gpu.plan import KernelPiece, Planned

_ROW_BYTES = tl.constexpr(8 * WORDS)
_WORDS = tl.constexpr(WORDS)
_ADD_INTEGERS, _ADD_FLOATS = tl.constexpr(ADD_INTEGERS), tl.constexpr(ADD_FLOATS)
_MINIMUM, _MAXIMUM = tl.constexpr(MINIMUM), tl.constexpr(MAXIMUM)
_MERGED_AT_ONCE = tl.constexpr(8)

TABLE_HEAD = ("parts", "slot", "first_partial")
"""Columns of a table before those of `KernelPiece`."""

_HEAD = tl.constexpr(len(TABLE_HEAD))
_COLUMNS = tl.constexpr(len(TABLE_HEAD) + len(KernelPiece._fields))

_NUMBERS = ["address", "row", "lane_weights", "parts", *KernelPiece._fields]


@triton.jit(do_not_specialize=_NUMBERS)
def one_kernel(
    address: tl.int64, row: tl.int64, lane_weights: tl.int64, parts: tl.int64,
    length: tl.int64, num_runs: tl.int64, memory_step: tl.int64, index_step: tl.int64, start: tl.int64,
    blocks_per_run: tl.int64, line_length: tl.int64, line_block: tl.int64, column_block: tl.int64,
    first_group: tl.int64, first_line: tl.int64, row_buckets: tl.int64, column_buckets: tl.int64,
    lines: tl.int64, periods: tl.int64, first_column: tl.int64, stop_column: tl.int64, window: tl.int64,
    width_log2: tl.int64, height_log2: tl.int64, splits: tl.int64,
    box: tl.constexpr, form: tl.constexpr, bits: tl.constexpr,
    infinity: tl.constexpr, first_nan: tl.constexpr, smallest_normal: tl.constexpr,
):  # fmt: skip
    """Summarize one piece: program p writes the summary of part p into the row p after `row`."""
    part = tl.program_id(0).to(tl.int64)
    row = tl.cast(row, tl.int64) + part * _ROW_BYTES
    _summarize(
        tl.cast(address, tl.int64), row, tl.cast(lane_weights, tl.int64), part, tl.cast(parts, tl.int64),
        tl.cast(length, tl.int64), tl.cast(num_runs, tl.int64), tl.cast(memory_step, tl.int64),
        tl.cast(index_step, tl.int64), tl.cast(start, tl.int64), tl.cast(blocks_per_run, tl.int64),
        tl.cast(line_length, tl.int64), tl.cast(line_block, tl.int64), tl.cast(column_block, tl.int64),
        tl.cast(first_group, tl.int64), tl.cast(first_line, tl.int64), tl.cast(row_buckets, tl.int64),
        tl.cast(column_buckets, tl.int64), tl.cast(lines, tl.int64), tl.cast(periods, tl.int64),
        tl.cast(first_column, tl.int64), tl.cast(stop_column, tl.int64), tl.cast(window, tl.int64),
        tl.cast(width_log2, tl.int64), tl.cast(height_log2, tl.int64), tl.cast(splits, tl.int64),
        box, form, bits, infinity, first_nan, smallest_normal,
    )  # fmt: skip


@triton.jit(do_not_specialize=["table", "addresses", "programs", "rows", "partials", "lane_weights"])
def many_kernel(
    table: tl.int64, addresses: tl.int64, programs: tl.int64, rows: tl.int64, partials: tl.int64,
    lane_weights: tl.int64,
    box: tl.constexpr, form: tl.constexpr, bits: tl.constexpr,
    infinity: tl.constexpr, first_nan: tl.constexpr, smallest_normal: tl.constexpr,
):  # fmt: skip
    """Summarize the pieces of a table: program p does what the entry p of `programs` says.

    All arguments are addresses. `table` is int64 (pieces, TABLE_HEAD and the fields of `KernelPiece`), `addresses`
    int64 (pieces,): of their first elements, and `programs` int64 (programs, 2): piece and part. A tensor of one part,
    which `first_partial` -1 marks, is written to its slot, counted from `rows`; parts of others to the summaries from
    `first_partial`, counted from `partials`.
    """
    program = tl.cast(programs, tl.int64).to(tl.pointer_type(tl.int64)) + tl.program_id(0).to(tl.int64) * 2
    number, part = tl.load(program), tl.load(program + 1)
    address = tl.load(tl.cast(addresses, tl.int64).to(tl.pointer_type(tl.int64)) + number)
    entry = tl.cast(table, tl.int64).to(tl.pointer_type(tl.int64)) + number * _COLUMNS
    parts, slot, first = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    of_rows = tl.cast(rows, tl.int64) + slot * _ROW_BYTES
    of_partials = tl.cast(partials, tl.int64) + (first + part) * _ROW_BYTES
    row = tl.where(first < 0, of_rows, of_partials)
    piece = entry + _HEAD
    _summarize(
        address, row, tl.cast(lane_weights, tl.int64), part, parts,
        tl.load(piece), tl.load(piece + 1), tl.load(piece + 2), tl.load(piece + 3), tl.load(piece + 4),
        tl.load(piece + 5), tl.load(piece + 6), tl.load(piece + 7), tl.load(piece + 8), tl.load(piece + 9),
        tl.load(piece + 10), tl.load(piece + 11), tl.load(piece + 12), tl.load(piece + 13), tl.load(piece + 14),
        tl.load(piece + 15), tl.load(piece + 16), tl.load(piece + 17), tl.load(piece + 18),
        tl.load(piece + 19), tl.load(piece + 20),
        box, form, bits, infinity, first_nan, smallest_normal,
    )  # fmt: skip


@triton.jit
def _summarize(
    address, row, lane_weights, part, parts,
    length, num_runs, memory_step, index_step, start, blocks_per_run,
    line_length, line_block, column_block, first_group, first_line, row_buckets, column_buckets,
    lines, periods, first_column, stop_column, window, width_log2, height_log2, splits,
    box: tl.constexpr, form: tl.constexpr, bits: tl.constexpr,
    infinity: tl.constexpr, first_nan: tl.constexpr, smallest_normal: tl.constexpr,
):  # fmt: skip
    summarize_blocks(
        address, row, lane_weights, part, parts,
        length, num_runs, memory_step, index_step, start, blocks_per_run,
        box, form, bits, infinity, first_nan, smallest_normal,
    )  # fmt: skip
    if form == "signed" or form == "unsigned":
        write_no_profiles(row)
    else:
        summarize_profiles(
            address, row, part, parts,
            length, num_runs, memory_step, index_step, start,
            line_length, line_block, column_block, first_group, first_line, row_buckets, column_buckets,
            lines, periods, first_column, stop_column, window, width_log2, height_log2, splits,
            box, form, bits, infinity,
        )  # fmt: skip


@triton.jit(do_not_specialize=["table", "ways", "rows", "partials"])
def merge_kernel(table: tl.int64, ways: tl.int64, rows: tl.int64, partials: tl.int64):
    """Merge partial summaries into rows, in a fixed order.

    Args:
        table: Address of int64 (programs, 3): row, first partial summary, number of them.
        ways: Address of int64 (WORDS,): see `layout.merging`.
        rows: Address of the rows.
        partials: Address of the partial summaries.
    """
    entry = tl.cast(table, tl.int64).to(tl.pointer_type(tl.int64)) + tl.program_id(0).to(tl.int64) * 3
    first = tl.cast(partials, tl.int64) + tl.load(entry + 1) * _ROW_BYTES
    number = tl.load(entry + 2)
    word = tl.arange(0, 256)
    inside = word < _WORDS
    way = tl.load(tl.cast(ways, tl.int64).to(tl.pointer_type(tl.int64)) + word, mask=inside, other=0)
    integers = tl.zeros((_MERGED_AT_ONCE, 256), dtype=tl.int64)
    floats = tl.zeros((_MERGED_AT_ONCE, 256), dtype=tl.float64)
    least = tl.full((_MERGED_AT_ONCE, 256), float("inf"), dtype=tl.float64)
    most = tl.full((_MERGED_AT_ONCE, 256), float("-inf"), dtype=tl.float64)
    for at in range(0, number, _MERGED_AT_ONCE):
        partial = at + tl.arange(0, _MERGED_AT_ONCE).to(tl.int64)
        valid = (partial < number)[:, None] & inside[None, :]
        place = first.to(tl.pointer_type(tl.int64)) + partial[:, None] * _WORDS + word[None, :]
        found = tl.load(place, mask=valid, other=0)
        value = found.to(tl.float64, bitcast=True)
        integers += found
        floats += value
        least = tl.minimum(least, tl.where(valid, value, float("inf")))
        most = tl.maximum(most, tl.where(valid, value, float("-inf")))
    merged = tl.sum(integers, axis=0)
    merged = tl.where(way == _ADD_FLOATS, tl.sum(floats, axis=0).to(tl.int64, bitcast=True), merged)
    merged = tl.where(way == _MINIMUM, tl.min(least, axis=0).to(tl.int64, bitcast=True), merged)
    merged = tl.where(way == _MAXIMUM, tl.max(most, axis=0).to(tl.int64, bitcast=True), merged)
    row = tl.cast(rows, tl.int64) + tl.load(entry) * _ROW_BYTES
    tl.store(row.to(tl.pointer_type(tl.int64)) + word, merged, mask=inside)


INTERPRETED = not isinstance(one_kernel, triton.JITFunction)
"""True if Triton's interpreter runs the kernels, on CPU tensors: TRITON_INTERPRET=1 when triton was imported."""


def launch_one(device: torch.device, dtype: Dtype, address: int, row: int, lane_weights: int, planned: Planned) -> None:
    """Enqueue the summary of one piece on the current stream of a device.

    Args:
        device: The device; the CPU, in Triton's interpreter.
        dtype: Of its elements.
        address: Of its first element.
        row: Address of the first of `planned.parts` summaries to write.
        lane_weights: Address of the 64 lane weights.
        planned: Where its elements are.
    """
    numbers = address, row, lane_weights, planned.parts, *planned.piece
    enqueue(one_kernel, device, (planned.parts,), numbers, planned.box, *_constants(dtype), **OPTIONS)


def launch_many(
    dtype: Dtype, tables: Sequence[torch.Tensor], rows: int, partials: int, lane_weights: int, *, box: bool
) -> None:
    """Enqueue the summaries of a table of pieces on the current stream of its device; see `many_kernel`.

    Args:
        dtype: Of their elements.
        tables: The table, the addresses and the programs.
        rows: Address of the rows.
        partials: Address of the partial summaries.
        lane_weights: Address of the 64 lane weights.
        box: Whether any piece has several runs.
    """
    table, addresses, programs = tables
    numbers = table.data_ptr(), addresses.data_ptr(), programs.data_ptr(), rows, partials, lane_weights
    enqueue(many_kernel, table.device, (len(programs),), numbers, box, *_constants(dtype), **OPTIONS)


def launch_merge(table: torch.Tensor, ways: int, rows: int, partials: int) -> None:
    """Enqueue the merging of partial summaries on the current stream of their device; see `merge_kernel`."""
    enqueue(merge_kernel, table.device, (len(table),), (table.data_ptr(), ways, rows, partials), num_warps=8)


OPTIONS: dict[str, Any] = {"num_warps": 4} | ({} if torch.version.hip else {"maxnreg": 128})
"""With 128 registers a thread, 4 programs run on a multiprocessor of an H200 instead of 3: 7 to 13 % faster there."""


@cache
def _constants(dtype: Dtype) -> tuple[Any, ...]:
    """The constants of a dtype, in the order of the kernels' arguments after `box`."""
    return dtype.form, dtype.bits, dtype.infinity, dtype.first_nan, dtype.smallest_normal
