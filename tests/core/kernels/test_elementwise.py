"""Signs and intervals of single elements, against NumPy in float64."""

from __future__ import annotations

import hashlib
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from traindiff.core.kernels import element_details as elementwise
from traindiff.core.kernels import summarize
from traindiff.core.kernels.element_details import intervals, packed_signs
from traindiff.core.kernels.torch_arrays import detail_of
from traindiff.core.setting_checks import checked_bounds, interval_names
from traindiff.core.shards import Shard
from traindiff.errors import Problem

DTYPES = (np.float16, np.float32, np.float64)
BOUNDS = st.lists(
    st.one_of(st.floats(allow_nan=False, allow_infinity=False), st.sampled_from([-1.0, 0.0, 0.1, 1.0, 1e300])),
    min_size=1, max_size=5, unique=True,
).map(sorted)  # fmt: skip


def values(dtype: Any) -> st.SearchStrategy[Any]:
    special = st.sampled_from([0.0, -0.0, 0.1, -1.0, 1.0, np.nan, np.inf, -np.inf])
    width = np.dtype(dtype).itemsize * 8
    return arrays.arrays(
        dtype,
        st.integers(0, 70),
        elements=st.one_of(special.map(dtype), st.floats(width=width)),  # type: ignore[arg-type]
    )


ARRAYS = st.sampled_from(DTYPES).flatmap(values)


def unpacked(bits: Any, size: int) -> Any:
    return np.unpackbits(bits, count=size, bitorder="little").astype(bool)


@given(ARRAYS)
def test_signs_are_those_of_the_elements(found: Any) -> None:
    positive, signless, nan = packed_signs(found)
    expected = (found == 0) | np.isnan(found)

    np.testing.assert_array_equal(unpacked(positive, found.size), found > 0)
    assert bool(signless.size) == bool(expected.any())
    assert bool(nan.size) == bool(np.isnan(found).any())
    if signless.size:
        np.testing.assert_array_equal(unpacked(signless, found.size), expected)
    if nan.size:
        np.testing.assert_array_equal(unpacked(nan, found.size), np.isnan(found))


@given(ARRAYS)
def test_what_a_summary_knows_of_signs_need_not_be_looked_for(found: Any) -> None:
    tensor = torch.from_numpy(found.reshape(1, -1))
    kept = (
        detail_of(tensor, {"signs"}),
        detail_of(tensor, {"signs"}, summary=summarize(tensor, Shard.whole(tuple(tensor.shape)))),
    )

    assert kept[0] == kept[1]


@given(ARRAYS, BOUNDS)
def test_intervals_are_closed_on_the_right_and_leave_nan_out(found: Any, bounds: list[float]) -> None:
    exact = found.astype(np.float64)
    edges = [-np.inf, *bounds, np.inf]
    inside = [(exact > low) & (exact <= high) for low, high in pairwise(edges)]
    inside[0] |= exact == -np.inf

    assert intervals(found, bounds).tolist() == [int(one.sum()) for one in inside]


def test_a_bound_that_the_dtype_cannot_hold_is_not_rounded() -> None:
    found = np.array([0.1], dtype=np.float32)  # 0.100000001..., so above 0.1
    assert intervals(found, [0.1]).tolist() == [0, 1]
    assert intervals(found, [float(found[0])]).tolist() == [1, 0]


def test_the_example_of_the_gradient_monitor() -> None:
    assert intervals(np.float32([9.3, 5.4, -1.0, -12.3]), [-10, 0, 10]).tolist() == [1, 1, 2, 0]


def test_signs_and_intervals_go_on_from_chunk_to_chunk() -> None:
    found = np.random.default_rng(0).standard_normal(2 * elementwise._CHUNK + 11).astype(np.float32)
    found[[3, elementwise._CHUNK + 5, -1]] = [0.0, np.nan, 0.0]
    positive, signless, nan = packed_signs(found)

    np.testing.assert_array_equal(unpacked(positive, found.size), found > 0)
    assert np.flatnonzero(unpacked(signless, found.size)).tolist() == [3, elementwise._CHUNK + 5, found.size - 1]
    assert np.flatnonzero(unpacked(nan, found.size)).tolist() == [elementwise._CHUNK + 5]
    assert intervals(found, [0.0]).tolist() == [int((found <= 0).sum()), int((found > 0).sum())]


def test_whole_numbers_are_counted_as_they_are() -> None:
    assert intervals(np.array([-1, 0, 1, 2**60], dtype=np.int64), [-0.5, 1.5]).tolist() == [1, 2, 1]


def test_the_digest_is_the_md5_of_the_bytes() -> None:
    tensor = torch.randn(3, 4).t()
    kept = detail_of(tensor, {"md5"})

    assert kept is not None
    assert kept.tensors["md5"].data == hashlib.md5(tensor.contiguous().numpy().tobytes()).digest()


def test_of_a_scalar_only_what_its_summary_does_not_tell_is_kept() -> None:
    scalar = torch.tensor(-2.5)
    kept = detail_of(scalar, {"signs", "md5", "tensors"}, bounds=[0.0])

    assert kept is not None
    assert {name: one.data for name, one in kept.tensors.items()} == {
        "md5": hashlib.md5(scalar.numpy().tobytes()).digest()
    }
    assert detail_of(scalar, {"signs", "exponents"}, bounds=[0.0]) is None


def test_a_complex_scalar_is_two_elements() -> None:
    kept = detail_of(torch.tensor(-1 + 2j), {"signs"}, bounds=[0.0])

    assert kept is not None
    assert kept.tensors["positive"].data == bytes([0b10])
    assert np.frombuffer(kept.tensors["intervals"].data, dtype="<i8").tolist() == [1, 1]


def test_the_names_of_intervals_are_those_of_their_bounds() -> None:
    assert interval_names([-1, 0, 0.5]) == ["(-inf, -1]", "(-1, 0]", "(0, 0.5]", "(0.5, inf)"]
    assert interval_names([]) == []


@pytest.mark.parametrize("wrong", ["-1, 0, 1", [0, "1"], [float("nan")], [float("inf")], [True], 3 + 1j])
def test_bounds_that_are_no_finite_numbers_are_refused(wrong: object) -> None:
    problems: list[Problem] = []
    assert checked_bounds(wrong, problems, where="bounds={!r}") == ()
    assert [one.what for one in problems] == ["must be a list of finite numbers."]


@pytest.mark.parametrize("wrong", [[1, 0], [0, 0]])
def test_bounds_that_do_not_ascend_are_refused(wrong: object) -> None:
    problems: list[Problem] = []
    assert checked_bounds(wrong, problems, where="bounds={!r}") == ()
    assert [one.what for one in problems] == ["must ascend, each number once."]
