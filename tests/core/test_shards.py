"""Shards: global indices, contiguity, and the grid of the profiles."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.kernels import oracle
from traindiff.core.shards import OPEN, Shard


@st.composite
def boxes(draw: st.DrawFn) -> Shard:
    whole = draw(st.lists(st.integers(0, 6), max_size=4).map(tuple))
    offset = tuple(draw(st.integers(0, length)) for length in whole)
    shape = tuple(draw(st.integers(0, length - first)) for first, length in zip(offset, whole, strict=True))
    return Shard(shape=shape, global_shape=whole, offset=offset)


def indices(shard: Shard) -> list[int]:
    return oracle.box_indices(shard.shape, oracle.row_major_strides(shard.global_shape), shard.offset)


def test_a_whole_tensor_begins_at_zero_and_covers_its_shape() -> None:
    shard = Shard.whole((3, 4))

    assert shard == Shard(shape=(3, 4), global_shape=(3, 4), offset=(0, 0))
    assert (shard.size, shard.start, shard.strides, shard.contiguous) == (12, 0, (4, 1), True)
    assert not shard.batched


def test_a_scalar_is_one_element_at_index_zero() -> None:
    shard = Shard.whole(())

    assert (shard.size, shard.start, shard.strides, shard.contiguous) == (1, 0, (), True)
    assert not shard.batched


@given(boxes())
def test_a_box_begins_at_the_global_index_of_its_first_element(shard: Shard) -> None:
    if shard.size:
        assert shard.start == indices(shard)[0]


@given(boxes())
def test_a_box_is_contiguous_exactly_when_its_global_indices_are_one_run(shard: Shard) -> None:
    seen = indices(shard)
    if shard.size:
        assert shard.contiguous == (seen == list(range(seen[0], seen[0] + len(seen))))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple), st.integers(0, 10), st.integers(0, 7))
def test_rows_of_a_batch_are_indexed_without_knowing_its_length(sample: tuple[int, ...], first: int, rows: int) -> None:
    shard = Shard.of_batch((rows, *sample), first=first)

    assert shard.batched
    assert shard.global_shape == (OPEN, *sample)
    assert shard.contiguous
    assert shard.size == rows * prod(sample)
    assert shard.start == first * prod(sample)


def test_a_flat_range_of_a_tensor_with_several_axes_begins_at_its_offset() -> None:
    shard = Shard(shape=(5,), global_shape=(4, 6), offset=(7,))

    assert (shard.size, shard.start, shard.contiguous) == (5, 7, True)


@pytest.mark.parametrize(
    ("shape", "columns", "row_block", "column_block"),
    [
        ((), 1, 1, 16),
        ((5,), 5, 1, 16),
        ((257,), 257, 1, 32),
        ((16, 256), 256, 1, 16),
        ((17, 257), 257, 2, 32),
        ((100, 3, 1000), 3000, 7, 192),
        ((0, 7), 7, 1, 16),
        ((7, 0), 1, 1, 16),
        ((OPEN, 8), 8, 1, 16),
        ((OPEN, 50, 300), 300, 4, 32),
        ((OPEN,), 1, 1, 16),
    ],
)
def test_the_grid_divides_rows_and_columns_into_16_buckets(
    shape: tuple[int, ...], columns: int, row_block: int, column_block: int
) -> None:
    grid = Shard(shape=shape, global_shape=shape, offset=tuple(0 for _ in shape)).grid

    assert (grid.columns, grid.row_block, grid.column_block) == (columns, row_block, column_block)


@given(st.lists(st.integers(1, 700), min_size=1, max_size=3).map(tuple))
def test_no_row_or_column_falls_outside_the_buckets(shape: tuple[int, ...]) -> None:
    grid = Shard.whole(shape).grid
    last = np.array(prod(shape) - 1)

    assert last // (grid.columns * grid.row_block) < 16
    assert (grid.columns - 1) // grid.column_block < 16
