"""Products of matrices with signs: the CPU kernel to the bit, and torch's way beside it."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from traindiff.core.kernels import projection
from traindiff.core.kernels.projection import BLOCK, LANES, TOTALS, normalized, projected, summed
from traindiff.core.witness import PROBES
from traindiff.errors import UnsupportedTensorError

kernel = pytest.importorskip("traindiff.core.kernels.cpu.projection")

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
WIDTHS = (0, 1, 7, 8, 9, 255, 256, 257, 263, 264, 512, 1000)


def signs_for(columns: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(columns)
    signs = torch.randint(0, 2, (PROBES, columns), generator=generator) * 2 - 1
    return signs.to(torch.float64 if dtype == torch.float64 else torch.float32)


def expected(matrix: torch.Tensor, signs: torch.Tensor) -> NDArray[np.float64]:
    """The sums as the kernel is documented to round them."""
    values, factors = matrix.to(signs.dtype).numpy(), signs.numpy()
    rows, columns = values.shape
    totals = np.zeros((rows, PROBES, LANES))
    with np.errstate(invalid="ignore", over="ignore"):
        for first in range(0, columns, BLOCK):
            sums = np.zeros((rows, PROBES, LANES), values.dtype)
            for column in range(first, min(first + BLOCK, columns), LANES):
                last = min(column + LANES, first + BLOCK, columns)
                sums[:, :, : last - column] += values[:, None, column:last] * factors[None, :, column:last]
            totals += sums
        while totals.shape[2] > 1:
            totals = totals[:, :, ::2] + totals[:, :, 1::2]
    return totals[:, :, 0]


def by_torch(matrix: torch.Tensor, signs: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    with monkeypatch.context() as patch:
        patch.setattr(projection, "installed", lambda _: ())
        return projected(matrix, signs)


@pytest.mark.parametrize("way", ["kernel", "torch"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("columns", WIDTHS[1:])
@pytest.mark.parametrize("centered", [False, True])
def test_rows_are_normalized_before_they_are_multiplied(
    centered: bool, columns: int, dtype: torch.dtype, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(columns)
    wide = torch.randn(2, 5, columns + 3, generator=generator, dtype=torch.float64) + 2.0
    x, gradient = (one[:, :columns].to(dtype) for one in wide)
    signs = signs_for(columns, dtype)
    values = x.double()
    values = values - values.mean(1, keepdim=True) if centered else values
    terms = gradient.double() * values / (values.square().mean(1, keepdim=True) + 1e-5).sqrt()
    if way == "torch":
        monkeypatch.setattr(projection, "installed", lambda _: ())

    found, shift = normalized(x, gradient, signs, eps=1e-5, centered=centered)

    unit = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    allowed = 40 * unit * (terms.abs().sum(1, keepdim=True) + columns)
    assert ((found - terms @ signs.double().T).abs() <= allowed).all()
    far = x.double().mean(1).square() / (values.square().mean(1) + 1e-5) if centered else torch.zeros(5).double()
    assert float(shift) == pytest.approx(float((far * gradient.double().square().sum(1)).sum()), rel=1e-4)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 11])
def test_sums_round_as_documented(rows: int, columns: int, dtype: torch.dtype) -> None:
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(dtype)
    signs = signs_for(columns, dtype)

    found = projected(matrix, signs)

    assert found.dtype == torch.float64
    assert found.shape == (rows, PROBES)
    assert (found.numpy() == expected(matrix, signs)).all()


@given(
    dtype=st.sampled_from(FLOATS),
    rows=st.integers(1, 9),
    columns=st.integers(1, 600),
    scale=st.sampled_from([1e-30, 1e-6, 1.0, 1e4]),
    seed=st.integers(0, 99),
)
def test_the_error_is_within_its_bound(dtype: torch.dtype, rows: int, columns: int, scale: float, seed: int) -> None:
    matrix = (torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)
    signs = signs_for(columns, dtype)
    exact = matrix.double() @ signs.double().T

    error = (projected(matrix, signs) - exact).abs()

    u = 2.0**-53 if dtype == torch.float64 else 2.0**-24
    bound = (columns if dtype == torch.float64 else BLOCK // LANES) * u * matrix.double().abs().sum(1, keepdim=True)
    assert (error <= bound + 1e-12 * exact.abs()).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_it_does_not_matter_how_a_matrix_lies_in_memory(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.randn(40, 60).to(dtype)
    for matrix in (
        whole, whole[3:, 5:42], whole[::3], whole.T, whole[:, ::2], whole[:1].expand(7, 60), whole[:, :1].expand(40, 7),
        whole.flip(0), whole.requires_grad_().detach(), whole[:, 3:4], whole.view(-1)[7:607].view(20, 30),
    ):  # fmt: skip
        signs = signs_for(matrix.shape[1], dtype)
        found = projected(matrix, signs)
        assert torch.equal(found, projected(matrix.clone(memory_format=torch.contiguous_format), signs)) or (
            not kernel.reads(matrix)
        )
        torch.testing.assert_close(found, by_torch(matrix, signs, monkeypatch), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("column", [0, 100, 299, 300])
def test_rows_with_nan_or_infinity_show_it_and_others_are_untouched(
    dtype: torch.dtype, value: float, column: int
) -> None:
    matrix = torch.randn(7, 301).to(dtype)
    signs = signs_for(301, dtype)
    before = projected(matrix, signs)
    matrix[4, column] = value

    found = projected(matrix, signs)

    others = [0, 1, 2, 3, 5, 6]
    assert torch.equal(found[others], before[others])
    if value != value:
        assert found[4].isnan().all()
    else:
        assert torch.equal(found[4], (value * signs[:, column]).double())


def test_subnormal_numbers_count() -> None:
    for dtype, least in ((torch.float32, 2.0**-149), (torch.bfloat16, 2.0**-133), (torch.float16, 2.0**-24)):
        matrix = torch.full((3, 20), least, dtype=torch.float64).to(dtype)
        found = projected(matrix, torch.ones(PROBES, 20))
        assert (found == 20 * least).all()


def test_nothing_is_read_behind_the_end_of_memory() -> None:
    size = mmap.PAGESIZE
    held = mmap.mmap(-1, 2 * size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(held))
    protect = ctypes.CDLL(None).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert protect(address + size, size, 0) == 0
    try:
        memory = torch.frombuffer(held, dtype=torch.float32, count=size // 4)
        for rows, columns in ((1, 3), (3, 5), (5, 13), (4, 8)):
            last = memory[-rows * columns :].view(rows, columns)
            assert (projected(last, torch.ones(PROBES, columns)) == 0.0).all()
    finally:
        assert protect(address + size, size, mmap.PROT_READ | mmap.PROT_WRITE) == 0


def test_elements_that_cannot_be_read_are_an_error() -> None:
    from torch._subclasses import FakeTensorMode

    def inside(matrix: torch.Tensor) -> torch.Tensor:
        with pytest.raises(UnsupportedTensorError):
            kernel.projected(matrix, torch.ones(PROBES, 3))
        return matrix.sum()

    torch.func.grad(inside)(torch.ones(2, 3))
    with FakeTensorMode() as mode:
        assert not kernel.reads(mode.from_tensor(torch.ones(2, 3)))


def test_results_are_where_the_matrix_is_whatever_the_default_device() -> None:
    matrix, signs = torch.ones(2, 3), torch.ones(PROBES, 3)
    with torch.device("meta"):
        found = projected(matrix, signs)
        assert summed(found, found)[0] == 18.0


@pytest.mark.parametrize("rows", [0, 1, 2, 513])
@pytest.mark.parametrize("single", [False, True])
def test_sums_of_products(rows: int, *, single: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(rows)
    left = torch.randn(rows, PROBES, generator=generator, dtype=torch.float64)
    right = torch.randn(1 if single else rows, PROBES, generator=generator, dtype=torch.float64)
    terms = left * right

    found = summed(left, right)

    torch.testing.assert_close(found[:PROBES], terms.sum(0))
    torch.testing.assert_close(found[PROBES], terms.square().sum())
    before = torch.cat([torch.zeros(1, PROBES), terms[:-1]])[: len(terms)]
    torch.testing.assert_close(found[PROBES + 1], (terms - before).square().sum())
    assert found.shape == (TOTALS,)
    monkeypatch.setattr(projection, "installed", lambda _: ())
    torch.testing.assert_close(summed(left, right), found)


@pytest.mark.parametrize("rows", [0, 1, 7, 300])
def test_sums_of_words(rows: int) -> None:
    words = pytest.importorskip("traindiff.core.kernels.cpu.words")
    table = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, (rows, words.LANES))

    assert words.sums(table.ctypes.data, rows) == table.sum(0).tobytes()
