"""Regions against cutting a real tensor with torch."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from traindiff.core.shards import Region

Cut = tuple[int, int, int, int]


@st.composite
def cuts(draw: st.DrawFn) -> Cut:
    size = draw(st.integers(1, 4))
    return draw(st.integers(0, 2)), size, draw(st.integers(0, size - 1)), draw(st.integers(1, 3))


def cut(tensor: torch.Tensor, dim: int, size: int, index: int, blocks: int) -> torch.Tensor:
    def chunk(part: torch.Tensor, count: int) -> list[torch.Tensor]:
        step = -(-part.shape[dim] // count)
        ends = [min(number * step, part.shape[dim]) for number in range(count + 1)]
        return [part.narrow(dim, first, end - first) for first, end in pairwise(ends)]

    return torch.cat([chunk(block, size)[index] for block in chunk(tensor, blocks)], dim=dim)


@given(st.tuples(*[st.integers(1, 9)] * 3), st.lists(cuts(), max_size=3), st.integers(-3, 2))
def test_the_boxes_of_a_place_are_what_cutting_leaves(shape: tuple[int, ...], steps: list[Cut], axis: int) -> None:
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    local, region = whole, Region.whole(shape)
    for dim, size, index, blocks in steps:
        local = cut(local, dim, size, index, blocks)
        region = region.cut(dim, size=size, index=index, blocks=blocks)
    assert region.local_shape == local.shape

    local, whole, region = local.movedim(axis, 0), whole.movedim(axis, 0), region.batch_first(axis)
    seen = torch.full_like(local, -1)
    for box in region.boxes():
        here = tuple(slice(first, first + length) for first, length in zip(box.first, box.shape, strict=True))
        there = tuple(slice(first, first + length) for first, length in zip(box.offset, box.shape, strict=True))
        seen[here] = whole[there]
    assert torch.equal(seen, local)


def test_queries_keys_and_values_in_one_tensor_are_cut_each_by_itself() -> None:
    region = Region.whole((12, 5)).cut(0, size=2, index=1, blocks=3)

    assert region.ranges == (((2, 2), (6, 2), (10, 2)), ((0, 5),))
    assert [box.offset for box in region.boxes()] == [(2, 0), (6, 0), (10, 0)]


def test_a_scalar_is_one_box() -> None:
    (box,) = Region.whole(()).boxes()

    assert (box.first, box.offset, box.shape) == ((), (), ())


def test_terms_of_sums_over_two_axes_are_numbered() -> None:
    assert Region.whole((2,)).summed(size=2, index=1).summed(size=3, index=2).term == 5
