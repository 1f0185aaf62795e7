"""The one law: merging the summaries of shards gives the summary of the whole."""

from __future__ import annotations

from itertools import pairwise, product
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.core.kernels.oracle import FORMATS
from tests.core.kernels.rounding import assert_equal_up_to_rounding
from tests.core.kernels.tensors import arrays, from_bits
from traindiff.core import summary
from traindiff.core.kernels import summarize
from traindiff.core.shards import OPEN, Shard
from traindiff.core.summary import SUMMARY, empty, merge

pytestmark = pytest.mark.usefixtures("kernel")

DTYPES = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int64", "uint8", "bool")

shapes = st.sampled_from(
    [(), (1,), (7,), (130,), (0, 3), (5, 9), (3, 70), (20, 40), (2, 3, 4), (4, 5, 33), (2, 3, 2, 17)]
)


@st.composite
def tensors(draw: st.DrawFn, shapes: st.SearchStrategy[tuple[int, ...]] = shapes) -> Tensor:
    """Tensors of any bits; the largest are made by a seeded generator, which draws faster."""
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(shapes)
    if prod(shape) <= 60:
        return from_bits(draw(arrays(dtype, shape)), dtype)
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    width = FORMATS[dtype].width
    top = 2 if dtype == "bool" else 2**width
    return from_bits(generator.integers(0, top, size=shape, dtype=f"u{width // 8}"), dtype)


def cuts(draw: st.DrawFn, length: int, *, most: int = 4) -> list[tuple[int, int]]:
    """Divide a length into parts, empty ones among them."""
    inner = sorted(draw(st.lists(st.integers(0, length), max_size=most)))
    return list(pairwise([0, *inner, length]))


def box(tensor: Tensor, spans: tuple[tuple[int, int], ...]) -> np.void:
    part = tensor[tuple(slice(first, last) for first, last in spans)]
    offset = tuple(first for first, _ in spans)
    return summarize(part, Shard(shape=tuple(part.shape), global_shape=tuple(tensor.shape), offset=offset))


@st.composite
def flat_ranges(draw: st.DrawFn, tensor: Tensor) -> list[np.void]:
    """Summaries of ranges of the flattened tensor, as an optimizer with flat parameters holds them."""
    flat, shape = tensor.reshape(-1), tuple(tensor.shape)
    return [
        summarize(flat[first:last], Shard(shape=(last - first,), global_shape=shape, offset=(first,)))
        for first, last in cuts(draw, flat.numel())
    ]


@st.composite
def grids_of_boxes(draw: st.DrawFn, tensor: Tensor) -> list[np.void]:
    """Summaries of boxes, uneven along every axis, as tensor parallelism over several meshes gives them."""
    return [box(tensor, spans) for spans in product(*(cuts(draw, length, most=2) for length in tensor.shape))]


@st.composite
def interleaved_slices(draw: st.DrawFn, tensor: Tensor) -> list[np.void]:
    """Summaries of every k-th slice along one axis, each merged from its slices."""
    axis = draw(st.integers(0, tensor.dim() - 1))
    step = draw(st.integers(1, 4))
    whole = [(0, length) for length in tensor.shape]
    return [
        merge(
            [
                box(tensor, (*whole[:axis], (at, at + 1), *whole[axis + 1 :]))
                for at in range(start, tensor.shape[axis], step)
            ]
        )
        for start in range(step)
    ]


@given(tensors(), st.data())
def test_ranges_of_the_flattened_tensor_merge_to_the_whole(tensor: Tensor, data: st.DataObject) -> None:
    parts = data.draw(flat_ranges(tensor))

    assert_equal_up_to_rounding(merge(parts), summarize(tensor, Shard.whole(tuple(tensor.shape))))


@given(tensors(), st.data())
def test_boxes_merge_to_the_whole(tensor: Tensor, data: st.DataObject) -> None:
    parts = data.draw(grids_of_boxes(tensor))

    assert_equal_up_to_rounding(merge(parts), summarize(tensor, Shard.whole(tuple(tensor.shape))))


@given(tensors(shapes.filter(len)), st.data())
def test_interleaved_slices_merge_to_the_whole(tensor: Tensor, data: st.DataObject) -> None:
    parts = data.draw(interleaved_slices(tensor))

    assert_equal_up_to_rounding(merge(parts), summarize(tensor, Shard.whole(tuple(tensor.shape))))


