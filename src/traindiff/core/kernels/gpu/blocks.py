"""Device code: counts, extremes, sum, fingerprints and sketch: what walks the global index in blocks of 64.

A tile is BLOCKS blocks at once, one per row. Its columns are not the lanes but the *sketch buckets*: the
element in column b of a row is the one whose bucket is b, lane (b - rotation) mod 64. So the sketch is
a sum over rows, without atomics; a row's 64 elements are read in rotated order, from the same lines of
memory.

A *unit* is what one row bucket and one column bucket share, or a split of it. It is read in tiles of
TILE elements: so many columns of so many lines of so many periods, all powers of two. So the place of
an element in a tile never changes, and a step from tile to tile is one addition per element.
"""

from __future__ import annotations

import triton
import triton.language as tl

from traindiff.core.kernels.gpu.decoding import (
    as_float64,
    block_signs,
    block_weights,
    element_size,
    fold,
    is_signed,
    key_as_float64,
    load_words,
    magnitude,
    multiset_hash,
    order_key,
    size_as_float64,
)
from traindiff.core.kernels.gpu.layout import first_word
from traindiff.core.kernels.gpu.plan import TILE_LOG2

TILE = tl.constexpr(1 << TILE_LOG2)
"""Elements of a tile."""

_SUM_OF_SQUARES = tl.constexpr(first_word("sum_of_squares"))
_ROW_LARGEST = tl.constexpr(first_word("row_largest"))
_ROW_SQUARES = tl.constexpr(first_word("row_squares"))
_COLUMN_LARGEST = tl.constexpr(first_word("column_largest"))
_COLUMN_SQUARES = tl.constexpr(first_word("column_squares"))


@triton.jit
def summarize_profiles(
    address, row, part, parts,
    length, num_runs, memory_step, index_step, start,
    line_length, line_block, column_block, first_group, first_line, row_buckets, column_buckets,
    lines, periods, first_column, stop_column, window, width_log2, height_log2, splits,
    box: tl.constexpr, form: tl.constexpr, bits: tl.constexpr, infinity: tl.constexpr,
):  # fmt: skip
    """Summarize part `part` of `parts` of a piece (see `plan.KernelPiece`), and write squares and profiles.

    The parts are not those of `summarize_blocks`; together they cover the piece all the same.
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
    # A tile with several periods, or several lines, spans less than 2^31 elements: see `plan._tiles`.
    offset = column_of + line_of * line_length.to(tl.int32) + period_of * period_length.to(tl.int32)
    last = (width - 1) + (height - 1) * line_length + (depth - 1) * period_length
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
            base = corner + across + down * line_length + period * period_length
            inside = (high - low - across >= width) & (lines - down >= height) & (periods - period >= depth)
            if box:
                at = offset + base
                valid = _valid(column_of, line_of, period_of, high - low - across, lines - down, periods - period)
                valid &= at >= 0
                run = at // index_step
                at -= run * index_step
                valid &= run < num_runs
                word = load_words(address, run * memory_step + at, valid & (at < length), bits)
            elif inside & (base >= 0) & (base + last < length):
                everywhere = tl.full((TILE,), 1, dtype=tl.int1)
                word = load_words(address + base * (bits // 8), offset, everywhere, bits)
            else:
                valid = _valid(column_of, line_of, period_of, high - low - across, lines - down, periods - period)
                at = offset + base
                word = load_words(address, at, valid & (at >= 0) & (at < length), bits)
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
def _valid(column_of, line_of, period_of, columns, lines, periods):
    """Whether the places of a tile are inside, when so many columns, lines and periods lie ahead."""
    return (column_of < _ahead(columns)) & (line_of < _ahead(lines)) & (period_of < _ahead(periods))


@triton.jit
def _ahead(number):
    """How many of a tile's places along an axis are inside, when `number` lie ahead; int32."""
    return tl.minimum(number, TILE).to(tl.int32)


@triton.jit
def write_no_profiles(row):
    """Zeros, which is what integers have in these fields."""
    buckets = tl.arange(0, 16)
    nothing = tl.zeros((16,), dtype=tl.float64)
    real = row.to(tl.pointer_type(tl.float64))
    tl.store(real + _SUM_OF_SQUARES, 0.0)
    tl.store(real + _ROW_LARGEST + buckets, nothing)
    tl.store(real + _ROW_SQUARES + buckets, nothing)
    tl.store(real + _COLUMN_LARGEST + buckets, nothing)
    tl.store(real + _COLUMN_SQUARES + buckets, nothing)


BLOCKS = tl.constexpr(16)
"""Rows of a tile."""

