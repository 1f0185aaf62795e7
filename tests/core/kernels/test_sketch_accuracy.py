"""How well two sketches estimate the size of a difference, measured on thousands of tensor pairs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from traindiff.core import summary
from traindiff.core.kernels import summarize
from traindiff.core.kernels.reference import BLOCK, block_signs, block_weights
from traindiff.core.shards import Shard
from traindiff.core.summary import SKETCH_SIZE

PAIRS, SIZE = 1500, 2048
EXPECTED_SPREAD = 0.128
"""Standard deviation of log2 of the root of a chi-squared variable with 64 degrees of freedom, over 64."""

Array = NDArray[np.float64]


def constant(generator: np.random.Generator) -> Array:
    return np.ones((PAIRS, SIZE)) * generator.uniform(-1, 1, (PAIRS, 1))


def gaussian(generator: np.random.Generator) -> Array:
    return generator.standard_normal((PAIRS, SIZE))


def lognormal(generator: np.random.Generator) -> Array:
    return generator.lognormal(sigma=0.7, size=(PAIRS, SIZE))


def uniform_with_offset(generator: np.random.Generator) -> Array:
    return generator.uniform(-1, 3, (PAIRS, SIZE))


def one_in_four(generator: np.random.Generator) -> Array:
    return generator.standard_normal((PAIRS, SIZE)) * (generator.random((PAIRS, SIZE)) < 0.25)


def alternating(generator: np.random.Generator) -> Array:
    return constant(generator) * np.where(np.arange(SIZE) % 2, 1.0, -1.0)


DISTRIBUTIONS = (constant, gaussian, lognormal, uniform_with_offset, one_in_four, alternating)


def estimates(differences: Array, first: NDArray[np.int64]) -> Array:
    """Norms of the differences as their sketches estimate them; row i begins at global index first[i]."""
    index = (first[:, None] + np.arange(SIZE)).astype(np.uint64)
    block, lane = index // np.uint64(BLOCK), index % np.uint64(BLOCK)
    bucket = (lane + (block_weights(block) >> np.uint64(58))) % np.uint64(SKETCH_SIZE)
    negated = ((block_signs(block) >> lane) & np.uint64(1)).astype(bool)
    place = bucket.astype(np.int64) + SKETCH_SIZE * np.arange(len(first))[:, None]
    signed = np.where(negated, -differences, differences)
    sketches = np.bincount(place.reshape(-1), signed.reshape(-1), SKETCH_SIZE * len(first))
    return np.linalg.norm(sketches.reshape(len(first), SKETCH_SIZE), axis=1)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_spread_of_the_estimated_distance_is_that_of_64_buckets(
    distribution: Callable[[np.random.Generator], Array],
) -> None:
    generator = np.random.default_rng(7)
    differences = distribution(generator)
    first = generator.integers(0, 2**40, PAIRS)

    errors = np.log2(estimates(differences, first) / np.linalg.norm(differences, axis=1))

    assert abs(np.std(errors) / EXPECTED_SPREAD - 1) < 0.15
    assert abs(np.mean(errors)) < 0.02
    assert np.max(np.abs(errors)) < 0.8


def test_the_measured_estimate_is_the_one_that_two_summaries_give() -> None:
    generator = np.random.default_rng(8)
    first, differences = generator.integers(0, 2**30, PAIRS), gaussian(generator)
    expected = estimates(differences, first)
    for pair in range(20):
        baseline = generator.standard_normal(SIZE)
        shard = Shard(shape=(SIZE,), global_shape=(2**31,), offset=(int(first[pair]),))
        seen = [summarize(torch.from_numpy(x), shard) for x in (baseline, baseline + differences[pair])]

        np.testing.assert_allclose(summary.distance(*seen), expected[pair], rtol=1e-9)
