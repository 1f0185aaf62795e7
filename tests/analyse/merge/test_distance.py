"""How far apart two summaries are, and where that is not a number."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tests.made_up import Array, random, summary_of
from traindiff.analyse.merge.distance import Pair, best_fit, difference, equal_bits, measure, rescaled, same_bits
from traindiff.analyse.merge.site import MergedSite, RankPart, SiteKey
from traindiff.core.shards import Shard

X = random(8, 6, seed=0)


def entry(values: Array, **about: Any) -> MergedSite:
    key = SiteKey("grad", "", "fc.weight", "grad")
    return MergedSite(
        key=key, order=0, dtype=values.dtype.name, shape=values.shape, summary=summary_of(values), **about
    )


def pair(baseline: Array, candidate: Array, **about: Any) -> Pair:
    return Pair(baseline=entry(baseline, **about), candidate=entry(candidate, **about))


def spoiled(place: int, value: float = math.nan) -> Array:
    values = X.copy()
    values.reshape(-1)[place] = value
    return values


def test_one_element_is_so_much_of_the_whole() -> None:
    candidate = X.copy()
    candidate[2, 3] += 0.5

    assert difference(pair(X, candidate)) == pytest.approx(0.5 / np.linalg.norm(X), rel=1e-5)


def test_equal_bits_are_known_only_of_whole_observations_of_one_form() -> None:
    assert equal_bits(pair(X, X.copy()))
    assert not equal_bits(pair(X, X, exact=False))
    assert not equal_bits(pair(X, X.reshape(6, 8)))
    assert not equal_bits(pair(np.zeros(4, np.float32), np.zeros(4, np.int32)))
    assert not equal_bits(Pair(baseline=entry(X), candidate=entry(X, factor=2.0)))
    assert not equal_bits(pair(X, spoiled(0, 1.0)))


@pytest.mark.parametrize(
    ("baseline", "candidate", "apart"),
    [
        (X, X[:, :5], math.inf),
        (X, spoiled(3), math.inf),
        (spoiled(3), spoiled(4), math.inf),
        (spoiled(3), spoiled(3, math.inf), math.inf),
        (spoiled(3), spoiled(3), 0.0),
        (X * 0, X, math.inf),
        (X * 0, X * -0.0, 0.0),
        (X, X * 0, 1.0),
        (X, X.astype(np.float64), 0.0),
        (np.arange(4), np.arange(4), 0.0),
        (np.arange(4), np.arange(1, 5), None),
        (X, X.astype(np.int64), None),
        (X.astype(np.int64), X, None),
    ],
)
def test_what_cannot_be_measured_is_without_bound_and_whole_numbers_have_no_distance(
    baseline: Array, candidate: Array, apart: float | None
) -> None:
    assert difference(pair(baseline, candidate)) == apart


@pytest.mark.parametrize("factor", [2.0, -2.0, 0.25])
def test_a_rescaled_baseline_is_held_against_the_same_candidate(factor: float) -> None:
    scaled = rescaled(pair(X, X * np.float32(factor)), factor)

    assert difference(scaled) == 0.0
    assert scaled.baseline.summary["sum"] == pytest.approx(factor * float(X.sum(dtype=float)), rel=1e-4)
    assert not scaled.baseline.exact


def test_the_best_multiple_leaves_what_stands_at_right_angles_to_the_baseline() -> None:
    baseline, candidate = np.zeros(20, np.float32), np.zeros(20, np.float32)
    baseline[3] = 1.5
    candidate[3], candidate[11] = 3.0, 4.0

    factor, left_over = best_fit(entry(baseline), entry(candidate))

    assert factor == pytest.approx(2.0)
    assert left_over == pytest.approx(4.0 / 5.0)


def test_numbers_too_large_for_their_squares_have_no_distance() -> None:
    huge = np.full(4, 1e300)

    assert difference(pair(huge, -huge)) == math.inf


def summed(*terms: Array, dtype: str = "float32") -> MergedSite:
    """A sum of which the terms are known, one from each rank."""
    parts = tuple(RankPart(0, rank, Shard.whole(term.shape), summary_of(term)) for rank, term in enumerate(terms))
    found = entry(np.sum(terms, axis=0, dtype=np.float32), exact=False, parts=parts)
    return replace(found, dtype=dtype)


Y = random(8, 6, seed=1)


@pytest.mark.parametrize(
    ("baseline", "candidate", "same"),
    [
        (entry(X), entry(X), True),
        (entry(X), entry(Y), False),
        (entry(X), entry(X.astype(np.float64)), False),
        (entry(X), entry(X, factor=2.0), None),  # under another scale
        (summed(X, Y), summed(X, Y), True),
        (summed(X, Y), summed(X, X), False),
        (summed(X, Y), summed(X, Y, dtype="float16"), False),
        (summed(X, Y), summed(X, Y, X), None),  # divided among other ranks
        (summed(X, Y), entry(X), None),
        (entry(X), summed(X, Y), None),
        (entry(X, exact=False), entry(X, exact=False), None),  # no terms
    ],
)
def test_bits_are_the_same_or_others_or_unknown(baseline: MergedSite, candidate: MergedSite, same: bool | None) -> None:
    assert same_bits(Pair(baseline=baseline, candidate=candidate)) is same


@given(arrays(np.float64, (5, 2, 64), elements=st.floats(width=64)))
def test_many_pairs_measured_at_once_differ_as_each_of_them_does(sketches: Array) -> None:
    """To the bit, with numbers whose squares overflow, infinities and NaN."""
    pairs = [[], []]
    for both in sketches:
        sides = [entry(X + number) for number in (0.0, 1.0)]
        for side, sketch in zip(sides, both, strict=True):
            side.summary["sketch"] = sketch
        for one in pairs:
            one.append(Pair(baseline=sides[0], candidate=sides[1]))
    measure(pairs[0])

    assert [one.known_apart is not None for one in pairs[0]] == [True] * 5
    assert repr([difference(one) for one in pairs[0]]) == repr([difference(one) for one in pairs[1]])
