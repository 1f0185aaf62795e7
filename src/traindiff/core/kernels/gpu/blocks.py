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
    """Zeros, which is what integers have in these fields."""
    buckets = tl.arange(0, 16)
    nothing = tl.zeros((16,), dtype=tl.float64)
    real = row.to(tl.pointer_type(tl.float64))
    tl.store(real + _SUM_OF_SQUARES, 0.0)
    tl.store(real + _ROW_LARGEST + buckets, nothing)
    tl.store(real + _ROW_SQUARES + buckets, nothing)
    tl.store(real + _COLUMN_LARGEST + buckets, nothing)
    tl.store(real + _COLUMN_SQUARES + buckets, nothing)


BLOCKS = tl.constexpr(8)
"""Rows of a tile: with 4 warps of 32 threads each thread holds 4 elements and their accumulators."""

_SPAN = tl.constexpr(255)
"""Tiles between two looks at the counters, which have 8 bits per kind of element."""

_POSITIVE, _NEGATIVE, _ZERO, _SUBNORMAL, _NAN, _INFINITE = (tl.constexpr(8 * kind) for kind in (0, 1, 2, 3, 5, 6))
"""Kinds of elements, as shifts. A negative subnormal is 4 and a negative infinity 7: one more than positive."""

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
    """
    integers: tl.constexpr = form == "signed" or form == "unsigned"
    number: tl.constexpr = tl.int64 if integers or bits == 64 else tl.int32
    size_type: tl.constexpr = tl.uint64 if integers or bits == 64 else tl.uint32
    highest: tl.constexpr = 2**63 - 1 if integers else infinity
    shape: tl.constexpr = (BLOCKS, 64)
    row_of = tl.arange(0, BLOCKS)
    bucket = tl.arange(0, 64)
    kinds = tl.arange(0, 8)
    counts = tl.zeros((8,), dtype=tl.int64)
    low = tl.full(shape, highest, dtype=number)
    high = tl.full(shape, -highest - (1 if integers else 0), dtype=number)
    small = tl.full(shape, 2**64 - 1 if integers else infinity, dtype=size_type)
    total = tl.zeros(shape, dtype=tl.float64)
    sketch = tl.zeros(shape, dtype=tl.float64)
    fingerprint = tl.zeros(shape, dtype=tl.uint64)
    multiset = tl.zeros(shape, dtype=tl.uint64)
    nonfinite = tl.zeros(shape, dtype=tl.uint64)
    tiles = (num_runs * blocks_per_run + BLOCKS - 1) // BLOCKS
    stop = tiles * (part + 1) // parts
    for span in range(tiles * part // parts, stop, _SPAN):
        packed = tl.zeros(shape, dtype=tl.uint64)
        for tile in range(span, tl.minimum(span + _SPAN, stop)):
            # `before` elements lie before the run: of each row's block, or of the tile if there is one run.
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
            weight = block_weights(block)[:, None]
            lane = (bucket[None, :] - (weight >> 58).to(tl.int32)) & 63
            place = lane if box else row_of[:, None] * 64 + lane
            valid = (place >= _within_tile(before)) & (place < _within_tile(ahead))
            word = load_words(base - before * (bits // 8), place, valid, bits)
            lane_weight = tl.load(lane_weights.to(tl.pointer_type(tl.uint32)) + 2 * lane).to(tl.uint64)
            weight = weight * lane_weight
            fingerprint += weight * fold(word, bits)
            multiset += multiset_hash(word, bits)

            kind = _kind(word, form, bits, infinity, first_nan, smallest_normal)
            packed += tl.where(valid, tl.full(shape, 1, dtype=tl.uint64) << kind.to(tl.uint32).to(tl.uint64), 0)
            finite = valid & (kind < _NAN)
            key = order_key(word, form, bits)
            size = element_size(word, form, bits)
            low = tl.minimum(low, tl.where(finite, key, low))
            high = tl.maximum(high, tl.where(finite, key, high))
            small = tl.minimum(small, tl.where(finite & (size != 0), size, small))
            if not integers:
                nonfinite += weight * _nonfinite_code(kind)
                value = tl.where(finite, as_float64(word, form), 0.0)
                total += value
                negated = ((block_signs(block)[:, None] >> lane.to(tl.uint32).to(tl.uint64)) & 1) != 0
                sketch += tl.where(negated, -value, value)
        for kind in tl.static_range(8):
            found = tl.sum(((packed >> (8 * kind)) & 0xFF).to(tl.int64))
            counts += tl.where(kinds == kind, found, 0)

    whole = row.to(tl.pointer_type(tl.int64))
    real = row.to(tl.pointer_type(tl.float64))
    every = tl.sum(counts)
    nans, infinities = _of(counts, _NAN), _of(counts, _INFINITE)
    negative_infinities = _of(counts, _INFINITE + 8)
    zeros = _of(counts, _ZERO)
    subnormals, negative_subnormals = _of(counts, _SUBNORMAL), _of(counts, _SUBNORMAL + 8)
    finites = every - nans - infinities - negative_infinities
    tl.store(whole + _COUNT, every)
    tl.store(whole + _NANS, nans)
    tl.store(whole + _POSITIVE_INFINITIES, infinities)
    tl.store(whole + _NEGATIVE_INFINITIES, negative_infinities)
    tl.store(whole + _ZEROS, zeros)
    tl.store(whole + _NEGATIVES, _of(counts, _NEGATIVE) + negative_subnormals + negative_infinities)
    tl.store(whole + _SUBNORMALS, subnormals + negative_subnormals)
    tl.store(real + _MINIMUM, tl.where(finites > 0, key_as_float64(tl.min(low), form), float("inf")))
    tl.store(real + _MAXIMUM, tl.where(finites > 0, key_as_float64(tl.max(high), form), float("-inf")))
    tl.store(real + _SMALLEST, tl.where(finites > zeros, size_as_float64(tl.min(small), form), float("inf")))
    tl.store(real + _SUM, tl.sum(total))
    tl.store(whole + _FINGERPRINT, tl.sum(fingerprint).to(tl.int64))
    tl.store(whole + _MULTISET, tl.sum(multiset).to(tl.int64))
    tl.store(whole + _NONFINITE, tl.sum(nonfinite).to(tl.int64))
    tl.store(real + _SKETCH + bucket, tl.sum(sketch, axis=0))


@triton.jit
def _within_tile(number):
    """A number of elements, at least 0 and at most those of a tile, int32."""
    return tl.minimum(tl.maximum(number, 0), BLOCKS * 64).to(tl.int32)


@triton.jit
def _kind(
    word, form: tl.constexpr, bits: tl.constexpr,
    infinity: tl.constexpr, first_nan: tl.constexpr, smallest_normal: tl.constexpr,
):  # fmt: skip
    """Which counter of 8 bits an element belongs to, as a shift of 0 to 56."""
    if form == "signed" or form == "unsigned":
        value = order_key(word, form, bits)
        kind = tl.where(value == 0, _ZERO, tl.where(value < 0, _NEGATIVE, _POSITIVE))
    else:
        size = magnitude(word, bits)
        signed = tl.where(is_signed(word, bits), 8, 0)
        subnormal = tl.where(size == 0, _ZERO, _SUBNORMAL + signed)
        kind = tl.where(size < smallest_normal, subnormal, signed)
        beyond = tl.where(size >= first_nan, _NAN, _INFINITE + signed)
        kind = tl.where(size < infinity, kind, beyond)
    return kind


@triton.jit
def _nonfinite_code(kind):
    """1 for NaN, 2 for +inf, 3 for -inf, else 0, as uint64."""
    return tl.where(kind >= _NAN, (kind >> 3) - 4, 0).to(tl.uint32).to(tl.uint64)


@triton.jit
def _of(counts, shift: tl.constexpr):
    """The counter of one kind."""
    return tl.sum(tl.where(tl.arange(0, 8) == shift // 8, counts, 0))
