"""Least and largest magnitudes against NumPy, for every dtype and every way in which a tensor may lie in memory."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from traindiff.core.kernels.extent import Extent, extent, magnitudes
from traindiff.errors import UnsupportedTensorError

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SPECIAL = (0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, -6e-8, 65504.0, 3e38, -1.5)


def expected(tensor: torch.Tensor) -> Extent:
    values = np.abs(tensor.detach().to(torch.float64).numpy().reshape(-1))
    if not values.size:
        return Extent(math.nan, math.nan, 0)
    return Extent(float(values.min()), float(values.max()), values.size)


def same(actual: Extent, other: Extent) -> bool:
    return actual.count == other.count and np.array_equal(
        [actual.smallest, actual.largest], [other.smallest, other.largest], equal_nan=True
    )


@given(
    dtype=st.sampled_from(FLOATS),
    size=st.integers(0, 700),
    seed=st.integers(0, 99),
    places=st.lists(st.tuples(st.integers(0, 699), st.sampled_from(SPECIAL)), max_size=4),
)
def test_every_float_comes_out_as_numpy_has_it(
    dtype: torch.dtype, size: int, seed: int, places: list[tuple[int, float]]
) -> None:
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)
    for place, value in places:
        if place < size:
            tensor[place] = value
    found = extent(tensor)

    assert same(found, expected(tensor))
    assert found.is_finite == bool(torch.isfinite(tensor).all())
    smallest, largest, count = magnitudes(tensor)
    assert same(Extent(float(smallest), float(largest), count), found)


@pytest.mark.parametrize("dtype", FLOATS)
def test_it_does_not_matter_how_a_tensor_lies_in_memory(dtype: torch.dtype) -> None:
    whole = torch.randn(6, 40, 9).to(dtype)
    whole[2, 3, 4] = 1e-6
    for tensor in (
        whole, whole.transpose(0, 2), whole[:, ::3], whole[1:, :, 2:5], whole[:, :1].expand(6, 5, 9), whole.flip(1),
        whole[0, 0, 0], whole.permute(1, 2, 0), whole.requires_grad_(), whole.view(-1)[3:200],
    ):  # fmt: skip
        assert same(extent(tensor), expected(tensor))


def test_other_dtypes_are_read_too() -> None:
    assert extent(torch.tensor([True, False])) == Extent(0.0, 1.0, 2)
    assert extent(torch.tensor([-128, 3], dtype=torch.int8)) == Extent(3.0, 128.0, 2)
    assert extent(torch.tensor([3 + 4j, 1j])) == Extent(1.0, 5.0, 2)
    assert extent(torch.tensor([2.0, -448.0]).to(torch.float8_e4m3fn)) == Extent(2.0, 448.0, 2)
    assert extent(torch.tensor([0.0, 7.0]).to_sparse()) == Extent(7.0, 7.0, 1)
    assert not extent(torch.tensor([math.inf]).to(torch.float8_e5m2)).is_finite


def test_what_has_no_elements_is_refused() -> None:
    with pytest.raises(UnsupportedTensorError, match="meta"):
        extent(torch.empty(3, device="meta"))
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode() as mode, pytest.raises(UnsupportedTensorError, match="cannot be read"):
        extent(mode.from_tensor(torch.ones(3)))
