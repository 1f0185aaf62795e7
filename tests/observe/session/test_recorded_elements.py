"""Elements of a tensor, put together from parts: every way of dividing gives back what was divided."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from traindiff.core.shards import OPEN, Shard
from traindiff.observe.torch.session.teacher_forcing import Load, elements_of

WHOLE: NDArray[np.float64] = np.arange(6 * 4 * 3, dtype=np.float64).reshape(6, 4, 3)


def box(*ranges: tuple[int, int], batched: bool = False) -> Shard:
    return Shard(
        shape=tuple(length for _, length in ranges),
        global_shape=(OPEN if batched else 6, 4, 3),
        offset=tuple(first for first, _ in ranges),
    )


def held(shard: Shard) -> tuple[Shard, Load]:
    if len(shard.shape) == 1:
        return shard, lambda: WHOLE.reshape(-1)[shard.offset[0] : shard.offset[0] + shard.shape[0]]
    cut = tuple(slice(first, first + length) for first, length in zip(shard.offset, shard.shape, strict=True))
    return shard, lambda: WHOLE[cut]


def values(shard: Shard) -> NDArray[np.float64]:
    return np.asarray(held(shard)[1]())


def ranges(length: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.integers(0, length - 1).flatmap(
        lambda first: st.integers(1, length - first).map(lambda size: (first, size))
    )


@given(st.tuples(ranges(6), ranges(4), ranges(3)), st.integers(0, 6), st.integers(0, 4), st.booleans())
def test_any_box_is_put_together_from_boxes(
    wanted: tuple[tuple[int, int], ...], rows: int, columns: int, batched: bool
) -> None:
    parts = [
        box((first, size), (begin, width), (0, 3), batched=batched)
        for first, size in ((0, rows), (rows, 6 - rows))
        for begin, width in ((0, columns), (columns, 4 - columns))
        if size and width
    ]
    shard = box(*wanted, batched=batched)

    found = elements_of(shard, [held(part) for part in parts])

    assert found is not None
    assert np.array_equal(found, values(shard))


@given(ranges(72), st.integers(0, 72))
def test_a_flat_range_is_put_together_from_the_whole_or_from_flat_ranges(wanted: tuple[int, int], cut: int) -> None:
    shard = Shard(shape=(wanted[1],), global_shape=(6, 4, 3), offset=(wanted[0],))
    parts = [
        Shard(shape=(size,), global_shape=(6, 4, 3), offset=(first,))
        for first, size in ((0, cut), (cut, 72 - cut))
        if size
    ]

    for given_parts in (parts, [Shard.whole((6, 4, 3))]):
        found = elements_of(shard, [held(part) for part in given_parts])
        assert found is not None
        assert np.array_equal(found, values(shard))


def test_rows_of_samples_in_turn_are_found_in_the_whole_batch() -> None:
    shard = Shard(shape=(3, 4, 3), global_shape=(OPEN, 4, 3), offset=(1, 0, 0), spacing=(1, 2))

    found = elements_of(shard, [held(box((0, 6), (0, 4), (0, 3), batched=True))])

    assert found is not None
    assert np.array_equal(found, WHOLE[1::2])


def test_what_no_part_has_is_not_made_up() -> None:
    assert elements_of(box((0, 6), (0, 4), (0, 3)), [held(box((0, 5), (0, 4), (0, 3)))]) is None
    assert elements_of(box((0, 1), (0, 4), (0, 3)), []) is None
    assert elements_of(box((0, 1), (0, 4), (0, 3)), [(Shard.whole((6, 4, 3)), lambda: None)]) is None


def test_parts_of_another_tensor_are_none_of_it() -> None:
    other = Shard.whole((6, 4))

    assert elements_of(box((0, 1), (0, 4), (0, 3)), [(other, lambda: np.zeros((6, 4)))]) is None


def test_copies_are_read_once() -> None:
    reads: list[None] = []

    def load() -> NDArray[np.float64]:
        reads.append(None)
        return WHOLE

    found = elements_of(box((0, 1), (0, 4), (0, 3)), [(Shard.whole((6, 4, 3)), load)] * 3)

    assert found is not None
    assert len(reads) == 1