@given(tensors(shapes.filter(len)), st.data())
def test_rows_of_a_batch_merge_to_the_batch(tensor: Tensor, data: st.DataObject) -> None:
    shape = tuple(tensor.shape)
    parts = [
        summarize(tensor[first:last], Shard.of_batch((last - first, *shape[1:]), first=first))
        for first, last in cuts(data.draw, shape[0])
    ]

    assert_equal_up_to_rounding(merge(parts), summarize(tensor, Shard.of_batch(shape, first=0)))


@given(tensors(shapes.filter(len)), st.data())
def test_boxes_of_a_batch_merge_to_the_batch(tensor: Tensor, data: st.DataObject) -> None:
    """Data and tensor parallelism together: rows of the batch, and a box of every sample."""
    shape = tuple(tensor.shape)
    parts = []
    for spans in product(*(cuts(data.draw, length, most=2) for length in shape)):
        part = tensor[tuple(slice(first, last) for first, last in spans)]
        offset = tuple(first for first, _ in spans)
        shard = Shard(shape=tuple(part.shape), global_shape=(OPEN, *shape[1:]), offset=offset)
        parts.append(summarize(part, shard))

    assert_equal_up_to_rounding(merge(parts), summarize(tensor, Shard.of_batch(shape, first=0)))


@given(tensors(shapes.filter(len)), st.integers(1, 3), st.integers(1, 4), st.data())
def test_rows_that_ranks_take_in_turn_merge_to_the_batch(
    tensor: Tensor, together: int, ranks: int, data: st.DataObject
) -> None:
    """As a distributed sampler hands out samples, each of which may be several rows."""
    tensor = tensor.repeat_interleave(together, 0) if data.draw(st.booleans()) else tensor.repeat_interleave(ranks, 0)
    rows = tensor.shape[0] - tensor.shape[0] % (together * ranks)
    tensor = tensor[:rows]
    shape = tuple(tensor.shape)
    samples = (
        tensor.reshape(-1, ranks, together, *shape[1:]) if rows else tensor.reshape(0, ranks, together, *shape[1:])
    )
    parts = []
    for rank in range(ranks):
        part = samples[:, rank].reshape(rows // ranks, *shape[1:])
        spacing = (together, together * ranks)
        parts.append(summarize(part, Shard.of_batch(tuple(part.shape), first=rank * together, spacing=spacing)))

    assert_equal_up_to_rounding(merge(parts), summarize(tensor, Shard.of_batch(shape, first=0)))


def test_shards_of_many_chunks_merge_to_the_whole() -> None:
    tensor = torch.randn(300, 401, generator=torch.Generator().manual_seed(1))
    quarters = [box(tensor, spans) for spans in product(((0, 111), (111, 300)), ((0, 200), (200, 401)))]

    assert_equal_up_to_rounding(merge(quarters), summarize(tensor, Shard.whole((300, 401))))


@settings(max_examples=30)
@given(tensors(), st.data())
def test_merging_is_commutative_and_associative(tensor: Tensor, data: st.DataObject) -> None:
    parts = data.draw(flat_ranges(tensor))
    expected = merge(parts)
    forest = list(data.draw(st.permutations(parts)))
    while len(forest) > 1:
        first = data.draw(st.integers(0, len(forest) - 2))
        forest[first : first + 2] = [merge(forest[first : first + 2])]

    assert_equal_up_to_rounding(forest[0], expected)


@given(tensors())
def test_the_summary_of_nothing_is_neutral(tensor: Tensor) -> None:
    seen = summarize(tensor, Shard.whole(tuple(tensor.shape)))

    assert merge([empty(), seen, empty()]).tobytes() == merge([seen]).tobytes()
    assert merge([seen])["fingerprint"] == seen["fingerprint"]
    assert_equal_up_to_rounding(merge([seen]), seen)


def test_merging_no_summaries_gives_the_summary_of_nothing() -> None:
    assert merge([]) == empty()
    assert merge(empty((0, 3))).tobytes() == empty(3).tobytes()


def test_merging_works_on_many_sites_at_once() -> None:
    first, second = (
        np.array([summarize(torch.randn(5), Shard.whole((5,))) for _ in range(3)], dtype=SUMMARY) for _ in range(2)
    )

    merged = merge(np.stack([first, second]))

    assert merged.shape == (3,)
    for site in range(3):
        assert merged[site] == merge([first[site], second[site]])


def test_a_sum_of_fingerprints_wraps_without_a_warning() -> None:
    part = empty()
    part["fingerprint"] = part["multiset"] = 2**63 + 5

    assert merge([part, part])["fingerprint"] == 10
    assert summary.merge([part, part, part])["multiset"] == 2**63 + 15
