"""What a fingerprint must show, and what the index-free variant must not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from tests.core.kernels.tensors import Case, cases, from_bits
from traindiff.core.kernels import summarize
from traindiff.core.kernels.reference import LANE_WEIGHTS, block_weights, fold
from traindiff.core.shards import Shard

pytestmark = pytest.mark.usefixtures("kernel")

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def summary_of(tensor: Tensor) -> np.void:
    return summarize(tensor, Shard.whole(tuple(tensor.shape)))


@given(cases(), st.data())
def test_one_changed_element_always_shows(case: Case, data: st.DataObject) -> None:
    assume(case.bits and case.dtype != "bool")
    bits = np.array(case.bits, dtype=UNSIGNED[case.tensor.dtype.itemsize])
    place = data.draw(st.integers(0, len(bits) - 1))
    flipped = data.draw(st.integers(1, 2 ** (8 * bits.itemsize) - 1))
    before = summary_of(from_bits(bits, case.dtype))
    bits[place] ^= bits.dtype.type(flipped)

    assert summary_of(from_bits(bits, case.dtype))["fingerprint"] != before["fingerprint"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_every_single_bit_flip_shows_in_both_fingerprints(dtype: torch.dtype) -> None:
    tensor = torch.arange(1, 6, dtype=torch.float64).to(dtype)
    before = summary_of(tensor)
    bits = tensor.view({2: torch.uint16, 4: torch.uint32, 8: torch.uint64}[dtype.itemsize]).numpy()
    for place in range(len(bits)):
        for bit in range(8 * dtype.itemsize):
            flip = bits.dtype.type(1 << bit)
            bits[place] ^= flip
            after = summary_of(tensor)
            bits[place] ^= flip
            assert after["fingerprint"] != before["fingerprint"]
            assert after["multiset"] != before["multiset"]


def test_minus_zero_is_not_zero() -> None:
    zero, minus_zero = summary_of(torch.zeros(3)), summary_of(-torch.zeros(3))

    assert zero["fingerprint"] != minus_zero["fingerprint"]
    assert zero["zero"] == minus_zero["zero"] == 3


@given(st.permutations(range(40)), st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.int16]))
def test_a_permutation_keeps_the_multiset_and_changes_the_fingerprint(order: list[int], dtype: torch.dtype) -> None:
    tensor = torch.arange(40).to(dtype)
    permuted = tensor[torch.tensor(order)]

    before, after = summary_of(tensor), summary_of(permuted)

    assert after["multiset"] == before["multiset"]
    assert (after["fingerprint"] == before["fingerprint"]) == (order == list(range(40)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e5m2])
def test_a_transposition_keeps_the_multiset_and_changes_the_fingerprint(dtype: torch.dtype) -> None:
    tensor = torch.randn(12, 8, generator=torch.Generator().manual_seed(0)).to(dtype)

    before, after = summary_of(tensor), summary_of(tensor.T)

    assert after["multiset"] == before["multiset"]
    assert after["fingerprint"] != before["fingerprint"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn])
def test_exchanging_round_numbers_in_different_blocks_shows(dtype: torch.dtype) -> None:
    # In float64 the bits of 1.0 and 2.0 differ by 2^52 only: without folding, one exchange in 4,096 was lost.
    whole = summary_of(torch.ones(64 * 400, dtype=torch.float64).to(dtype))
    seen = {int(whole["fingerprint"])}
    for block in range(0, 400, 4):
        tensor = torch.ones(64 * 400, dtype=torch.float64)
        tensor[64 * block + 5] = 2.0
        seen.add(int(summary_of(tensor.to(dtype))["fingerprint"]))

    assert len(seen) == 101


def test_exchanging_1_and_2_in_float64_shows_for_every_pair_of_blocks() -> None:
    # Position of the 2.0 in a tensor of ones, 64 elements apart: the fingerprint must tell all from all.
    one, two = fold(np.array([1.0, 2.0]).view(np.uint64))
    with np.errstate(over="ignore"):
        change = block_weights(np.arange(200_000)) * LANE_WEIGHTS[5] * (two - one)

    assert len(np.unique(change)) == 200_000


@given(st.lists(st.sampled_from([0.0, float("nan"), float("inf"), float("-inf"), 1.0]), min_size=1, max_size=90))
def test_the_nonfinite_fingerprint_is_of_places_and_kinds_only(values: list[float]) -> None:
    tensor = torch.tensor(values)
    finite_changed = torch.where(tensor.isfinite(), tensor + 5, tensor)
    moved = torch.cat([tensor[-1:], tensor[:-1]])

    summary = summary_of(tensor)

    assert summary_of(finite_changed)["nonfinite"] == summary["nonfinite"]
    kinds, moved_kinds = (torch.nan_to_num(t, nan=7, posinf=8, neginf=9) * ~t.isfinite() for t in (tensor, moved))
    same = torch.equal(torch.nan_to_num(kinds), torch.nan_to_num(moved_kinds))
    assert (summary_of(moved)["nonfinite"] == summary["nonfinite"]) == same
