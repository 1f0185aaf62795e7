"""The pseudo-random weights: golden values, and what the fingerprint needs of them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.core.kernels import oracle
from traindiff.core.kernels import reference as hashing


def test_splitmix64_gives_the_published_sequence() -> None:
    # The first outputs of the reference implementation seeded with 0 and with 1234567.
    assert int(hashing.splitmix64(0)) == 0xE220A8397B1DCDAF
    assert int(hashing.splitmix64(1234567)) == 6457827717110365317


@pytest.mark.parametrize("blocks", [range(300), range(2**40, 2**40 + 300)])
def test_weights_and_signs_of_blocks_are_those_of_the_definitions(blocks: range) -> None:
    block = np.array(blocks, dtype=np.uint64)

    assert hashing.block_weights(block).tolist() == [oracle.block_weight(one) for one in blocks]
    signs = hashing.block_signs(block)
    for lane in (0, 1, 31, 63):
        negated = (signs >> np.uint64(lane)) & np.uint64(1)
        assert [1 - 2 * int(one) for one in negated] == [oracle.sign(one * 64 + lane) for one in blocks]


def test_lane_weights_are_distinct_odd_32_bit_numbers() -> None:
    weights = hashing.LANE_WEIGHTS.tolist()

    assert weights == [oracle.lane_weight(lane) for lane in range(64)]
    assert len(set(weights)) == 64
    assert all(one % 2 == 1 and 2**31 <= one < 2**32 for one in weights)


def test_every_weight_is_odd_so_that_no_difference_of_bits_vanishes() -> None:
    blocks = np.arange(10_000, dtype=np.uint64)

    assert np.all(hashing.block_weights(blocks) % np.uint64(2) == 1)


@pytest.mark.parametrize("width", [8, 16, 32])
def test_the_multiset_hash_of_narrow_elements_is_that_of_the_definitions(width: int) -> None:
    bits = [number * (2**width - 1) // 999 for number in range(1000)]

    actual = hashing.multiset_hash(np.array(bits, dtype=np.uint64), wide=False)

    assert actual.tolist() == [oracle.multiset_hash(one, width) for one in bits]


def test_the_multiset_hash_tells_all_16_bit_patterns_apart() -> None:
    bits = np.arange(2**16, dtype=np.uint64)

    assert len(np.unique(hashing.multiset_hash(bits, wide=False))) == 2**16


def test_folding_is_a_bijection_that_keeps_the_low_half_of_small_numbers() -> None:
    bits = np.random.default_rng(0).integers(0, 2**64, size=1000, dtype=np.uint64)

    folded = hashing.fold(bits)

    assert np.array_equal(hashing.fold(folded), bits)  # it is its own inverse
    assert hashing.fold(np.array([5], dtype=np.uint64)).tolist() == [5]