COLUMNS = tl.constexpr(8)
"""Columns that are read at once: with 4 warps of 32 threads, a thread reads one element of each eighth of a row."""

_COUNT = tl.constexpr(first_word("count"))
_NANS = tl.constexpr(first_word("nan"))
_POSITIVE_INFINITIES = tl.constexpr(first_word("positive_infinity"))
_NEGATIVE_INFINITIES = tl.constexpr(first_word("negative_infinity"))
_ZEROS = tl.constexpr(first_word("zero"))
_NEGATIVES = tl.constexpr(first_word("negative"))
_SUBNORMALS = tl.constexpr(first_word("subnormal"))
_MINIMUM = tl.constexpr(first_word("minimum"))
_MAXIMUM = tl.constexpr(first_word("maximum"))
_SMALLEST = tl.constexpr(first_word("smallest"))
_SUM = tl.constexpr(first_word("sum"))
_FINGERPRINT = tl.constexpr(first_word("fingerprint"))
_MULTISET = tl.constexpr(first_word("multiset"))
_NONFINITE = tl.constexpr(first_word("nonfinite"))
_SKETCH = tl.constexpr(first_word("sketch"))


@triton.jit
def summarize_blocks(
    address, row, lane_weights, part, parts,
    length, num_runs, memory_step, index_step, start, blocks_per_run,
    box: tl.constexpr, form: tl.constexpr, bits: tl.constexpr,
    infinity: tl.constexpr, first_nan: tl.constexpr, smallest_normal: tl.constexpr,
):  # fmt: skip
    """Summarize part `part` of `parts` of a piece (see `plan.KernelPiece`), and write all but squares and profiles.

    `address`, `row` and `lane_weights` (int64) are those of the piece's first element, of the summary to
    write, and of 64 int64. `box` is whether `num_runs` may be more than 1.

    An element that is not there is read as 0, which adds nothing to a hash or a sum. Elements that are not finite are
    rare: they are counted in a second walk, if there are any.
    """
    integers: tl.constexpr = form == "signed" or form == "unsigned"
    number: tl.constexpr = tl.int64 if integers or bits == 64 else tl.int32
    size_type: tl.constexpr = tl.uint64 if integers or bits == 64 else tl.uint32
    highest: tl.constexpr = 2**63 - 1 if integers else infinity
    shape: tl.constexpr = (BLOCKS, COLUMNS)
    elements = tl.zeros((BLOCKS, 1), dtype=tl.int64)
    zeros = tl.zeros(shape, dtype=tl.int32)
    below_normal = tl.zeros(shape, dtype=tl.int32)
    negatives = tl.zeros(shape, dtype=tl.int32)
    low = tl.full(shape, highest, dtype=number)
    high = tl.full(shape, -highest - (1 if integers else 0), dtype=number)
    small = tl.full(shape, 2**64 - 1 if integers or bits == 64 else 2**32 - 1, dtype=size_type)
    large = tl.zeros(shape, dtype=size_type)
    total = tl.zeros(shape, dtype=tl.float64)
    fingerprint = tl.zeros(shape, dtype=tl.uint64)
    multiset = tl.zeros(shape, dtype=tl.uint64)
    sketch_0 = tl.zeros(shape, dtype=tl.float64)
    sketch_1 = tl.zeros(shape, dtype=tl.float64)
    sketch_2 = tl.zeros(shape, dtype=tl.float64)
    sketch_3 = tl.zeros(shape, dtype=tl.float64)
    sketch_4 = tl.zeros(shape, dtype=tl.float64)
    sketch_5 = tl.zeros(shape, dtype=tl.float64)
    sketch_6 = tl.zeros(shape, dtype=tl.float64)
    sketch_7 = tl.zeros(shape, dtype=tl.float64)
    tiles = (num_runs * blocks_per_run + BLOCKS - 1) // BLOCKS
    begin, stop = tiles * part // parts, tiles * (part + 1) // parts
    for tile in range(begin, stop):
        block, first, from_place, to_place = _tile(
            tile, address, length, num_runs, memory_step, index_step, start, blocks_per_run, box, bits
        )  # fmt: skip
        weight = block_weights(block)[:, None]
        signs = block_signs(block)[:, None]
        row_hash = tl.zeros(shape, dtype=tl.uint64)
        elements += _places(from_place, to_place, box)
        for eighth in tl.static_range(8):
            lane, valid, word = _read(first, weight, from_place, to_place, eighth, box, bits)
            row_hash += _lane_weight(lane_weights, lane) * fold(word, bits)
            multiset += multiset_hash(word, bits)
            key = order_key(word, form, bits)
            size = element_size(word, form, bits)
            finite = valid if integers else valid & (size < infinity)
            low = tl.minimum(low, tl.where(finite, key, low))
            high = tl.maximum(high, tl.where(finite, key, high))
            small = tl.minimum(small, size - 1)  # the largest number for 0
            zeros += (size == 0).to(tl.int32)
            negatives += (finite & (key < 0)).to(tl.int32)
            if not integers:
                large = tl.maximum(large, size)
                below_normal += (size < smallest_normal).to(tl.int32)
                value = tl.where(finite, as_float64(word, form), 0.0)
                total += value
                sign = (signs << (63 - lane).to(tl.uint32).to(tl.uint64)) & _TOP_BIT
                signed = (value.to(tl.uint64, bitcast=True) ^ sign).to(tl.float64, bitcast=True)
                sketch_0 = _added(sketch_0, signed, eighth, 0)
                sketch_1 = _added(sketch_1, signed, eighth, 1)
                sketch_2 = _added(sketch_2, signed, eighth, 2)
                sketch_3 = _added(sketch_3, signed, eighth, 3)
                sketch_4 = _added(sketch_4, signed, eighth, 4)
                sketch_5 = _added(sketch_5, signed, eighth, 5)
                sketch_6 = _added(sketch_6, signed, eighth, 6)
                sketch_7 = _added(sketch_7, signed, eighth, 7)
        fingerprint += weight * row_hash

    whole = row.to(tl.pointer_type(tl.int64))
    real = row.to(tl.pointer_type(tl.float64))
    count = tl.sum(elements)
    missing = (stop - begin) * BLOCKS * 64 - count
    found_zeros = tl.sum(zeros.to(tl.int64)) - missing
    found_negatives = tl.sum(negatives.to(tl.int64))
    finites = count
    tl.store(whole + _NANS, 0)
    tl.store(whole + _POSITIVE_INFINITIES, 0)
    tl.store(whole + _NEGATIVE_INFINITIES, 0)
    tl.store(whole + _NONFINITE, 0)
    if not integers:  # noqa: SIM102  for integers, nothing of this is compiled
        if tl.max(large) >= infinity:
            nans, positive, negative = _write_nonfinite(
                address, row, lane_weights, begin, stop,
                length, num_runs, memory_step, index_step, start, blocks_per_run,
                box, bits, infinity, first_nan,
            )  # fmt: skip
            finites -= nans + positive + negative
            found_negatives += negative
    tl.store(whole + _COUNT, count)
    tl.store(whole + _ZEROS, found_zeros)
    tl.store(whole + _NEGATIVES, found_negatives)
    subnormals = tl.sum(below_normal.to(tl.int64)) - missing - found_zeros
    tl.store(whole + _SUBNORMALS, 0 if integers else subnormals)
    tl.store(real + _MINIMUM, tl.where(finites > 0, key_as_float64(tl.min(low), form), float("inf")))
    tl.store(real + _MAXIMUM, tl.where(finites > 0, key_as_float64(tl.max(high), form), float("-inf")))
    smallest = size_as_float64(tl.min(small) + 1, form)
    tl.store(real + _SMALLEST, tl.where(finites > found_zeros, smallest, float("inf")))
    tl.store(real + _SUM, tl.sum(total))
    tl.store(whole + _FINGERPRINT, tl.sum(fingerprint).to(tl.int64))
    tl.store(whole + _MULTISET, tl.sum(multiset).to(tl.int64))
    place = real + _SKETCH + tl.arange(0, COLUMNS)
    tl.store(place, tl.sum(sketch_0, axis=0))
    tl.store(place + 8, tl.sum(sketch_1, axis=0))
    tl.store(place + 16, tl.sum(sketch_2, axis=0))
    tl.store(place + 24, tl.sum(sketch_3, axis=0))
    tl.store(place + 32, tl.sum(sketch_4, axis=0))
    tl.store(place + 40, tl.sum(sketch_5, axis=0))
    tl.store(place + 48, tl.sum(sketch_6, axis=0))
    tl.store(place + 56, tl.sum(sketch_7, axis=0))


