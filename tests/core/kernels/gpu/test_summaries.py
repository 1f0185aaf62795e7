"""The GPU kernel against the reference: any bits, any dtype, any shape, any shard."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.kernels.gpu.expected import actual_summary, assert_matches_the_reference, expected_summary
from tests.core.kernels.rounding import assert_equal_up_to_rounding
from tests.core.kernels.tensors import Case, cases, from_bits
from traindiff.core import summary
from traindiff.core.kernels.gpu.layout import DTYPES
from traindiff.core.shards import Shard

NAMES = sorted(str(dtype).removeprefix("torch.") for dtype in DTYPES)
HASHED = tuple(name for name in NAMES if name not in ("uint16", "uint32"))  # those that the strategies know


def random(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=40)
@given(case=cases(HASHED), first=st.integers(0, 300), per_part=st.sampled_from([50, 300, 8192]))
def test_any_tensor_has_the_references_summary(device: torch.device, case: Case, first: int, per_part: int) -> None:
    shard = Shard.whole(case.shape) if first % 2 or not case.shape else Shard.of_batch(case.shape, first=first)
    assert_matches_the_reference(case.tensor, shard, device, elements_per_part=per_part)


@pytest.mark.parametrize("name", NAMES)
def test_every_bit_pattern_of_a_byte_or_two_is_read_as_what_it_spells(device: torch.device, name: str) -> None:
    dtype = getattr(torch, name)
    if name == "bool":
        tensor = torch.arange(300) % 3 == 0
    elif dtype.itemsize == 1:
        tensor = from_bits(np.arange(256, dtype=np.uint8), name)
    elif dtype.itemsize == 2:
        tensor = from_bits(np.arange(0, 65536, 13, dtype=np.uint16), name)
    else:
        wide = np.random.default_rng(0).integers(0, 2**63, 3000, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
        tensor = from_bits(wide.astype({4: np.uint32, 8: np.uint64}[dtype.itemsize]), name)
    assert_matches_the_reference(tensor, Shard.whole(tuple(tensor.shape)), device, elements_per_part=1000)


@pytest.mark.parametrize("size", [0, 1, 2, 63, 64, 65, 511, 512, 513, 1025])
def test_lengths_around_blocks_and_tiles(device: torch.device, size: int) -> None:
    for start in (0, 1, 63, 64, 2**40 + 17):
        shard = Shard(shape=(size,), global_shape=(2**41,), offset=(start,))
        assert_matches_the_reference(random((size,), seed=size), shard, device, elements_per_part=200)


SHAPES = [(64, 48), (5, 300), (40, 3), (1, 700), (33, 1), (20, 17), (3, 7, 40), (6, 2, 3, 5)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_and_columns_of_parameters_and_of_batches(device: torch.device, shape: tuple[int, ...]) -> None:
    tensor = random(shape)
    for shard in (Shard.whole(shape), Shard.of_batch(shape, first=3)):
        assert_matches_the_reference(tensor, shard, device, elements_per_part=400)


@pytest.mark.parametrize("shape", [(50, 40), (7, 3, 60)], ids=str)
@pytest.mark.parametrize("cuts", [(0, 13, 14, 700), (1000,)], ids=str)
def test_flat_ranges_merge_to_the_whole(device: torch.device, shape: tuple[int, ...], cuts: tuple[int, ...]) -> None:
    whole = random(shape)
    parts = []
    for start, stop in itertools.pairwise((0, *cuts, whole.numel())):
        shard = Shard(shape=(stop - start,), global_shape=shape, offset=(start,))
        parts.append(actual_summary(whole.reshape(-1)[start:stop], shard, device, elements_per_part=300))
    assert_equal_up_to_rounding(summary.merge(parts), expected_summary(whole, Shard.whole(shape)))


BOXES = [
    ((40, 10), (40, 30), (0, 20)),  # columns, as in tensor parallelism
    ((8, 30), (40, 30), (16, 0)),  # rows
    ((4, 5, 6), (8, 10, 12), (1, 2, 3)),
    ((2, 3, 2, 4), (5, 6, 7, 8), (1, 1, 1, 1)),
    ((3, 20, 16), (-1, 20, 64), (5, 0, 16)),  # heads of a batch
    ((3, 8, 70), (-1, 20, 70), (5, 8, 0)),  # a sequence of a batch
    ((2, 4, 5, 3), (-1, 4, 5, 9), (1, 0, 0, 6)),  # a part of an image's width
    ((0, 10), (40, 30), (0, 20)),
]


@pytest.mark.parametrize(("shape", "whole", "offset"), BOXES, ids=str)
def test_boxes_have_the_references_summary(
    device: torch.device, shape: tuple[int, ...], whole: tuple[int, ...], offset: tuple[int, ...]
) -> None:
    shard = Shard(shape=shape, global_shape=whole, offset=offset)
    for per_part in (8192, 60):
        assert_matches_the_reference(random(shape), shard, device, elements_per_part=per_part)


def test_the_same_launches_give_the_same_bits(device: torch.device) -> None:
    tensor, shard = random((30, 50)), Shard.whole((30, 50))
    first = actual_summary(tensor, shard, device, elements_per_part=100)
    again = actual_summary(tensor, shard, device, elements_per_part=100)
    assert first.tobytes() == again.tobytes()


@pytest.mark.gpu
def test_a_large_tensor_has_the_cpu_kernels_summary(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("minutes in the interpreter")
    for dtype in (torch.float32, torch.bfloat16):
        tensor = random((4099, 8191)).to(dtype)
        tensor[17, 5] = float("nan")
        assert_matches_the_reference(tensor, Shard.whole((4099, 8191)), device)
