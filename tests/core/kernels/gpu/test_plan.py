"""How a shard is divided among programs."""

from __future__ import annotations

import numpy as np
import pytest

from traindiff.core.kernels.gpu.layout import ADD_FLOATS, ADD_INTEGERS, MAXIMUM, MINIMUM, WORDS, first_word, merging
from traindiff.core.kernels.gpu.plan import MOST_PARTS, plan
from traindiff.core.shards import Shard


def test_a_small_tensor_is_one_program_that_needs_no_merging() -> None:
    (planned,) = plan(Shard.whole((64, 128)), (128, 1))
    assert planned.parts == 1
    assert not planned.box


def test_a_large_tensor_has_a_bounded_number_of_programs() -> None:
    (planned,) = plan(Shard.whole((200_000, 8192)), (8192, 1))
    assert planned.parts == MOST_PARTS


def test_an_empty_tensor_has_a_program_that_writes_an_empty_summary() -> None:
    (planned,) = plan(Shard.whole((3, 0)), (1, 1))
    assert planned.parts == 1
    assert planned.piece.length == 0


def test_profiles_have_enough_programs_whatever_the_shape() -> None:
    for shape in [(10_000_000,), (10_000_000, 1), (3000, 4000), (4, 3_000_000), (50257, 768)]:
        (planned,) = plan(Shard.whole(shape), (*shape[1:], 1))
        piece = planned.piece
        assert piece.row_buckets * piece.column_buckets * piece.splits >= planned.parts


@pytest.mark.parametrize("rows", [1, 16, 48, 5000])
def test_profiles_read_little_that_is_not_there(rows: int) -> None:
    for columns in (100, 768, 1024, 50_000):
        (planned,) = plan(Shard.whole((rows, columns)), (columns, 1))
        piece = planned.piece
        width, height = 1 << piece.width_log2, 1 << piece.height_log2
        tiles = -(-piece.window // width) * -(-piece.lines // height) * -(-piece.periods * width * height // 1024)
        read = tiles * 1024 * piece.row_buckets * piece.column_buckets
        assert read <= 3 * rows * columns + 1024 * piece.row_buckets * piece.column_buckets


def test_every_word_merges_as_the_format_says() -> None:
    ways = merging()
    assert ways.shape == (WORDS,)
    for name, way in (
        ("count", ADD_INTEGERS), ("fingerprint", ADD_INTEGERS), ("minimum", MINIMUM), ("smallest", MINIMUM),
        ("maximum", MAXIMUM), ("sum", ADD_FLOATS), ("sketch", ADD_FLOATS), ("row_largest", MAXIMUM),
        ("column_squares", ADD_FLOATS),
    ):  # fmt: skip
        assert ways[first_word(name)] == way
    assert np.count_nonzero(ways == MAXIMUM) == 33
