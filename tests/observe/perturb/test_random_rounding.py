"""Random rounding: at most one unit in the last place, reproducible, and nothing special becomes something else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from traindiff.observe.torch.perturb.ulp import is_rounded, randomly_rounded, rounding_key

DTYPES = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}


def numbers(dtype: torch.dtype, count: int = 30_000) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(3)).to(dtype)


def ulps(before: Tensor, after: Tensor) -> Tensor:
    bits = DTYPES[before.dtype]
    return after.contiguous().view(bits) - before.contiguous().view(bits)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values", [numbers, lambda dtype: torch.full((30_000,), 0.1, dtype=dtype)])
def test_each_element_moves_by_minus_one_zero_or_one_ulp_with_equal_probability(
    values: object, dtype: torch.dtype
) -> None:
    before = values(dtype)
    moved = ulps(before, randomly_rounded(before, 7))

    counts = [(moved == step).sum().item() / len(before) for step in (-1, 0, 1)]
    assert sum(counts) == 1.0
    assert counts == pytest.approx([1 / 3] * 3, abs=0.012)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_becomes_zero_infinite_or_nan_or_stops_being_it(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, -torch.nan], dtype=dtype).repeat(64)
    edges = torch.tensor([info.max, info.min], dtype=dtype).repeat(64)
    tiny = torch.ones(64, dtype=DTYPES[dtype]).view(dtype)  # the smallest subnormal

    assert not ulps(special, randomly_rounded(special, 1)).any()
    assert ulps(edges, randomly_rounded(edges, 1)).unique().tolist() == [-1, 0]
    assert ulps(tiny, randomly_rounded(tiny, 1)).unique().tolist() == [0, 1]
    assert ulps(-tiny, randomly_rounded(-tiny, 1)).unique().tolist() == [0, 1]


def test_the_same_key_moves_alike_and_others_differently() -> None:
    before = numbers(torch.float32)
    same, other = rounding_key(1, 0, "a"), rounding_key(1, 0, "b")

    assert torch.equal(randomly_rounded(before, same), randomly_rounded(before, same))
    moved, others = (ulps(before, randomly_rounded(before, key)).double() for key in (same, other))
    assert abs(torch.corrcoef(torch.stack([moved, others]))[0, 1]) < 0.02
    assert abs(torch.corrcoef(torch.stack([moved[1:], moved[:-1]]))[0, 1]) < 0.02


def test_long_tensors_are_rounded_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("traindiff.observe.torch.perturb.ulp._BLOCK", 1000)
    before = torch.full((3000,), 0.5)
    moved = ulps(before, randomly_rounded(before, 1))

    assert not torch.equal(moved[:1000], moved[1000:2000])
    assert moved.abs().max() == 1


def test_strides_shapes_and_the_tensor_itself_are_kept() -> None:
    image = numbers(torch.float32, 2 * 3 * 4 * 5).view(2, 3, 4, 5)
    for before in (image.to(memory_format=torch.channels_last), image.transpose(1, 3), image[0, 0, 0, 0], image[:0]):
        copy = before.clone()
        after = randomly_rounded(before, 1)
        assert after.stride() == before.stride()
        assert torch.equal(before, copy)
        assert (after - before).abs().sum() <= 1e-6 * before.abs().sum()
        contiguous = randomly_rounded(before.contiguous(), 1)
        assert torch.equal(after, contiguous)


def test_complex_tensors_are_rounded_part_by_part_and_others_left_alone() -> None:
    before = torch.view_as_complex(numbers(torch.float32).view(-1, 2))
    for tensor in (before, before.conj(), before.conj().imag):
        after = randomly_rounded(tensor, 1)
        assert not torch.equal(after, tensor)
        assert torch.allclose(after, tensor, rtol=2e-7, atol=0)
    assert is_rounded(before)
    for left_alone in (
        torch.ones(3, dtype=torch.int64), torch.ones(3).to(torch.float8_e4m3fn), torch.ones(3).to_sparse()
    ):  # fmt: skip
        assert not is_rounded(left_alone)


def test_no_generator_is_drawn_from() -> None:
    before = torch.get_rng_state()
    randomly_rounded(numbers(torch.float32), 1)

    assert torch.equal(torch.get_rng_state(), before)
