"""What follows from summaries: sums of tensors, scaled tensors, norms, means, distances."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.core.kernels.rounding import SUMMARY_NAMES, assert_equal_up_to_rounding
from traindiff.core import summary
from traindiff.core.kernels.reference import summarize_array
from traindiff.core.shards import Shard
from traindiff.core.summary import SUMMARY, add, empty, merge, scale

FLOAT64_TINY = float(np.finfo(np.float64).smallest_normal)


def of(values: NDArray[np.float64] | list[float]) -> np.void:
    array = np.ascontiguousarray(values, dtype=np.float64)
    flat = array.reshape(-1)
    return summarize_array(flat, flat.view(np.uint64), Shard.whole(array.shape), tiny=FLOAT64_TINY)


def random(*shape: int, seed: int = 0) -> NDArray[np.float64]:
    return np.random.default_rng(seed).standard_normal(shape)


def test_a_summary_is_packed_64_bit_words() -> None:
    assert SUMMARY.itemsize == 8 * sum(int(np.prod(SUMMARY[name].shape, dtype=int)) for name in SUMMARY_NAMES)
    assert {SUMMARY[name].base.itemsize for name in SUMMARY_NAMES} == {8}
    assert SUMMARY.itemsize < 1400  # "about one kilobyte" is a promise of the documentation


@given(st.integers(0, 2**32), st.lists(st.floats(-4, 4), min_size=1, max_size=5))
def test_sketches_of_terms_add_up_to_the_sketch_of_the_sum(seed: int, weights: list[float]) -> None:
    terms = [random(9, 30, seed=seed + number) for number in range(len(weights))]
    whole = of(sum(weight * term for weight, term in zip(weights, terms, strict=True)))

    added = add([of(term) for term in terms], weights)

    np.testing.assert_allclose(added["sketch"], whole["sketch"], rtol=0, atol=1e-11)
    np.testing.assert_allclose(added["sum"], whole["sum"], rtol=0, atol=1e-11)
    assert added["count"] == whole["count"]


def test_terms_of_a_sum_weigh_one_where_no_weights_are_given() -> None:
    terms = [of(random(50, seed=seed)) for seed in range(3)]

    assert add(terms)["sum"] == add(terms, [1.0, 1.0, 1.0])["sum"]


def test_the_norm_of_a_sum_is_estimated_from_its_sketch() -> None:
    terms = [random(4096, seed=seed) for seed in range(3)]

    added = add([of(term) for term in terms])

    assert added["sum_of_squares"] == np.square(added["sketch"]).sum()
    assert abs(np.log2(summary.norm(added) / np.linalg.norm(sum(terms)))) < 4 * 0.128


def test_what_does_not_follow_for_a_sum_is_marked_as_unknown() -> None:
    added = add([of([1.0, np.nan]), of([np.inf, -np.inf])])

    assert (added["count"], added["nan"], added["positive_infinity"], added["negative_infinity"]) == (2, 1, 1, 1)
    assert added["fingerprint"] == added["multiset"] == added["nonfinite"] == 0
    for name in ("minimum", "maximum", "smallest", "row_largest", "column_squares"):
        assert np.all(np.isnan(added[name]))


def test_adding_works_on_many_sites_at_once() -> None:
    terms = np.array([[of(random(8, seed=i)), of(random(8, seed=i + 10))] for i in range(3)], dtype=SUMMARY)

    added = add(terms, [1.0, -2.0, 0.5])

    assert added.shape == (2,)
    expected = of(random(8) - 2 * random(8, seed=1) + 0.5 * random(8, seed=2))
    np.testing.assert_allclose(added[0]["sketch"], expected["sketch"], atol=1e-12)


@given(st.sampled_from([2.0, 0.125, 1024.0, 3.0]))
def test_scaling_a_summary_is_scaling_the_tensor_but_for_its_bits(factor: float) -> None:
    values = random(20, 30)
    scaled, expected = scale(of(values), factor), of(values * factor)
    for name in ("fingerprint", "multiset"):
        expected[name] = scaled[name] = 0
    for name in ("minimum", "maximum", "smallest", "row_largest", "column_largest"):
        np.testing.assert_allclose(scaled[name], expected[name], rtol=1e-15)
        scaled[name] = expected[name]

    assert_equal_up_to_rounding(scaled, expected)


def test_scaling_takes_one_factor_per_summary_and_changes_no_input() -> None:
    summaries = np.array([of([1.0, 2.0]), of([3.0, 4.0])], dtype=SUMMARY)
    before = summaries.tobytes()

    scaled = scale(summaries, np.array([2.0, 10.0]))

    assert scaled["sum"].tolist() == [6.0, 70.0]
    assert scaled["row_squares"][:, 0].tolist() == [20.0, 2500.0]
    assert summaries.tobytes() == before


@given(st.lists(st.floats(-1e6, 1e6) | st.sampled_from([np.nan, np.inf, -np.inf]), max_size=40))
def test_norm_mean_and_largest_are_those_of_the_finite_elements(values: list[float]) -> None:
    finite = np.array([x for x in values if np.isfinite(x)])
    seen = of(values)

    assert summary.finite_count(seen) == len(finite)
    assert summary.nonfinite_count(seen) == len(values) - len(finite)
    np.testing.assert_allclose(summary.norm(seen), np.linalg.norm(finite), rtol=1e-12)
    np.testing.assert_allclose(summary.largest(seen), np.max(np.abs(finite), initial=0))
    if len(finite):
        np.testing.assert_allclose(summary.mean(seen), finite.mean(), atol=1e-9)
        np.testing.assert_allclose(summary.std(seen), finite.std(), atol=1e-7 * (1 + abs(finite.mean())))
    else:
        assert np.isnan(summary.mean(seen))
        assert np.isnan(summary.std(seen))


def test_the_distance_of_two_summaries_is_zero_for_equal_tensors_and_exact_for_one_element() -> None:
    baseline = random(100)
    candidate = baseline.copy()
    candidate[17] += 0.5

    assert summary.distance(of(baseline), of(baseline)) == 0
    np.testing.assert_allclose(summary.distance(of(baseline), of(candidate)), 0.5, rtol=1e-12)


@pytest.mark.parametrize("name", ["sum", "sketch", "row_squares"])
def test_merging_moments_that_overflowed_warns_nobody(name: str) -> None:
    up, down = empty(), empty()
    up[name], down[name] = np.inf, -np.inf

    assert np.all(np.isnan(merge([up, down])[name]))


def test_the_distance_of_moments_that_overflowed_is_unknown_and_warns_nobody() -> None:
    seen = empty()
    seen["sketch"] = np.inf

    assert np.isnan(summary.distance(seen, seen))


def test_the_largest_of_zeros_is_not_minus_zero() -> None:
    zeros = np.zeros(1, SUMMARY)

    assert not np.signbit(summary.largest(zeros)).any()


def test_norms_and_distances_are_taken_of_each_site() -> None:
    baseline = np.array([of(random(8, seed=seed)) for seed in range(3)], dtype=SUMMARY)
    candidate = np.array([of(random(8, seed=seed + 5)) for seed in range(3)], dtype=SUMMARY)

    for function in (summary.norm, summary.mean, summary.std, summary.largest, summary.finite_count):
        np.testing.assert_array_equal(function(baseline), [function(one) for one in baseline])
    apart = summary.distance(baseline, candidate)
    np.testing.assert_allclose(apart, [summary.distance(*pair) for pair in zip(baseline, candidate, strict=True)])
    assert apart.shape == (3,)


def test_numbers_that_no_float64_holds_scale_to_what_is_not_finite_without_a_warning() -> None:
    one = of([3.0])
    one["sum_of_squares"] = np.inf

    for factor in (1e308, 1e-308):
        assert not np.isfinite(scale(one, factor)["sum_of_squares"])


@pytest.mark.parametrize("name", sorted(summary.LARGEST))
def test_the_ends_of_a_dtype_are_those_that_torch_says(name: str) -> None:
    about = torch.finfo(getattr(torch, name))

    assert summary.LARGEST[name] == about.max
    assert summary.SMALLEST_NORMAL.get(name, about.smallest_normal) == about.smallest_normal


@given(st.integers(0, 2**32))
def test_differences_of_many_tensors_are_those_of_each(seed: int) -> None:
    generator = np.random.default_rng(seed)
    after, before = (np.array([of(generator.standard_normal(12) * 10.0**power) for power in (-9, 0, 7)]) for _ in "ab")
    after[0], same = before[0], np.array([False, True, False])
    found = summary.differences(after, before, same)
    for row, (one, other, equal) in enumerate(zip(after, before, same, strict=True)):
        expected = add([one], [0.0]) if equal else add([one, other], [1.0, -1.0])
        for name in SUMMARY_NAMES:
            np.testing.assert_array_equal(found[row][name], expected[name], err_msg=name)


@given(st.lists(st.floats(width=64), max_size=9))
def test_norms_of_single_summaries_are_those_of_arrays_to_the_bit(squares: list[float]) -> None:
    summaries = empty(len(squares))
    summaries["sum_of_squares"] = squares

    assert repr([summary.norm_of(one) for one in summaries]) == repr(summary.norm(summaries).tolist())
    assert repr(summary.norms_of(list(summaries))) == repr(summary.norm(summaries).tolist())


def test_what_is_not_finite_is_known_by_its_counts() -> None:
    for value in (float("nan"), float("inf"), -float("inf")):
        assert not summary.is_finite(of([1.0, value]))
    assert summary.is_finite(of([1.0, 0.0]))
    assert summary.is_finite(empty()[()])