_TOP_BIT = tl.constexpr(1 << 63)


@triton.jit
def _added(sketch, values, eighth: tl.constexpr, own: tl.constexpr):
    """The sums of an eighth of the buckets, after the values of some eighth."""
    if eighth == own:
        sketch += values
    return sketch


@triton.jit
def _write_nonfinite(
    address, row, lane_weights, begin, stop,
    length, num_runs, memory_step, index_step, start, blocks_per_run,
    box: tl.constexpr, bits: tl.constexpr, infinity: tl.constexpr, first_nan: tl.constexpr,
):  # fmt: skip
    """Write the counts and the fingerprint of the elements that are not finite; returns NaN, +inf and -inf, int64."""
    shape: tl.constexpr = (BLOCKS, COLUMNS)
    nans = tl.zeros(shape, dtype=tl.int32)
    positive = tl.zeros(shape, dtype=tl.int32)
    negative = tl.zeros(shape, dtype=tl.int32)
    fingerprint = tl.zeros(shape, dtype=tl.uint64)
    for tile in range(begin, stop):
        block, first, from_place, to_place = _tile(
            tile, address, length, num_runs, memory_step, index_step, start, blocks_per_run, box, bits
        )  # fmt: skip
        weight = block_weights(block)[:, None]
        row_hash = tl.zeros(shape, dtype=tl.uint64)
        for eighth in tl.static_range(8):
            lane, _, word = _read(first, weight, from_place, to_place, eighth, box, bits)
            size = magnitude(word, bits)
            nan = size >= first_nan
            infinite = (size >= infinity) & (size < first_nan)
            minus = is_signed(word, bits)
            nans += nan.to(tl.int32)
            positive += (infinite & (minus == 0)).to(tl.int32)
            negative += (infinite & minus).to(tl.int32)
            code = tl.where(nan, 1, tl.where(infinite, tl.where(minus, 3, 2), 0))
            row_hash += _lane_weight(lane_weights, lane) * code.to(tl.uint32).to(tl.uint64)
        fingerprint += weight * row_hash
    whole = row.to(tl.pointer_type(tl.int64))
    num_nans, num_positive = tl.sum(nans.to(tl.int64)), tl.sum(positive.to(tl.int64))
    num_negative = tl.sum(negative.to(tl.int64))
    tl.store(whole + _NANS, num_nans)
    tl.store(whole + _POSITIVE_INFINITIES, num_positive)
    tl.store(whole + _NEGATIVE_INFINITIES, num_negative)
    tl.store(whole + _NONFINITE, tl.sum(fingerprint).to(tl.int64))
    return num_nans, num_positive, num_negative


