"""Tensors are divided into parts of bounded size, and nothing of them is lost or counted twice."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import traindiff.core.kernels
from tests.core.kernels.rounding import assert_equal_up_to_rounding
from traindiff.core.kernels import parts as dividing
from traindiff.core.kernels import summarize
from traindiff.core.kernels.parts import parts_of
from traindiff.core.kernels.reference import summarize_array
from traindiff.core.shards import OPEN, Shard
from traindiff.core.summary import merge

SHAPES = st.sampled_from([(), (1,), (23,), (5, 9), (9, 5), (3, 4, 5), (2, 3, 2, 4)])


@st.composite
def held(draw: st.DrawFn) -> tuple[torch.Tensor, Shard]:
    """A tensor of any strides, and what it holds: a whole, a box, a batch of spaced rows, or a flat range."""
    shape = draw(SHAPES)
    axes = draw(st.permutations(range(len(shape))))
    values = torch.arange(prod(shape), dtype=torch.float32).reshape([shape[axis] for axis in axes])
    tensor = values.permute([axes.index(axis) for axis in range(len(shape))])
    kinds = ["whole", "range", *(["box", "spaced"] if shape else [])]
    kind = draw(st.sampled_from(kinds))
    if kind == "whole":
        return tensor, Shard.whole(shape)
    if kind == "range":
        return tensor, Shard(shape=(prod(shape),), global_shape=(8, 40), offset=(draw(st.integers(0, 50)),))
    first = draw(st.integers(0, 7))
    if kind == "box":
        whole = tuple(length + 7 for length in shape)
        return tensor, Shard(shape=shape, global_shape=whole, offset=(first, *(1 for _ in shape[1:])))
    together = draw(st.sampled_from([one for one in range(1, shape[0] + 1) if shape[0] % one == 0]))
    return tensor, Shard.of_batch(shape, first=first * together, spacing=(together, together * draw(st.integers(1, 3))))


def places(shard: Shard) -> np.ndarray:
    """Global index of each element, in row-major order."""
    shape, _, steps = shard.axes((0,) * len(shard.shape))
    found = np.full((), shard.start)
    for length, step in zip(shape, steps, strict=True):
        found = found[..., None] + np.arange(length) * step
    return found.reshape(-1)


@given(held(), st.integers(1, 30))
def test_each_element_is_in_one_part_at_its_place(given_: tuple[torch.Tensor, Shard], most: int) -> None:
    tensor, shard = given_
    divided = list(parts_of(tensor, shard, most))

    assert all(view.numel() <= most for view, _ in divided)
    assert all(view.numel() == part.size for view, part in divided)
    found = {
        int(place): float(value)
        for view, part in divided
        for place, value in zip(places(part), view.reshape(-1), strict=True)
    }
    assert found == dict(zip(places(shard).tolist(), tensor.reshape(-1).tolist(), strict=True))


@given(held(), st.integers(1, 30))
def test_summaries_of_the_parts_merge_to_that_of_the_tensor(given_: tuple[torch.Tensor, Shard], most: int) -> None:
    tensor, shard = given_

    merged = merge([summarize(view, part) for view, part in parts_of(tensor, shard, most)])

    assert_equal_up_to_rounding(merged, summarize(tensor, shard))


def test_what_is_not_larger_than_a_part_stays_whole() -> None:
    tensor, shard = torch.ones(4, 5).t(), Shard.whole((5, 4))

    ((view, part),) = parts_of(tensor, shard, 20)

    assert view is tensor
    assert part is shard


def test_a_batch_may_still_grow_in_every_part() -> None:
    shard = Shard.of_batch((4, 6), first=8)

    assert {part.global_shape for _, part in parts_of(torch.ones(4, 6), shard, 5)} == {(OPEN, 6)}


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided"])
def test_a_tensor_is_summarized_in_parts_and_no_copy_is_larger(
    dtype: torch.dtype, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = torch.arange(60 * 40 * 2).reshape(60, 80).remainder(251).to(dtype)
    tensor = {"contiguous": values, "transposed": values.t(), "strided": values[:, ::2]}[layout]
    shard = Shard.whole(tuple(tensor.shape))
    whole = summarize(tensor.contiguous(), shard)
    sizes = []

    def noted(values: np.ndarray, bits: np.ndarray, shard: Shard, *, tiny: float) -> np.void:
        sizes.append(bits.size)
        return summarize_array(values, bits, shard, tiny=tiny)

    monkeypatch.setattr(traindiff.core.kernels.reference, "summarize_array", noted)
    monkeypatch.setattr(dividing.parts_of, "__defaults__", (100,))

    assert_equal_up_to_rounding(summarize(tensor, shard), whole)
    assert all(size <= 100 for size in sizes)
