"""Device code: sums of squares and largest magnitudes of buckets of rows and of columns.

A *unit* is what one row bucket and one column bucket share, or a split of it. It is read in tiles of
TILE elements: so many columns of so many lines of so many periods, all powers of two. So the place of
an element in a tile never changes, and a step from tile to tile is one addition per element.
"""

from __future__ import annotations

import triton
import triton.language as tl

from traindiff.kernels.gpu.decoding import as_float64, load_words, magnitude
from traindiff.kernels.gpu.layout import first_word
from traindiff.kernels.gpu.plan import TILE_LOG2

TILE = tl.constexpr(1 << TILE_LOG2)
"""Elements of a tile."""

_SUM_OF_SQUARES = tl.constexpr(first_word("sum_of_squares"))
_ROW_LARGEST = tl.constexpr(first_word("row_largest"))
_ROW_SQUARES = tl.constexpr(first_word("row_squares"))
_COLUMN_LARGEST = tl.constexpr(first_word("column_largest"))
_COLUMN_SQUARES = tl.constexpr(first_word("column_squares"))


@triton.jit
def summarise_profiles(
    address, row, part, parts,
    length, num_runs, memory_step, index_step, start,
    line_length, line_block, column_block, first_group, first_line, row_buckets, column_buckets,
    lines, periods, first_column, stop_column, window, width_log2, height_log2, splits,
    box: tl.constexpr, form: tl.constexpr, bits: tl.constexpr, infinity: tl.constexpr,
):  # fmt: skip
    """Summarise part `part` of `parts` of a piece (see `plan.Piece`), and write squares and profiles.

    The parts are not those of `summarise_blocks`; together they cover the piece all the same.
    """
    buckets = tl.arange(0, 16)
    row_squares = tl.zeros((16,), dtype=tl.float64)
    row_largest = tl.zeros((16,), dtype=tl.float64)
    column_squares = tl.zeros((16,), dtype=tl.float64)
    column_largest = tl.zeros((16,), dtype=tl.float64)
    width, height = 1 << width_log2, 1 << height_log2
    depth = TILE // width // height
    place = tl.arange(0, TILE)
    column_of, line_of = (
        place & (width - 1).to(tl.int32),
        (place >> width_log2.to(tl.int32)) & (height - 1).to(tl.int32),
    )
    period_of = place >> (width_log2 + height_log2).to(tl.int32)
    period_length = 16 * line_block * line_length
    offset = column_of.to(tl.int64) + line_of.to(tl.int64) * line_length + period_of.to(tl.int64) * period_length
    steps_across, steps_down = (window + width - 1) // width, (lines + height - 1) // height
    steps = steps_across * steps_down * ((periods + depth - 1) // depth)
    for unit in range(part, row_buckets * column_buckets * splits, parts):
        column_bucket = first_column // column_block + unit % column_buckets
        split = unit // column_buckets % splits
        number = unit // column_buckets // splits
        row_bucket = (first_group + number) & 15
        low = tl.maximum(column_bucket * column_block, first_column)
        high = tl.minimum((column_bucket + 1) * column_block, stop_column)
        corner = (first_line + number * line_block) * line_length + low - start
        squares = tl.zeros((TILE,), dtype=tl.float64)
        largest = tl.zeros((TILE,), dtype=tl.uint64 if bits == 64 else tl.uint32)
        begin = steps * split // splits
        across, down = begin % steps_across * width, begin // steps_across % steps_down * height
        period = begin // steps_across // steps_down * depth
        for _ in range(begin, steps * (split + 1) // splits):
            valid = (column_of < _ahead(high - low - across)) & (line_of < _ahead(lines - down))
            valid &= period_of < _ahead(periods - period)
            at = offset + (corner + across + down * line_length + period * period_length)
            valid &= at >= 0
            if box:
                run = at // index_step
                at -= run * index_step
                valid &= run < num_runs
                word = load_words(address, run * memory_step + at, valid & (at < length), bits)
            else:
                word = load_words(address, at, valid & (at < length), bits)
            size = magnitude(word, bits)
            size = tl.where(size < infinity, size, 0)
            value = as_float64(size, form)
            squares += value * value
            largest = tl.maximum(largest, size)
            across += width
            down += tl.where(across >= window, height, 0)
            across = tl.where(across >= window, 0, across)
            period += tl.where(down >= lines, depth, 0)
            down = tl.where(down >= lines, 0, down)
        sum_of_squares = tl.sum(squares)
        top = as_float64(tl.max(largest), form)
        row_squares += tl.where(buckets == row_bucket, sum_of_squares, 0.0)
        column_squares += tl.where(buckets == column_bucket, sum_of_squares, 0.0)
        row_largest = tl.maximum(row_largest, tl.where(buckets == row_bucket, top, 0.0))
        column_largest = tl.maximum(column_largest, tl.where(buckets == column_bucket, top, 0.0))
    real = row.to(tl.pointer_type(tl.float64))
    tl.store(real + _SUM_OF_SQUARES, tl.sum(row_squares))
    tl.store(real + _ROW_LARGEST + buckets, row_largest)
    tl.store(real + _ROW_SQUARES + buckets, row_squares)
    tl.store(real + _COLUMN_LARGEST + buckets, column_largest)
    tl.store(real + _COLUMN_SQUARES + buckets, column_squares)


@triton.jit
def _ahead(number):
    """How many of a tile's places along an axis are inside, when `number` lie ahead; int32."""
    return tl.minimum(number, TILE).to(tl.int32)


@triton.jit
def write_no_profiles(row):
    """What integers have: zeros."""
    buckets = tl.arange(0, 16)
    nothing = tl.zeros((16,), dtype=tl.float64)
    real = row.to(tl.pointer_type(tl.float64))
    tl.store(real + _SUM_OF_SQUARES, 0.0)
    tl.store(real + _ROW_LARGEST + buckets, nothing)
    tl.store(real + _ROW_SQUARES + buckets, nothing)
    tl.store(real + _COLUMN_LARGEST + buckets, nothing)
    tl.store(real + _COLUMN_SQUARES + buckets, nothing)