@triton.jit
def _tile(
    tile, address, length, num_runs, memory_step, index_step, start, blocks_per_run,
    box: tl.constexpr, bits: tl.constexpr,
):  # fmt: skip
    """The blocks of a tile's rows, the address of their places, and the first place that is there and the one after.

    Places are counted in each row's block, or in the tile if there is one run.
    """
    row_of = tl.arange(0, BLOCKS)
    if box:
        number_of_block = row_of.to(tl.int64) + tile * BLOCKS
        run = number_of_block // blocks_per_run
        first = start + run * index_step
        block = (first >> 6) + number_of_block - run * blocks_per_run
        before = (first - block * 64)[:, None]
        ahead = tl.where((run < num_runs)[:, None], before + length, 0)
        base = address + (run * memory_step)[:, None] * (bits // 8)
    else:
        block = row_of.to(tl.int64) + ((start >> 6) + tile * BLOCKS)
        before = (start & 63) - tile * (BLOCKS * 64)
        ahead = before + length
        base = address
    return block, base - before * (bits // 8), _within_tile(before), _within_tile(ahead)


@triton.jit
def _places(from_place, to_place, box: tl.constexpr):
    """How many elements of each row of a tile are there, int64."""
    begin = tl.arange(0, BLOCKS)[:, None] * (0 if box else 64)
    found = tl.minimum(to_place - begin, 64) - tl.maximum(from_place - begin, 0)
    return tl.maximum(found, 0).to(tl.int64)


@triton.jit
def _read(first, weight, from_place, to_place, eighth: tl.constexpr, box: tl.constexpr, bits: tl.constexpr):
    """The lanes of an eighth of each row's buckets, whether the elements are there, and their words."""
    lane = (tl.arange(0, COLUMNS)[None, :] + (eighth * COLUMNS) - (weight >> 58).to(tl.int32)) & 63
    place = lane if box else tl.arange(0, BLOCKS)[:, None] * 64 + lane
    valid = (place >= from_place) & (place < to_place)
    return lane, valid, load_words(first, place, valid, bits)


@triton.jit
def _lane_weight(lane_weights, lane):
    return tl.load(lane_weights.to(tl.pointer_type(tl.uint32)) + 2 * lane).to(tl.uint64)


@triton.jit
def _within_tile(number):
    """A number of elements, at least 0 and at most those of a tile, int32."""
    return tl.minimum(tl.maximum(number, 0), BLOCKS * 64).to(tl.int32)
